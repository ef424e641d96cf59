"""Preparations of the public functions of tree_accept: checks of metadata, of values for the reference, and plans."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import batched_shape
from ddtree_cupy._cache_struct import facts_of, has_passed, with_lens
from ddtree_cupy._call import NUMBERS, Call, Form
from ddtree_cupy._check import FLOATS, FLOATS_AND_F64, Checker
from ddtree_cupy._overlap import Region, address_of, bounds_of
from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.tree_accept import kernel, reference

Array = Any

ACCEPTED = Form(kind=AcceptResult)


def greedy_targets(
    call: Call, target_logits: Array, *, num_nodes: int | Array | None = None, on_bad_row: str = "auto"
) -> None:
    """Prepare `greedy_targets`."""
    on_device, target_logits, num_nodes = _targets(call, target_logits, num_nodes, on_bad_row)
    logits, counts = call.batch(target_logits, num_nodes)
    if on_device:
        call.plan = kernel.targets_plan(batched_shape(logits, 3), logits.dtype.name, samples=False)
        call.inputs = kernel.targets_inputs(logits, counts)
        return
    counts = _counts_of(call.check, logits, counts)
    call.reference = lambda: _without_bad_rows(
        call.check, reference.greedy_targets(logits, num_nodes=counts), counts, on_bad_row, "NaN or nothing above -inf"
    )


def sample_targets(
    call: Call,
    target_logits: Array,
    uniforms: Array,
    *,
    temperature: float | Array,
    num_nodes: int | Array | None = None,
    on_bad_row: str = "auto",
) -> None:
    """Prepare `sample_targets`."""
    check = call.check
    uniforms = call.array("uniforms", uniforms)
    on_device, target_logits, num_nodes = _targets(call, target_logits, num_nodes, on_bad_row, uniforms=uniforms)
    floats = ("float64", "float32")
    if call.checks:
        check.array("uniforms", uniforms, call.axes("num_nodes"), floats, contiguous=on_device)
    if temperature is None or isinstance(temperature, NUMBERS):
        temperature = check.real("temperature", temperature, above=0.0)
    else:
        temperature = call.array("temperature", temperature)
        if call.checks:
            check.backend(uniforms=uniforms, temperature=temperature)
            check.array("temperature", temperature, call.axes(), floats, contiguous=on_device)
    call.read = {**call.read, "uniforms": uniforms, "temperature": temperature}
    logits, draws, heat, counts = call.batch(target_logits, uniforms, temperature, num_nodes)
    if on_device:
        call.plan = kernel.targets_plan(batched_shape(logits, 3), logits.dtype.name, samples=True)
        call.inputs = {**kernel.targets_inputs(logits, counts), **kernel.sampling_inputs(draws, heat)}
        return
    counts = _counts_of(check, logits, counts)
    for b, count in enumerate(counts):
        if not np.all((draws[b, :count] >= 0) & (draws[b, :count] < 1)):
            raise ArgumentError(f"{check.function}: `uniforms` of request {b} leaves [0, 1)")
    heats = _temperatures_of(check, heat, len(counts))
    call.reference = lambda: _without_bad_rows(
        check,
        reference.sample_targets(logits, draws, temperature=heats, num_nodes=counts),
        counts,
        on_bad_row,
        "NaN, +inf or nothing above -inf",
    )


def _targets(
    call: Call, target_logits: Array, num_nodes: int | Array | None, on_bad_row: str, **others: Array
) -> tuple[bool, Array, int | Array]:
    """Check what both share; return whether kernels run, the logits, and num_nodes as an int or an array."""
    check = call.check
    target_logits = call.array("target_logits", target_logits)
    on_device = call.choose_backend(target_logits=target_logits, **others)
    call.is_batched = target_logits.ndim == 3
    if call.checks:
        dtypes = FLOATS if on_device else FLOATS_AND_F64
        axes = call.axes("num_nodes", "vocab_size")
        check.array("target_logits", target_logits, axes, dtypes, last_contiguous=on_device)
    check.choice("on_bad_row", on_bad_row, ("auto", "raise", "mark"))
    if on_device and on_bad_row == "raise":
        raise UnsupportedError(
            f"{check.function}: `on_bad_row` is 'raise', which a kernel cannot do without waiting for the device; "
            f"expected 'mark' (-1 in such rows) or 'auto'"
        )
    counts = int(target_logits.shape[-2])
    if num_nodes is not None:
        counts = call.per_request("num_nodes", num_nodes, 0, counts)
    call.read = {"target_logits": target_logits, "num_nodes": counts}
    return on_device, target_logits, counts


def _counts_of(check: Checker, logits: Array, num_nodes: int | Array) -> npt.NDArray[np.int32]:
    """Return the valid rows of every request for the reference."""
    batch, capacity, _ = logits.shape
    counts: npt.NDArray[np.int32] = np.full(batch, num_nodes, np.int32) if isinstance(num_nodes, int) else num_nodes
    if (counts < 0).any() or (counts > capacity).any():
        raise ArgumentError(f"{check.function}: `num_nodes` is {counts.tolist()}, expected 0..{capacity}")
    return counts


def _temperatures_of(check: Checker, temperature: float | Array, batch: int) -> npt.NDArray[np.float64]:
    """Return the temperature of every request for the reference."""
    temperatures = np.full(batch, temperature, np.float64) if isinstance(temperature, float) else temperature
    if not np.all(temperatures > 0) or not np.all(np.isfinite(temperatures)):
        raise ArgumentError(f"{check.function}: `temperature` is {temperatures.tolist()}, expected finite numbers > 0")
    return np.asarray(temperatures, np.float64)


def _without_bad_rows(check: Checker, token_ids: Array, counts: Array, on_bad_row: str, bad: str) -> Array:
    """Return the tokens; raise for the first valid row that got none, unless such rows are marked."""
    missing = (token_ids < 0) & (np.arange(token_ids.shape[1]) < counts[:, None])
    if on_bad_row != "mark" and missing.any():
        request, node = np.argwhere(missing)[0]
        raise ArgumentError(
            f"{check.function}: `target_logits` of request {request} holds {bad} at node {node}; on_bad_row='mark' "
            f"gives -1 there"
        )
    return token_ids


def accept(call: Call, tree: DraftTree, target_token_ids: Array) -> None:
    """Prepare `accept`."""
    check = call.check
    check.kind("tree", tree, DraftTree)
    target_token_ids = call.int32("target_token_ids", target_token_ids)
    links = {f"tree.{name}": getattr(tree, name) for name in ("token_ids", "first_child", "next_sibling")}
    on_device = call.choose_backend(**links, **{"tree.num_nodes": tree.num_nodes}, target_token_ids=target_token_ids)
    call.is_batched = tree.is_batched
    if call.checks:
        for name, array in (*links.items(), ("target_token_ids", target_token_ids)):
            check.array(name, array, call.axes("num_nodes"), ("int32",), contiguous=on_device)
        check.array("tree.num_nodes", tree.num_nodes, call.axes(), ("int32",), contiguous=on_device)
    call.form = ACCEPTED
    read = {**links, "tree.num_nodes": tree.num_nodes}
    call.read = {"tree": Region(bounds_of(tree).values(), read), "target_token_ids": target_token_ids}
    each, targets = call.batch(tree, target_token_ids)
    if on_device:
        call.plan = kernel.accept_plan(batched_shape(each.token_ids, 2))
        names = ("token_ids", "first_child", "next_sibling", "num_nodes")
        call.inputs = {**{name: getattr(each, name) for name in names}, "target_token_ids": targets}
        return
    _check_links(check, each)
    call.reference = lambda: reference.accept(each, targets)


def _check_links(check: Checker, tree: DraftTree) -> None:
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


class _Committed(Form):
    """One cache or several that count the accepted rows; caches may share their new lengths.

    Parameters
    ----------
    caches : sequence of PagedKV
    is_single : bool
    groups : sequence of int
        Which of the new lengths belongs to each cache.
    """

    def __init__(self, caches: Sequence[PagedKV], is_single: bool, groups: Sequence[int]) -> None:
        super().__init__()
        self.caches, self.is_single, self.groups = caches, is_single, groups
        self._firsts = [groups.index(group) for group in range(max(groups, default=-1) + 1)]

    def arrays_of(self, function: str, out: Any) -> dict[str, Array]:
        if not isinstance(out, Sequence):
            return {"out": out} if self._firsts else {}
        return {f"out[{index}]": out[index] for index in self._firsts}

    def parts(self, result: Any) -> Sequence[Array]:
        caches = (result,) if self.is_single else result
        return [caches[index].context_lens for index in self._firsts]

    def returned(self, out: Any, arrays: Sequence[Array]) -> Any:
        caches = tuple(with_lens(kv, arrays[group]) for kv, group in zip(self.caches, self.groups, strict=True))
        return caches[0] if self.is_single else caches


def commit_kv(call: Call, kv: PagedKV | Sequence[PagedKV], result: AcceptResult) -> None:
    """Prepare `commit_kv`."""
    check, out = call.check, call.out
    is_single = isinstance(kv, PagedKV)
    caches = _caches_of(check, kv)
    on_device = _check_commit(call, caches, result)
    lens = list(out) if isinstance(out, Sequence) else [out] * len(caches)
    if len(lens) != len(caches):
        raise ShapeError(
            f"{check.function}: `out` holds {len(lens)} arrays, expected one for each of {len(caches)} caches"
        )
    groups = _groups_of(check, caches, lens)
    call.form = _Committed(caches, is_single, groups)
    if call.is_checked or not on_device:
        names = call.form.arrays_of(check.function, out) if out is not None else {}
        call.in_place = [(name, f"kv[{groups.index(at)}].context_lens") for at, name in enumerate(names)]
        call.read = {"result": Region(bounds_of(result).values(), result), **_regions(caches)}
    if on_device:  # of the caches as they are: what is known of them, and of their plan, is kept on them
        call.plan = kernel.commit_plan(caches, batched_shape(result.accepted, 2), groups)
        call.inputs = kernel.commit_inputs(caches, result, groups)
        return
    path, *batched = call.batch(result, *caches) if caches else (call.batch(result),)
    if out is not None:
        check.separate(call.form.arrays_of(check.function, out), call.read, call.in_place)
    _check_paths(check, path)

    def on_host() -> Any:
        committed = reference.commit_kv(batched, path)
        return committed[0] if is_single else committed

    call.reference = on_host


def _regions(caches: Sequence[PagedKV]) -> dict[str, Any]:
    """Return what a commit reads of the caches, by names for messages."""
    found: dict[str, Any] = {}
    lens: set[int] = set()
    for index, cache in enumerate(caches):
        found[f"kv[{index}]"] = Region(facts_of(cache).bounds, cache)
        if id(cache.context_lens) not in lens:
            lens.add(id(cache.context_lens))
            found[f"kv[{index}].context_lens"] = cache.context_lens
    return found


def _groups_of(check: Checker, caches: Sequence[PagedKV], out: Sequence[Array | None]) -> list[int]:
    """Return a number for every cache; caches of one number share `context_lens` and what is given for the new ones."""
    lens = [cache.context_lens for cache in caches]
    if lens and all(each is lens[0] for each in lens) and all(given is out[0] for given in out):
        return [0] * len(lens)
    known: dict[tuple[int, int], int] = {}
    old_of: dict[int, int] = {}
    groups = []
    for cache, given in zip(caches, out, strict=True):
        old, new = address_of(cache.context_lens), address_of(given)
        if given is not None and old_of.setdefault(new, old) != old:
            raise ArgumentError(
                f"{check.function}: `out` is one array for caches with different `context_lens`, expected one each"
            )
        groups.append(known.setdefault((old, new), len(known)))
    return groups


def _caches_of(check: Checker, kv: PagedKV | Sequence[PagedKV]) -> list[PagedKV]:
    caches = [kv] if isinstance(kv, PagedKV) else list(kv)
    for cache in caches:
        if not isinstance(cache, PagedKV):
            raise DTypeError(
                f"{check.function}: `kv` holds {type(cache).__name__}, expected PagedKV or a sequence of them"
            )
    return caches


def _check_commit(call: Call, caches: Sequence[PagedKV], result: AcceptResult) -> bool:
    """Check path and caches; return whether kernels run."""
    check = call.check
    check.kind("result", result, AcceptResult)
    paths = {"result.accepted": result.accepted, "result.num_accepted": result.num_accepted}
    on_device = call.choose_backend(**paths)
    call.is_batched = result.is_batched
    if call.checks:
        check.array("result.accepted", result.accepted, call.axes("num_nodes"), ("int32",), contiguous=on_device)
        check.array("result.num_accepted", result.num_accepted, call.axes(), ("int32",), contiguous=on_device)
        known: set[int] = set()  # lengths that caches share
        for cache in caches:
            _check_cache(call, cache, paths, on_device)
            if id(cache.context_lens) not in known:
                known.add(id(cache.context_lens))
                lens = {"kv.context_lens": cache.context_lens}
                check.backend(**paths, **lens)
                check.array("kv.context_lens", cache.context_lens, call.axes(), ("int32",), contiguous=on_device)
    return on_device


def _check_cache(call: Call, cache: PagedKV, paths: dict[str, Array], on_device: bool) -> None:
    """Check all of a cache but its lengths; once is enough on a device, since a frozen cache keeps its arrays."""
    check = call.check
    mark = f"commit_kv of {check.sizes['batch'][0] if call.is_batched else 'one'} on {call.device}"
    if on_device and has_passed(cache, mark):
        return
    pools = {"kv.ckv": cache.ckv, "kv.kpe": cache.kpe}
    check.backend(**paths, **pools, **{"kv.page_table": cache.page_table})
    sizes = cache.ckv.shape[:2] if cache.ckv.ndim == 3 else ("num_pages", "page_size")
    for name, pool in pools.items():
        width = pool.shape[-1] if pool.ndim else name.replace("kv.", "head_dim_")
        dtypes = FLOATS if on_device else FLOATS_AND_F64
        check.array(name, pool, (*sizes, width), dtypes, last_contiguous=on_device)
        check.array(name, pool, pool.shape, writable=True)
    if on_device:
        check.same_dtype(**pools)
    axes = call.axes("max_pages")
    if len(cache.page_table.shape) != len(axes):
        raise ShapeError(
            f"{check.function}: `kv.page_table` is {cache.page_table.shape}, expected {len(axes)} axes like "
            f"`result`, whose `accepted` is {paths['result.accepted'].shape}"
        )
    row = (*axes[:-1], cache.page_table.shape[-1])
    check.array("kv.page_table", cache.page_table, row, ("int32",), contiguous=on_device)
    if on_device:
        facts_of(cache).checked.add(mark)


def _check_paths(check: Checker, result: AcceptResult) -> None:
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
