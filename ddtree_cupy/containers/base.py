"""What all containers share: a function mapped over the arrays, backends, files, requests as entries."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, replace
from operator import index
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import INT32, LIBRARIES, as_array, as_int32, library_of, shares_memory
from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DTypeError, RequestIndexError, ShapeError

Array = Any

_INTEGERS: dict[str, np.dtype[Any]] = {  # fields that hold integers
    **dict.fromkeys(("token_ids", "parents", "depths", "num_nodes", "status", "first_child", "next_sibling"), INT32),
    **dict.fromkeys(("page_table", "context_lens", "accepted", "num_accepted", "bonus_token"), INT32),
    "visibility_bits": np.dtype(np.uint32),
}
_POOLS = ("ckv", "kpe")

FORMAT = "ddtree-container-1"  # of the files; raise the number when a stored field changes its meaning


def where(array: Array) -> str:
    """Return " on cuda:0" for a device array, "" for a host array.

    Parameters
    ----------
    array : NumPy or CuPy array
    """
    return "" if isinstance(array, np.ndarray) else f" on cuda:{array.device.id}"


class Arrays:
    """A frozen dataclass whose fields are arrays (or None, or host integers).

    Numbers on the host in any form become NumPy arrays, integers of the dtype of their field after a check by value,
    except in the pages of a cache, which functions write: those must be arrays as they are. A container of lists and
    numbers is validated; one of arrays is not, as `validate()` reads their values. A batch is a sequence of its
    requests.
    """

    def __post_init__(self) -> None:
        by_hand = set()
        for name, value in list(vars(self).items()):
            library, dtype = LIBRARIES.get(type(value)), _INTEGERS.get(name)
            is_plain = library == "cupy" or (library and (dtype is None or value.dtype is dtype))
            if not is_plain and value is not None and (dtype is not None or type(value) is not int):
                vars(self)[name] = self._taken(name, value, dtype)
                if isinstance(value, list | tuple | int):
                    by_hand.add(name)
        self._set_defaults()
        if by_hand and self._is_by_hand(by_hand):
            self.validate()

    def _set_defaults(self) -> None:
        """Set the fields that follow from the arrays when they are not given."""

    def _is_by_hand(self, fields_by_hand: Collection[str]) -> bool:
        """Whether the container is of lists and numbers, as these fields are: then it is validated at once."""
        return all(value is None or name in fields_by_hand for name, value in self._values().items())

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def _taken(self, name: str, value: Any, dtype: npt.DTypeLike | None) -> Array:
        kind = type(self).__name__
        array = as_array(kind, name, value)
        if name in _POOLS and array is not value and not isinstance(value, np.ndarray | np.generic):
            call = "numpy.array" if hasattr(value, "__array__") or isinstance(value, Sequence) else "numpy.from_dlpack"
            call = "ddtree_cupy.interop.from_torch" if library_of(value) == "torch" else call
            raise DTypeError(
                f"{kind}: `{name}` is {type(value).__name__}, expected an array, since functions write to it; "
                f"{call}({name}) makes one"
            )
        if not isinstance(array, np.ndarray):
            return array
        cast = array if dtype is None else as_int32(kind, name, array, dtype)
        if cast is not array or not shares_memory(value):
            vars(self)["_copied"] = (*self.copied, name)
        return cast

    @property
    def copied(self) -> tuple[str, ...]:
        """The arrays, by name, that are copies of what the caller gave, who would not see what is written to them."""
        names: tuple[str, ...] = vars(self).get("_copied", ())
        return names

    def map(self, function: Callable[[Array], Array]) -> Self:
        """Return the container of `function` of every array; host integers and None stay.

        Parameters
        ----------
        function : callable

        Examples
        --------
        >>> from ddtree_cupy import DraftTree
        >>> two = DraftTree.from_parents([[5, 6], [7, 8]], [[-1, 0], [-1, 0]])
        >>> two.map(lambda array: array[::-1]).token_ids.tolist()
        [[7, 8], [5, 6]]
        """
        changed = {
            name: value if value is None or isinstance(value, int) else function(value)
            for name, value in self._values().items()
        }
        return replace(self, **changed)  # type: ignore[type-var]

    def to(self, backend: str) -> Self:
        """Return the container with its arrays on the host or on the current device; arrays there are not copied.

        Parameters
        ----------
        backend : "numpy" or "cupy"

        Raises
        ------
        ArgumentError
            Another backend.
        MissingGPUError
            "cupy" without CuPy or without a GPU.

        Examples
        --------
        >>> from ddtree_cupy import DraftTree
        >>> DraftTree.from_parents([5, 6], [-1, 0]).to("numpy").token_ids.tolist()
        [5, 6]
        """
        if backend == "numpy":
            return self.map(lambda array: array if isinstance(array, np.ndarray) else array.get())
        if backend != "cupy":
            raise ArgumentError(f"{type(self).__name__}.to: `backend` is {backend!r}, expected 'numpy' or 'cupy'")
        from ddtree_cupy.kernels.device import current_device

        current_device()
        import cupy

        return self.map(cupy.asarray)

    def save(self, path: str | Path) -> None:
        """Write one compressed `.npz` file that `load` reads; arrays on a device are copied to the host first.

        Parameters
        ----------
        path : str or path
            A file that stands there is replaced when the new one is complete.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, ArgumentError
            `validate()` refuses the container; no file is made.
        OSError
            The file cannot be written.
        """
        from ddtree_cupy._files import write_arrays  # here, as importing the package should not take its time

        values = self.to("numpy").validate()._values()
        arrays = {n: np.asarray(value, order="C") for n, value in values.items() if isinstance(value, np.ndarray)}
        about = {"kind": type(self).__name__, "others": {n: v for n, v in values.items() if n not in arrays}}
        write_arrays(path, {"format": FORMAT, **about}, arrays, about=about)

    @classmethod
    def load(cls, path: str | Path, *, max_bytes: int | None = None) -> Self:
        """Read a file of `save`; the arrays are NumPy's, and `to("cupy")` moves them.

        Parameters
        ----------
        path : str or path
        max_bytes : int, optional
            The most memory that the arrays may take, which is checked before any is expanded. Default: 100 times the
            size of the file, or 256 MiB if that is more.

        Raises
        ------
        WeightsError
            The file is missing, truncated, altered, larger in memory than `max_bytes`, or holds something else.

        Examples
        --------
        >>> import os, tempfile
        >>> from ddtree_cupy import DraftTree
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "tree.npz")
        ...     DraftTree.from_parents([7, 10, 20], [-1, 0, 1]).save(path)
        ...     DraftTree.load(path)
        DraftTree(num_nodes=3, depth=2)
        """
        from ddtree_cupy._files import open_arrays

        kind = cls.__name__
        if max_bytes is not None:
            max_bytes = Checker(f"{kind}.load").integer("max_bytes", max_bytes, low=0)
        advice = f"; {kind}.load(path, max_bytes=...) allows more"
        with open_arrays(Path(path), kind, max_bytes, advice) as file:
            header = file.read_header(FORMAT)
            if header.get("kind") != kind:
                raise ArgumentError(f"holds {header.get('kind')!r:.100}, expected {kind!r}")
            others = header.get("others")
            arrays = file.read_arrays(header, about={"kind": kind, "others": others})
            wanted = {field.name for field in fields(cls)}  # type: ignore[arg-type]
            if not isinstance(others, dict) or {*arrays, *others} != wanted:
                raise ArgumentError(f"lacks one of {', '.join(sorted(wanted))}, or holds more")
            if any(value is not None and type(value) is not int for value in others.values()):
                raise DTypeError("holds a field that is neither an array nor an integer")
            return cls(**arrays, **others).validate()

    @property
    def is_batched(self) -> bool:
        """Whether the arrays have a request axis."""
        raise NotImplementedError

    def validate(self) -> Self:
        """Check the arrays and return self."""
        raise NotImplementedError

    def with_batch(self) -> Self:
        """Return the container with a leading request axis of 1 on every array (views, no copy)."""
        return self._map_requests(lambda array: array[None])

    def without_batch(self) -> Self:
        """Return the container of request 0 without the request axis (views, no copy; 0-d stays an array)."""
        return self._map_requests(lambda array: array[0, ...])

    def __len__(self) -> int:
        """Return the number of requests."""
        if not self.is_batched:
            raise self._no_requests("len")
        return len(self._by_request())

    def __bool__(self) -> bool:
        """Return True: a container of no requests is a container, and one without a request axis has no length."""
        return True

    def __getitem__(self, request: SupportsIndex | slice) -> Self:
        """Return one request without the request axis, or a batch of some requests for a slice (views, no copy).

        Parameters
        ----------
        request : int or slice
            A negative integer counts from the end.

        Raises
        ------
        ShapeError
            The container has no request axis.
        RequestIndexError
            There are fewer requests. It is an IndexError.
        DTypeError
            `request` is neither an integer nor a slice.

        Examples
        --------
        >>> from ddtree_cupy import DraftTree
        >>> two = DraftTree.from_parents([[5, 6], [7, -1]], [[-1, 0], [-1, -1]])
        >>> len(two), two[-1].token_ids.tolist(), [int(tree.num_nodes) for tree in two], two[:1]
        (2, [7, -1], [2, 1], DraftTree(batch=1, capacity=2))
        """
        kind = type(self).__name__
        if not self.is_batched:
            raise self._no_requests("[...]")
        if isinstance(request, slice):
            return self._map_requests(lambda array: array[request])
        try:
            at = index(request)
        except TypeError:
            raise DTypeError(
                f"{kind}[...]: the index is {type(request).__name__}, expected an integer or a slice of requests"
            ) from None
        count = len(self)
        if not -count <= at < count:
            wanted = f"{-count}..{count - 1}" if count else "none, as the batch is empty"
            raise RequestIndexError(f"{kind}[...]: the index is {at}, expected a request in {wanted}")
        return self._map_requests(lambda array: array[at, ...])

    def __iter__(self) -> Iterator[Self]:
        """Return an iterator over the requests, each without the request axis (views, no copy)."""
        if not self.is_batched:
            raise self._no_requests("iter")
        return (self[request] for request in range(len(self)))

    def _by_request(self) -> Array:
        """Return an array with one entry per request."""
        return getattr(self, fields(self)[0].name)  # type: ignore[arg-type]

    def _map_requests(self, function: Callable[[Array], Array]) -> Self:
        """Return the container of `function` of every array that has a request axis in a batch."""
        return self.map(function)

    def _no_requests(self, what: str) -> ShapeError:
        return ShapeError(
            f"{type(self).__name__} {what}: the container has no request axis, expected a batch; .with_batch() makes "
            f"a batch of one request"
        )
