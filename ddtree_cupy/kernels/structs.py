"""Structs that a kernel takes by value: their bytes, from the members that the source declares."""

import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy._overlap import address_of
from ddtree_cupy.errors import ArgumentError, CompileError
from ddtree_cupy.kernels.signature import Arg, parse_args
from ddtree_cupy.kernels.source import expand

Array = Any

_CODES = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
    "float16": "e",
}


class StructLayout:
    """Where the members of a struct lie, as C++ compilers for CUDA and for x86-64 and aarch64 lay them out.

    Parameters
    ----------
    name : str
        For messages.
    fields : tuple of Arg
        Pointers, numbers and arrays of numbers.
    """

    def __init__(self, name: str, fields: tuple[Arg, ...]) -> None:
        self.name, self.fields = name, fields
        self.members = tuple(field.name for field in fields)
        self._pointers = tuple(field.name for field in fields if field.role != "scalar")
        self._is_plain = all(field.count == 1 for field in fields)
        codes = []
        for field in fields:
            code = "Q" if field.role in ("input", "output") else _CODES.get(field.dtype, "")
            if not code:
                raise CompileError(f"struct {name}: `{field}` is not supported, expected pointers and plain numbers")
            codes.append(f"{field.count}{code}" if field.count > 1 else code)
        self._codes = codes
        widest = max((code[-1] for code in codes), key=struct.calcsize, default="b")
        self._packer = struct.Struct(f"@{''.join(codes)}0{widest}")
        self.nbytes = self._packer.size
        self._dtype = np.dtype(f"V{self.nbytes}")

    def offset_of(self, member: str) -> int:
        """Return where a pointer begins, in bytes."""
        before = "".join(self._codes[: self.members.index(member)])
        return struct.calcsize(f"@{before}0Q")

    def pack(self, **values: Any) -> Array:
        """Return the struct as one NumPy element of bytes, which a launch takes.

        Parameters
        ----------
        **values
            One for each member: an array or None for a pointer, a number, or a sequence for an array.
        """
        try:
            for name in self._pointers:
                values[name] = address_of(values[name])
            numbers = [values[name] for name in self.members] if self._is_plain else self._flat(values)
            if len(values) == len(self.members):
                return np.frombuffer(self._packer.pack(*numbers), self._dtype)
        except struct.error as error:
            raise ArgumentError(f"struct {self.name}: {error}") from None
        except KeyError:
            pass
        raise ArgumentError(f"struct {self.name}: got {', '.join(values)}; expected {', '.join(self.members)}")

    def _flat(self, values: Mapping[str, Any]) -> list[Any]:
        flat: list[Any] = []
        for field in self.fields:
            value = values[field.name]
            flat += [value] if field.count == 1 else list(value)
        return flat


@cache
def layout_of(source: str, kind: str) -> StructLayout:
    """Return the layout of a struct such as `"Cache<int>"` of a source below `cuda_src`; pointers are of one size."""
    (arg,) = parse_args(f"{expand(source)}\n__global__ void probe({kind} value);", "probe")
    return StructLayout(kind, arg.fields)
