"""What the public functions of tree_accept share: checks of metadata, and of values for the reference."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import FLOATS, FLOATS_AND_F64, Checker
from ddtree_cupy._dispatch import backend_of
from ddtree_cupy._overlap import Place
from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

Array = Any


def is_array(value: Any) -> bool:
    """Whether `value` claims to be an array; its library is checked later."""
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def check_targets(
    check: Checker, target_logits: Array, num_nodes: int | Array | None, checked: bool, **others: Array
) -> tuple[str, tuple[str, ...], int | Array]:
    """Return the backend, the batch axis as a tuple of names, and num_nodes as an int or an array (B,)."""
    given = num_nodes if is_array(num_nodes) else None
    if target_logits is None:
        raise DTypeError(f"{check.function}: `target_logits` is None, expected a float array")
    backend = backend_of(check, target_logits=target_logits, num_nodes=given, **others)
    batched = ("batch",) if target_logits.ndim == 3 else ()
    on_device = backend != "numpy"
    if checked or not on_device:
        dtypes = FLOATS if on_device else FLOATS_AND_F64
        axes = (*batched, "num_nodes", "vocab_size")
        check.array("target_logits", target_logits, axes, dtypes, last_contiguous=on_device)
        if given is not None:
            check.array("num_nodes", given, batched, ("int32",), contiguous=on_device)
    if given is not None:
        array: Array = given
        return backend, batched, array if batched else array[None]
    capacity = int(target_logits.shape[-2])
    if num_nodes is None:
        return backend, batched, capacity
    return backend, batched, check.integer("num_nodes", num_nodes, low=0, high=capacity)


def check_targets_out(check: Checker, target_logits: Array, out: Array | None, **read: Any) -> None:
    """Check the array a kernel is to write tokens into; `read` is what else it reads."""
    if out is not None:
        check.backend(target_logits=target_logits, out=out)
        check.array("out", out, target_logits.shape[:-1], ("int32",), contiguous=True, writable=True)
        check.separate({"out": out}, {"target_logits": target_logits, **read})


def counts_of(check: Checker, logits: Array, num_nodes: int | Array) -> npt.NDArray[np.int32]:
    """Return the valid rows of every request for the reference."""
    batch, capacity, _ = logits.shape
    counts: npt.NDArray[np.int32] = np.full(batch, num_nodes, np.int32) if isinstance(num_nodes, int) else num_nodes
    if (counts < 0).any() or (counts > capacity).any():
        raise ArgumentError(f"{check.function}: `num_nodes` is {counts.tolist()}, expected 0..{capacity}")
    return counts


def raises_for_bad_rows(check: Checker, on_bad_row: str, backend: str) -> bool:
    """Whether a row without a target is an error; kernels can only mark it."""
    check.choice("on_bad_row", on_bad_row, ("auto", "raise", "mark"))
    if backend != "numpy" and on_bad_row == "raise":
        raise UnsupportedError(
            f"{check.function}: `on_bad_row` is 'raise', which a kernel cannot do without waiting for the device; "
            f"expected 'mark' (-1 in such rows) or 'auto'"
        )
    return on_bad_row != "mark"


def check_rows(check: Checker, token_ids: Array, counts: Array, bad: str) -> None:
    """Raise for the first valid row that got no target."""
    missing = (token_ids < 0) & (np.arange(token_ids.shape[1]) < counts[:, None])
    if missing.any():
        request, node = np.argwhere(missing)[0]
        raise ArgumentError(
            f"{check.function}: `target_logits` of request {request} holds {bad} at node {node}; on_bad_row='mark' "
            f"gives -1 there"
        )


def check_uniforms(check: Checker, uniforms: Array, counts: Array) -> None:
    """Raise for draws of valid rows outside [0, 1)."""
    for b, count in enumerate(counts):
        if not np.all((uniforms[b, :count] >= 0) & (uniforms[b, :count] < 1)):
            raise ArgumentError(f"{check.function}: `uniforms` of request {b} leaves [0, 1)")


def check_sampling(
    check: Checker, backend: str, batched: tuple[str, ...], uniforms: Array, temperature: float | Array, checked: bool
) -> float | Array:
    """Return the temperature as a float or an array (B,)."""
    on_device = backend != "numpy"
    floats = ("float64", "float32")
    if checked or not on_device:
        check.array("uniforms", uniforms, (*batched, "num_nodes"), floats, contiguous=on_device)
    if not is_array(temperature):
        return check.real("temperature", temperature, above=0.0)
    if checked or not on_device:
        check.backend(uniforms=uniforms, temperature=temperature)
        check.array("temperature", temperature, batched, floats, contiguous=on_device)
    array: Array = temperature
    return array if batched else array[None]


def temperatures_of(check: Checker, temperature: float | Array, batch: int) -> npt.NDArray[np.float64]:
    """Return the temperature of every request for the reference."""
    temperatures = np.full(batch, temperature, np.float64) if isinstance(temperature, float) else temperature
    if not np.all(temperatures > 0) or not np.all(np.isfinite(temperatures)):
        raise ArgumentError(f"{check.function}: `temperature` is {temperatures.tolist()}, expected finite numbers > 0")
    return np.asarray(temperatures, np.float64)


def check_accept(
    check: Checker, tree: DraftTree, target_token_ids: Array, checked: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the backend, and the batch axis as a tuple of names."""
    if not isinstance(tree, DraftTree):
        raise DTypeError(f"{check.function}: `tree` is {type(tree).__name__}, expected DraftTree")
    links = {f"tree.{name}": getattr(tree, name) for name in ("token_ids", "first_child", "next_sibling")}
    counts = {"tree.num_nodes": tree.num_nodes}
    backend = backend_of(check, **links, **counts, target_token_ids=target_token_ids)
    batched = ("batch",) if tree.is_batched else ()
    on_device = backend != "numpy"
    if checked or not on_device:
        for name, array in (*links.items(), ("target_token_ids", target_token_ids)):
            check.array(name, array, (*batched, "num_nodes"), ("int32",), contiguous=on_device)
        check.array("tree.num_nodes", tree.num_nodes, batched, ("int32",), contiguous=on_device)
    return backend, batched


