"""Files: written completely or not at all; read header first, so that a small file cannot take much memory."""

import ast
import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import tempfile
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, WeightsError

HEADER = "__header__"  # the array that holds a file's JSON, as bytes

_MAX_JSON_BYTES = 4 << 20  # empty lists take 25 times as much in memory
_MAX_ARRAY_HEADER = 10_000  # characters; NumPy's own limit
_FREE_BYTES = 256 << 20  # every file may take so much memory ...
_MAX_RATIO = 100  # ... or this many times its own size, if that is more; weights and traces take 1 to 10 times
_SIMPLE_TYPE = re.compile(r"[<>|=]?[biufcU][1-9]\d{0,8}")


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes the file when the block ends without an error; else nothing changes.

    The content is written to a second file, which is renamed. Links are followed. A file that is not regular (a FIFO, a
    device) cannot be replaced and is written in place. An OSError names `path` as given.
    """
    try:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and not stat.S_ISREG(mode):
            with open(path, "wb") as stream:
                yield stream
            return
        target = Path(os.path.realpath(path))
        handle, aside = tempfile.mkstemp(dir=target.parent, prefix=".ddtree.")
        try:
            with os.fdopen(handle, "wb") as stream:
                yield stream
            os.chmod(aside, stat.S_IMODE(mode) if mode is not None else 0o666 & ~_umask())  # mkstemp: the owner only
            os.replace(aside, target)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_arrays(
    path: str | Path, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], *, about: Any
) -> None:
    """Write one compressed `.npz` file that `open_arrays` reads.

    `header` is stored as JSON, with a checksum of the arrays and of `about`, the part of the header that it covers.
    """
    raw = json.dumps({**header, "sha256": checksum(about, arrays)}).encode()
    if len(raw) > _MAX_JSON_BYTES:
        raise ArgumentError(f"{path}: names and notes take {len(raw):,} bytes, expected at most {_MAX_JSON_BYTES:,}")
    contents: dict[str, Any] = {HEADER: np.frombuffer(raw, np.uint8), **arrays}
    with written_whole(path) as stream:
        np.savez_compressed(stream, **contents)


def checksum(about: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 over `about` and over names, shapes, dtypes and bytes, in the order of the names."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.shape} {array.dtype.str}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def read_json(path: str | Path, *, max_bytes: int = _MAX_JSON_BYTES) -> Any:
    """Read a JSON file of at most `max_bytes`.

    Raises
    ------
    WeightsError
        The file is too large, not JSON, or nested too deeply.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as stream:
        raw = stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise WeightsError(f"{path}: over {max_bytes:,} bytes, expected a smaller JSON file")
    try:
        return parse_json(raw)
    except ValueError as error:
        raise WeightsError(f"{path}: truncated or altered, not JSON ({error})") from error


def parse_json(raw: bytes) -> Any:
    """Parse JSON; raise ValueError if it is not JSON or is nested too deeply."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Form(NamedTuple):
    """The declarations in the header of one array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool


class ArrayFile:
    """An open `.npz` whose declared sizes are checked; every array is expanded only when it is read.

    Attributes
    ----------
    what : str
        The expected content, for messages.
    names : tuple of str
    max_bytes : int
        The most memory that the contents may take.

    Raises
    ------
    ValueError
        The archive is damaged, encrypted, of another compression, or (ArgumentError) declares more than `max_bytes`.
    """

    def __init__(self, stream: BinaryIO, what: str, max_bytes: int | None = None, advice: str = "") -> None:
        size = os.fstat(stream.fileno()).st_size
        self.max_bytes = max(_FREE_BYTES, _MAX_RATIO * size) if max_bytes is None else max_bytes
        self.what, self._advice = what, advice
        self._zip = zipfile.ZipFile(stream)
        members = self._zip.infolist()
        for member in members:
            if member.flag_bits & 1:
                raise ValueError(f"`{member.filename}` is encrypted")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"`{member.filename}` is neither stored nor deflated, as NumPy writes")
        self._members = {member.filename.removesuffix(".npy"): member for member in members}
        if len(self._members) != len(members):
            raise ValueError("it holds one name twice")
        self.check_bytes(sum(member.file_size for member in members))
        self.names = tuple(self._members)

    def check_bytes(self, needed: int) -> None:
        """Raise ArgumentError if contents of `needed` bytes are more than the file may take in memory."""
        if needed > self.max_bytes:
            raise ArgumentError(
                f"its contents would take {needed:,} bytes in memory, expected at most {self.max_bytes:,}{self._advice}"
            )

    def read(self, name: str) -> npt.NDArray[Any]:
        """Expand one array."""
        member = self._members[name]
        with self._zip.open(member) as stream:
            return read_array(stream, member.file_size, name)

    def read_header(self, format_name: str, fields: Collection[str] = (), arrays: Collection[str] = ()) -> Any:
        """Return the JSON header of a file of this format, which has just these fields and arrays if they are given."""
        header: Any = {}
        if HEADER in self.names:
            if self._members[HEADER].file_size > _MAX_JSON_BYTES + _MAX_ARRAY_HEADER:
                raise ValueError(f"its header is longer than {_MAX_JSON_BYTES:,} bytes")
            header = parse_json(self.read(HEADER).tobytes())
        fits = isinstance(header, dict) and header.get("format") == format_name
        if fits and fields:
            fits = set(header) == {"format", "sha256", *fields} and set(self.names) == {HEADER, *arrays}
        if not fits:
            raise ArgumentError(f"not a {self.what} file of format {format_name}")
        return header

    def read_arrays(self, header: Mapping[str, Any], *, about: Any) -> dict[str, npt.NDArray[Any]]:
        """Expand every array but the header, which must hold their checksum; `about` as in `write_arrays`."""
        arrays = {name: self.read(name) for name in self.names if name != HEADER}
        if header.get("sha256") != checksum(about, arrays):
            raise ArgumentError("altered, the checksum does not match")
        return arrays

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()


