"""Read a kernel's parameters from its source text, without a compiler, and compare them with an argument table."""

import re
from dataclasses import dataclass

from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels.spec import Arg, KernelSpec

_TYPES = {
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
    "size_t": "uint64",
    "short": "int16",
    "unsigned short": "uint16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "__half": "float16",
    "half": "float16",
    "__nv_bfloat16": "bfloat16",
    "nv_bfloat16": "bfloat16",
    **{f"{sign}int{bits}_t": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMETER = re.compile(r"^(?P<type>.*?)(?P<name>[A-Za-z_]\w*)$", re.DOTALL)


@dataclass(frozen=True)
class SourceParameter:
    """One parameter as written; `dtype` is None for a type that is no plain number."""

    name: str
    dtype: str | None
    is_pointer: bool
    is_const: bool
    written: str


def parse_parameters(text: str, entry: str) -> tuple[SourceParameter, ...]:
    """Return the parameters of kernel `entry` (a name or a template expression) in `text`.

    Raises
    ------
    CompileError
        The text defines no such kernel.
    """
    clean = _COMMENT.sub(" ", text)
    name, _, values = entry.partition("<")
    match = re.search(rf"__global__[^;{{}}]*?\b{re.escape(name.strip())}\s*\(", clean)
    if match is None:
        raise CompileError(f"no kernel {entry!r} in the source")
    inside = _balanced(clean, match.end())
    template = _template_before(clean, match.start()) if values else {}
    bound = dict(zip(template, _split(values.rpartition(">")[0]), strict=False))
    return tuple(_parameter(" ".join(part.split()), bound) for part in _split(inside) if part.strip())


def mismatches(spec: KernelSpec) -> list[str]:
    """Return one line for each difference between a spec's argument table and its source."""
    found = parse_parameters(spec.text(), spec.entry)
    if len(found) != len(spec.args):
        return [f"{spec.label}: {len(spec.args)} arguments in the table, {len(found)} in the source"]
    return [
        f"{spec.label}: table `{arg.name}` {arg.role} {arg.dtype}, source `{parameter.written}`"
        for arg, parameter in zip(spec.args, found, strict=True)
        if not _agree(arg, parameter)
    ]


def _agree(arg: Arg, parameter: SourceParameter) -> bool:
    if arg.name != parameter.name or parameter.is_pointer != (arg.role != "scalar"):
        return False
    if parameter.is_pointer and parameter.is_const != (arg.role == "input"):
        return False
    return parameter.dtype is None or parameter.dtype == arg.dtype


def _parameter(written: str, bound: dict[str, str]) -> SourceParameter:
    is_pointer = "*" in written
    plain = re.sub(r"__restrict__|__grid_constant__|\bvolatile\b", " ", written)
    pointee, _, rest = plain.rpartition("*") if is_pointer else ("", "", plain)
    match = _PARAMETER.match(rest.strip())
    if match is None:
        raise CompileError(f"cannot read the kernel parameter {written!r}")
    kind = pointee if is_pointer else match.group("type")
    is_const = is_pointer and re.search(r"\bconst\b", pointee) is not None
    base = " ".join(re.sub(r"\bconst\b", " ", kind).split())
    base = bound.get(base, base).strip()
    return SourceParameter(match.group("name"), _TYPES.get(base), is_pointer, is_const, written)


def _balanced(text: str, start: int) -> str:
    depth, end = 1, start
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return text[start : end - 1]


def _split(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for character in text:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [*parts, current]


def _template_before(text: str, position: int) -> list[str]:
    matches = list(re.finditer(r"template\s*<([^{};]*)>\s*$", text[:position]))
    if not matches:
        return []
    names = []
    for part in _split(matches[-1].group(1)):
        words = part.partition("=")[0].split()
        names.append(words[-1] if words else "")
    return names