def check_links(check: Checker, tree: DraftTree) -> None:
    """Raise unless every link of a batched host tree leads to a later valid node, so that a walk ends inside it."""
    capacity = tree.token_ids.shape[1]
    if ((tree.num_nodes < 0) | (tree.num_nodes > capacity)).any():
        raise ArgumentError(
            f"{check.function}: `tree.num_nodes` is {tree.num_nodes.tolist()}, expected values in 0..{capacity}"
        )
    index = np.arange(capacity)
    valid = index < tree.num_nodes[:, None]
    for name in ("first_child", "next_sibling"):
        link = getattr(tree, name)
        bad = valid & (link != -1) & ((link <= index) | (link >= tree.num_nodes[:, None]))
        if bad.any():
            request, node = np.argwhere(bad)[0]
            raise ArgumentError(
                f"{check.function}: `tree.{name}`[{node}] of request {request} is {link[request, node]}, expected -1 "
                f"or a later node below {tree.num_nodes[request]}"
            )


def check_result_out(check: Checker, tree: DraftTree, target_token_ids: Array, out: AcceptResult | None) -> None:
    """Check the arrays a kernel is to write a result into."""
    if out is None:
        return
    if not isinstance(out, AcceptResult):
        raise DTypeError(f"{check.function}: `out` is {type(out).__name__}, expected AcceptResult")
    nodes = target_token_ids.shape
    for name, shape in (("accepted", nodes), ("num_accepted", nodes[:-1]), ("bonus_token", nodes[:-1])):
        array = getattr(out, name)
        check.backend(target_token_ids=target_token_ids, **{f"out.{name}": array})
        check.array(f"out.{name}", array, shape, ("int32",), contiguous=True, writable=True)
    check.separate({"out": out}, {"tree": tree, "target_token_ids": target_token_ids})


def with_batch(out: AcceptResult | None, batched: tuple[str, ...]) -> AcceptResult | None:
    """Return views with a request axis."""
    return out if out is None or batched else out.with_batch()


def caches_of(check: Checker, kv: PagedKV | Sequence[PagedKV]) -> list[PagedKV]:
    """Return the caches as a list."""
    caches = [kv] if isinstance(kv, PagedKV) else list(kv)
    for cache in caches:
        if not isinstance(cache, PagedKV):
            raise DTypeError(
                f"{check.function}: `kv` holds {type(cache).__name__}, expected PagedKV or a sequence of them"
            )
    return caches