@contextlib.contextmanager
def open_arrays(path: Path, what: str, max_bytes: int | None = None, advice: str = "") -> Iterator[ArrayFile]:
    """Open a `.npz` of `what` ("weights", "traces") and close it again, also after an error.

    Every error in the file, also one that the block finds, becomes a WeightsError that names the file. `advice` ends
    the message of a file that would take more than `max_bytes`.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: no such {what} file")
    try:
        if not zipfile.is_zipfile(path):
            raise WeightsError(f"{path}: not a {what} file, or a truncated one")
        with path.open("rb") as stream, ArrayFile(stream, what, max_bytes, advice) as file:
            yield file
    except (WeightsError, MemoryError):
        raise
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror or error})") from error
    except DDTreeError as error:
        raise WeightsError(f"{path}: {error}") from error
    except Exception as error:  # a damaged archive can fail in any way
        raise WeightsError(f"{path}: truncated or altered ({error})") from error


def read_array(stream: IO[bytes], size: int, name: str) -> npt.NDArray[Any]:
    """Read one `.npy` of `size` bytes, header included; Python objects are never unpickled.

    Raises
    ------
    ValueError
        It is not a `.npy`, or its header declares another size than it has.
    DTypeError
        The header does not name the type of the numbers.
    """
    form, begin = _read_form(stream, name)
    num_bytes = math.prod(form.shape) * form.dtype.itemsize
    if begin + num_bytes != size:
        declared = f"{form.dtype} {form.shape!s:.100}, {num_bytes:,} bytes"
        raise ValueError(f"`{name}` declares {declared}, and holds {size - begin:,}")
    raw = np.empty(num_bytes, np.uint8)
    if stream.readinto(raw) != num_bytes:  # type: ignore[attr-defined]
        raise ValueError(f"`{name}` ends early")
    array = raw.view(form.dtype)
    return array.reshape(form.shape[::-1]).T if form.is_fortran else array.reshape(form.shape)


def _read_form(stream: IO[bytes], name: str) -> tuple[_Form, int]:
    """Return the declarations of the header of a `.npy`, and the size of the header in bytes."""
    magic = stream.read(8)
    if magic[:6] != b"\x93NUMPY" or magic[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise ValueError(f"`{name}` is not a .npy array of version 1 to 3")
    raw_length = stream.read(2 if magic[6] == 1 else 4)
    length = int.from_bytes(raw_length, "little")
    if length > _MAX_ARRAY_HEADER:
        raise ValueError(f"`{name}` has a header of {length:,} bytes, expected at most {_MAX_ARRAY_HEADER:,}")
    text = stream.read(length).decode("latin-1" if magic[6] < 3 else "utf-8")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about unusual escapes
            found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"`{name}` has a malformed header")
    shape, is_fortran = found["shape"], found["fortran_order"]
    if not isinstance(shape, tuple) or any(type(extent) is not int or not 0 <= extent < 2**63 for extent in shape):
        raise ValueError(f"`{name}` has a malformed shape")
    if not isinstance(is_fortran, bool):
        raise ValueError(f"`{name}` has a malformed order of axes")
    return _Form(_dtype(found["descr"], name), shape, is_fortran), 8 + len(raw_length) + length


def _dtype(descr: object, name: str) -> np.dtype[Any]:
    """Return the dtype that a header names; `bfloat16` of ml_dtypes is the only one stored as "<V2"."""
    if descr == "<V2":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    if isinstance(descr, str) and re.fullmatch(r"[<>|]V\d+|[<>]f1", descr):
        raise DTypeError(
            f"`{name}` holds numbers stored as {descr!r}, as float8 and int4 numbers are, and the header does not say "
            f"which; save it as float32, np.save(file, array.astype(np.float32))"
        )
    if isinstance(descr, str) and _SIMPLE_TYPE.fullmatch(descr):
        with contextlib.suppress(TypeError):  # no such size
            found: np.dtype[Any] = np.dtype(descr)
            return found
    raise ValueError(f"`{name}` holds {descr!r:.100}, expected numbers")
