"""Read a kernel's parameters from its source text, without a compiler: the one place that lists its arguments."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels.source import constants_of

Role = Literal["input", "output", "scalar", "struct"]

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
    **{f"{kind}{n}": f"{kind}32" for kind in ("int", "float") for n in (2, 3, 4)},  # behind a pointer: their elements
    **{f"uint{n}": "uint32" for n in (2, 3, 4)},
    "double2": "float64",
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DECLARATION = re.compile(r"^(?P<type>.*?[\s*&>])(?P<name>[A-Za-z_]\w*)\s*(?:\[(?P<count>[^]]*)\])?$", re.DOTALL)
_ALIAS = re.compile(
    r"^\s*#\s*define\s+(?P<macro>\w+)[ \t]+(?P<value>[\w ]+?)\s*$"
    r"|\busing\s+(?P<name>\w+)\s*=\s*(?P<meaning>[^;]+);|\btypedef\s+(?P<old>[\w ]+?)\s+(?P<new>\w+)\s*;",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Arg:
    """One parameter of a kernel, or one member of a struct that it takes by value.

    Attributes
    ----------
    name : str
    dtype : str
        A NumPy name, or "bfloat16": of the number, or of the elements behind a pointer. Empty for a pointer to anything
        else, which takes any array, and for a struct.
    role : "input" (`const T*`), "output" (`T*`), "scalar" or "struct"
    strided : bool
        The kernel takes the strides of this array as numbers, so that any view is fine; otherwise it must be
        C-contiguous.
    nullable : bool
        None is allowed: a null pointer.
    count : int
        Elements of an array inside a struct.
    fields : tuple of Arg
        Of a struct.
    """

    name: str
    dtype: str
    role: Role
    strided: bool = False
    nullable: bool = False
    count: int = 1
    fields: tuple["Arg", ...] = ()

    def __str__(self) -> str:
        names = {"input": f"const {self.dtype or 'void'}*", "output": f"{self.dtype or 'void'}*", "struct": "struct"}
        return f"{names.get(self.role, self.dtype)} {self.name}"


def parse_args(
    text: str, entry: str, *, defines: Mapping[str, str] | None = None, strided: str = "", nullable: str = ""
) -> tuple[Arg, ...]:
    """Return the parameters of a kernel.

    Parameters
    ----------
    text : str
        Self-contained source.
    entry : str
        A name, or a template expression such as `"attend<float, 64>"`.
    defines : mapping of str to str, optional
        Macros set by compiler options.
    strided, nullable : str
        Names of parameters, or of members of structs, separated by spaces; see `Arg`.

    Raises
    ------
    CompileError
        The text has no such kernel, or a parameter of a type that nothing in it explains.

    Examples
    --------
    >>> code = "template <class T> __global__ void scale(const T* x, T* y, int n, float a);"
    >>> print(*parse_args(code, "scale<__half>"), sep=", ")
    const float16* x, float16* y, int32 n, float32 a
    """
    clean = _COMMENT.sub(" ", text)
    name, _, values = entry.partition("<")
    match = re.search(rf"__global__[^;{{}}]*?\b{re.escape(name.strip())}\s*\(", clean)
    if match is None:
        raise CompileError(f"no kernel {entry!r} in the source")
    meanings = dict(_aliases(clean)) | dict(defines or {})
    if values:
        template = _template_before(clean, match.start())
        meanings |= zip(template, (part.strip() for part in _split(values.rpartition(">")[0])), strict=False)
    reader = _Reader(clean, set(strided.split()), set(nullable.split()))
    parts = [part for part in _split(_balanced(clean, match.end())) if part.strip() not in ("", "void")]
    args = tuple(reader.read(part, meanings) for part in parts)
    known = {arg.name for arg in _with_fields(args)}
    for flag, names in (("strided", reader.strided), ("nullable", reader.nullable)):
        if names - known:
            raise CompileError(f"{flag} names {', '.join(sorted(names - known))}, which {entry!r} does not take")
    return args


class _Reader:
    """Declarations of one source, with the flags that C++ cannot say."""

    def __init__(self, text: str, strided: set[str], nullable: set[str]) -> None:
        self.text, self.strided, self.nullable = text, strided, nullable

    def read(self, written: str, meanings: Mapping[str, str]) -> Arg:
        plain = " ".join(re.sub(r"__restrict__|__grid_constant__|\bvolatile\b", " ", written).split())
        match = _DECLARATION.match(plain)
        if match is None:
            raise CompileError(f"cannot read the kernel parameter {written.strip()!r}: expected a type and a name")
        name, kind = match["name"], _meaning(match["type"], meanings)
        pointee, star, _ = kind.rpartition("*")
        base = " ".join(re.sub(r"\bconst\b(?![^<]*>)", " ", pointee if star else kind).split())
        if star:
            role: Role = "input" if re.search(r"\bconst\b", pointee) else "output"
            return Arg(name, _TYPES.get(base, ""), role, name in self.strided, name in self.nullable)
        if base in _TYPES:
            count = match["count"]
            return Arg(name, _TYPES[base], "scalar", count=1 if count is None else self._count(count))
        return Arg(name, "", "struct", fields=self._fields(base, written.strip()))

    def _count(self, written: str) -> int:
        return int(written) if written.strip().isdigit() else int(constants_of(self.text)[written.strip()])

    def _fields(self, kind: str, written: str) -> tuple[Arg, ...]:
        name, _, values = kind.partition("<")
        match = re.search(rf"\bstruct\s+(?:alignas\([^)]*\)\s*)?{re.escape(name.strip())}\s*{{", self.text)
        if match is None:
            raise CompileError(
                f"cannot tell what `{written}` is: expected a number, a pointer, or a struct that this source defines"
            )
        template = _template_before(self.text, match.start()) if values else []
        bound = dict(zip(template, map(str.strip, _split(values.rpartition(">")[0])), strict=False))
        body = _balanced(self.text, match.end(), "{}")
        while re.search(r"\{[^{}]*\}", body):  # bodies of member functions
            body = re.sub(r"\{[^{}]*\}", ";", body)
        fields = []
        for statement in body.split(";"):
            if "(" in statement or re.match(r"\s*(static|using|typedef|template)\b|\s*$", statement):
                continue
            first, *others = _split(" ".join(statement.split()))
            kind_of_all = _DECLARATION.match(first.strip())
            lead = kind_of_all["type"] if kind_of_all else ""
            fields += [self.read(one, bound) for one in (first, *(f"{lead} {other.strip()}" for other in others))]
        return tuple(fields)


def _with_fields(args: tuple[Arg, ...]) -> Iterator[Arg]:
    for arg in args:
        yield arg
        yield from arg.fields


def _aliases(text: str) -> Iterator[tuple[str, str]]:
    for found in _ALIAS.finditer(text):
        macro, value, name, meaning, old, new = found.groups()
        yield (macro or name or new), (value or meaning or old).strip()


def _meaning(kind: str, meanings: Mapping[str, str]) -> str:
    for _ in range(8):  # an alias of an alias
        resolved = re.sub(r"[A-Za-z_]\w*", lambda word: meanings.get(word[0], word[0]), kind)
        if resolved == kind:
            break
        kind = resolved
    return kind


def _balanced(text: str, start: int, brackets: str = "()") -> str:
    depth, end = 1, start
    while depth and end < len(text):
        depth += {brackets[0]: 1, brackets[1]: -1}.get(text[end], 0)
        end += 1
    return text[start : end - 1]


def _split(text: str) -> list[str]:
    """Split at the commas outside all brackets."""
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