def check_commit(
    check: Checker, caches: Sequence[PagedKV], result: AcceptResult, checked: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the backend, and the batch axis as a tuple of names."""
    if not isinstance(result, AcceptResult):
        raise DTypeError(f"{check.function}: `result` is {type(result).__name__}, expected AcceptResult")
    paths = {"result.accepted": result.accepted, "result.num_accepted": result.num_accepted}
    backend = backend_of(check, **paths)
    batched = ("batch",) if result.is_batched else ()
    on_device = backend != "numpy"
    if not checked and on_device:
        return backend, batched
    check.array("result.accepted", result.accepted, (*batched, "num_nodes"), ("int32",), contiguous=on_device)
    check.array("result.num_accepted", result.num_accepted, batched, ("int32",), contiguous=on_device)
    for cache in caches:
        _check_cache(check, cache, paths, batched, on_device)
    return backend, batched


def _check_cache(
    check: Checker, cache: PagedKV, paths: dict[str, Array], batched: tuple[str, ...], on_device: bool
) -> None:
    pools = {"kv.ckv": cache.ckv, "kv.kpe": cache.kpe}
    tables = {"kv.page_table": cache.page_table, "kv.context_lens": cache.context_lens}
    check.backend(**paths, **pools, **tables)
    sizes = cache.ckv.shape[:2] if cache.ckv.ndim == 3 else ("num_pages", "page_size")
    for name, pool in pools.items():
        width = pool.shape[-1] if pool.ndim else name.replace("kv.", "head_dim_")
        dtypes = FLOATS if on_device else FLOATS_AND_F64
        check.array(name, pool, (*sizes, width), dtypes, last_contiguous=on_device, writable=True)
    if on_device:
        check.same_dtype(**pools)
    if len(cache.page_table.shape) != len(batched) + 1:
        raise ShapeError(
            f"{check.function}: `kv.page_table` is {cache.page_table.shape}, expected {len(batched) + 1} axes like "
            f"`result`, whose `accepted` is {paths['result.accepted'].shape}"
        )
    row = (*batched, cache.page_table.shape[-1])
    check.array("kv.page_table", cache.page_table, row, ("int32",), contiguous=on_device)
    check.array("kv.context_lens", cache.context_lens, batched, ("int32",), contiguous=on_device)


def check_commit_out(check: Checker, caches: Sequence[PagedKV], result: AcceptResult, lens: Sequence[Array]) -> None:
    """Check the arrays that new context lengths go to; a shared one needs shared old lengths."""
    if len(lens) != len(caches):
        raise ShapeError(
            f"{check.function}: `out` holds {len(lens)} arrays, expected one for each of {len(caches)} caches"
        )
    old_of: dict[Place, Place] = {}
    written: dict[Place, tuple[str, Array]] = {}
    read: dict[Place, tuple[str, Array]] = {}
    for index, (cache, array) in enumerate(zip(caches, lens, strict=True)):
        check.backend(**{"kv.context_lens": cache.context_lens, "out": array})
        check.array("out", array, cache.context_lens.shape, ("int32",), contiguous=True, writable=True)
        old, new = Place.of(cache.context_lens), Place.of(array)
        if old_of.setdefault(new, old) != old:
            raise ArgumentError(
                f"{check.function}: `out` is one array for caches with different `context_lens`, expected one each"
            )
        written.setdefault(new, (f"out[{index}]", array))
        read.setdefault(old, (f"kv[{index}].context_lens", cache.context_lens))
        read.setdefault(Place.of(cache.page_table), (f"kv[{index}].page_table", cache.page_table))
    in_place = [(written[new][0], read[old][0]) for new, old in old_of.items()]
    check.separate(dict(written.values()), {"result": result, **dict(read.values())}, in_place)


def check_paths(check: Checker, result: AcceptResult) -> None:
    """Raise unless every path starts at the root and ascends inside the tree."""
    capacity = result.accepted.shape[1]
    for b, last in enumerate(result.num_accepted.tolist()):
        path = result.accepted[b, : last + 1]
        fits = -1 <= last < max(capacity, 1) and len(path) == last + 1
        if not fits or (last >= 0 and (path[0] != 0 or (np.diff(path) <= 0).any() or path[-1] >= capacity)):
            raise ArgumentError(
                f"{check.function}: `result.accepted` of request {b} is {path.tolist()} with num_accepted {last}, "
                f"expected ascending node indices from the root (0) inside 0..{capacity - 1}"
            )
