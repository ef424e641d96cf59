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
_EXTERN_C = re.compile(r'\bextern\s*"C"\s+(?=__global__)')
_KERNEL = re.compile(
    r'(\bextern\s*"C"\s+)?__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*)?'
    r"(?:void\s+)?([A-Za-z_]\w*)\s*\("
)
_EXTERN_BLOCK = re.compile(r'\bextern\s*"C"\s*\{')
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def blank_comments(code: str) -> str:
    """Return `code` with comments replaced by spaces; lines stay where they are."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), code)


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
                    f"{_place(text, declaration.start())}: error: `{quoted}` is aligned to `{given}`, expected a "
                    "number, a power of two in decimal digits"
                )
            wanted.append(int(given))
    return max(wanted)


def _place(text: str, position: int) -> str:
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
    includes = _ANGLE_INCLUDE.findall(code)
    body = _ANGLE_INCLUDE.sub("", code)
    body = _DYNAMIC.sub(_dynamic_shared, body)
    body = _EXTERN_C.sub("", body)
    body = _EXTERN_BLOCK.sub("namespace {", body)
    rows = ",\n".join(f'    EMU_KERNEL("{kernel}", {kernel})' for kernel in kernels)
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
            "{__start_emu_shared, __stop_emu_shared};\n}\n",
        )
    )


def _dynamic_shared(match: re.Match[str]) -> str:
    qualifiers, element, name = match.groups()
    if "__shared__" not in qualifiers:
        return match.group()
    lines = "\n" * match.group().count("\n")  # later lines keep their numbers
    return f"EMU_DYNAMIC_SHARED({name}, {' '.join(element.split())});{lines}"
