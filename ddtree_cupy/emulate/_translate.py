"""Turn CUDA source into source that a C++17 host compiler accepts.

Three things cannot be done with macros: dynamic shared memory, kernels named `extern "C"` (they may be called like a
libc function), and the table of exported kernels. Everything else is in `runtime/include`.
"""

import re

from ddtree_cupy.errors import CompileError

_QUALIFIER = r"(?:__shared__|(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)|volatile)"
_DYNAMIC = re.compile(rf"\bextern\s+((?:{_QUALIFIER}\s+)+)([A-Za-z_][\w:<>,\s]*?)\s*\b([A-Za-z_]\w*)\s*\[\s*\]\s*;")
_ALIGNMENT = re.compile(r"(?:__align__|alignas)\s*\(\s*((?:[^()]|\([^()]*\))*?)\s*\)")
_LINE = re.compile(r'#line (\d+) "([^"]*)"')
_ANGLE_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>[^\n]*$", re.MULTILINE)
_PARENTHESES = r"\s*\((?:[^()]|\([^()]*\))*\)"
_WORD = (
    rf"(?:void|static|inline|__forceinline__|(?:__launch_bounds__|__maxnreg__|__block_size__|__cluster_dims__)"
    rf"{_PARENTHESES})\s*"
)
_EXTERN_C = re.compile(rf'\bextern\s*"C"\s+(?=(?:{_WORD})*__global__)')
_KERNEL = re.compile(rf'(\bextern\s*"C"\s+)?\b(?:{_WORD})*__global__\s+(?:{_WORD})*([A-Za-z_]\w*)\s*\(')
_DEVICE_VARIABLE = re.compile(r"\b__device__(?=[^(){};=]*[;=])")
_STATIC_SHARED = re.compile(r"\b(?:static\s+__shared__|__shared__\s+static)\b")
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|endif)", re.MULTILINE)
_MACRO_KERNEL = re.compile(r"^[ \t]*#[ \t]*define\b(?:[^\n\\]|\\\n|\\.)*__global__", re.MULTILINE)
_OF_THE_EMULATOR = ("cooperative_groups", "cuda_pipeline")  # headers that must follow those of the host's compiler
_EXTERN_BLOCK = re.compile(r'\bextern\s*"C"\s*\{')
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def blank_comments(code: str) -> str:
    """Return `code` with comments replaced by spaces; lines stay where they are."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), code)


def hides_kernels(code: str) -> bool:
    """Whether the preprocessor decides which kernels there are: some stand behind conditions or in macros."""
    if "__global__" not in code:
        return False
    if _MACRO_KERNEL.search(code):
        return True
    text, depth, last = blank_comments(code), 0, 0
    for match in _CONDITION.finditer(text):
        if depth and "__global__" in text[last : match.start()]:
            return True
        depth += 1 if match.group(1) == "if" else -1
        last = match.end()
    return False


def kernel_names(code: str) -> list[str]:
    """Return the names of the kernels with C linkage, in order, each once."""
    text = blank_comments(code)
    blocks = [(m.start(), _closing_brace(text, m.end())) for m in _EXTERN_BLOCK.finditer(text)]
    names = [
        match.group(2)
        for match in _KERNEL.finditer(text)
        if match.group(1) or any(start < match.start() < end for start, end in blocks)
    ]
    return list(dict.fromkeys(names))


def cluster_sizes(code: str) -> dict[str, int]:
    """Return how many blocks a cluster has, of the kernels that say so.

    Raises
    ------
    CompileError
        It is not one or two blocks along x.
    """
    found = {}
    for kernel in _KERNEL.finditer(blank_comments(code)):
        for given in re.findall(r"__cluster_dims__\s*\(([^()]*)\)", kernel.group()):
            sizes = [size.strip() for size in given.split(",")]
            if sizes[0] not in ("1", "2") or set(sizes[1:]) - {"1"}:
                raise CompileError(
                    f"error: kernel `{kernel.group(2)}` has __cluster_dims__({given}), the emulator takes one or two "
                    "blocks along x"
                )
            found[kernel.group(2)] = int(sizes[0])
    return found


def shared_alignment(code: str) -> int:
    """Return the largest alignment in bytes that any declaration of dynamic shared memory asks for, 16 at least.

    Raises
    ------
    CompileError
        An alignment is not a number (but a macro or a type) or not a power of two; the message quotes the declaration.
    """
    text, wanted = blank_comments(code), [16]
    for declaration in _DYNAMIC.finditer(text):
        if "__shared__" not in declaration.group(1):
            continue
        for given in _ALIGNMENT.findall(declaration.group(1)):
            if not re.fullmatch(r"[1-9][0-9]*", given) or int(given).bit_count() != 1:
                quoted = " ".join(declaration.group().split())
                raise CompileError(
                    f"{place_of(text, declaration.start())}: error: `{quoted}` is aligned to `{given}`, expected a "
                    "number, a power of two in decimal digits"
                )
            wanted.append(int(given))
    return max(wanted)


def place_of(text: str, position: int) -> str:
    """Return file and line of a position, counted from the last `#line` directive before it."""
    lines = text[:position].split("\n")
    for since, line in enumerate(reversed(lines)):
        if found := _LINE.match(line):
            return f"{found[2]}:{int(found[1]) + since - 1}"
    return f"line {len(lines)}"


def _closing_brace(text: str, position: int) -> int:
    depth = 1
    while depth and position < len(text):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
    return position


def translate(code: str, kernels: list[str], *, name: str = "kernel.cu") -> str:
    """Return the C++ text that defines `code` and a table of `kernels`.

    Parameters
    ----------
    code : str
        CUDA source without `#include "..."` lines.
    kernels : list of str
        Names or template expressions, as given to `get_function`.
    name : str
        File name for messages if `code` has no `#line` directive.

    Raises
    ------
    CompileError
        There is no kernel.
    """
    if not kernels:
        raise CompileError(f'{name}: no kernel: declare one as extern "C" __global__ void, or pass name_expressions')
    includes = sorted(_ANGLE_INCLUDE.findall(code), key=lambda path: path.startswith(_OF_THE_EMULATOR))
    body = _ANGLE_INCLUDE.sub("", code)
    body = _STATIC_SHARED.sub("__shared__", body)
    body = _DEVICE_VARIABLE.sub("EMU_VARIABLE", body)
    body = _DYNAMIC.sub(_dynamic_shared, body)
    body = _EXTERN_C.sub("", body)
    body = _EXTERN_BLOCK.sub("namespace {", body)
    clusters = cluster_sizes(code)
    sizes = [clusters.get(kernel.partition("<")[0].strip(), 1) for kernel in kernels]
    rows = ",\n".join(
        f'    EMU_KERNEL("{kernel}", {size}, {kernel})' for kernel, size in zip(kernels, sizes, strict=True)
    )
    return "".join(
        (
            *(f"#include <{path}>\n" for path in dict.fromkeys(includes)),
            '#include "ddtree_emulate.h"\n',
            f'namespace {{\n#line 1 "{name}"\n{body}\n}}\n',
            '#line 1 "exports"\n',
            'extern "C" {\n',
            f'__attribute__((visibility("default"))) emu_kernel emu_kernels[] = {{\n{rows}}};\n',
            f'__attribute__((visibility("default"))) unsigned emu_num_kernels = {len(kernels)};\n',
            '__attribute__((visibility("default"))) char* emu_shared_section[] = '
            "{__start_emu_shared, __stop_emu_shared};\n",
            'extern __attribute__((visibility("hidden"))) char __ehdr_start[];\n'
            '__attribute__((visibility("default"))) char* emu_base = __ehdr_start;\n}\n',
        )
    )


def _dynamic_shared(match: re.Match[str]) -> str:
    qualifiers, element, name = match.groups()
    if "__shared__" not in qualifiers:
        return match.group()
    lines = "\n" * match.group().count("\n")  # later lines keep their numbers
    return f"EMU_DYNAMIC_SHARED({name}, {' '.join(element.split())});{lines}"
