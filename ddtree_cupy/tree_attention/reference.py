"""NumPy reference of tree_attention: the definition of the result.

    out[n, h] = sum_j softmax_j(sm_scale * (q_nope[n, h].ckv[j] + q_pe[n, h].kpe[j])) ckv[j]

Arguments are taken as checked by `api.py`, where the public docstrings live. Every function here is batched:
the leading axis B is always present. Letters: B requests, N nodes, H heads, C latent width, R rope width, T keys.
"""

from typing import Any

import numpy as np

from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.containers.topology import unpack_visibility

Array = Any

KEYS_PER_SUM = 1024  # the longest running sum in the compute dtype; longer sums are sums of such sums
SCORES_AT_ONCE = 1 << 24  # query rows are taken in blocks of at most this many scores


def write_kv(kv: PagedKV, ckv_rows: Array, kpe_rows: Array, *, num_rows: Array) -> None:
    """Write rows i < num_rows[b] to positions context_len + i; see `api.write_kv`."""
    places = [
        kv.locate("write_kv", np.arange(kv.context_lens[b], kv.context_lens[b] + num_rows[b]), b)
        for b in range(len(num_rows))
    ]  # all of them first, so that a bad page table does not leave half a write
    for b, (pages, slots) in enumerate(places):
        kv.ckv[pages, slots] = ckv_rows[b, : num_rows[b]]
        kv.kpe[pages, slots] = kpe_rows[b, : num_rows[b]]


def tree_attention(
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    *,
    sm_scale: float,
    keys: str = "all",
    compute_dtype: Any = None,
) -> tuple[Array, Array]:
    """Attend from every node to the context and to the nodes it sees; see `api.tree_attention`.

    With `compute_dtype` both results stay in that dtype, unrounded: float64 gives the values by which kernels are
    judged.
    """
    batch, capacity, num_heads, _ = q_nope.shape
    widest = np.float64 if q_nope.dtype == np.float64 else np.float32
    dtype = compute_dtype or widest
    out = np.zeros(q_nope.shape, compute_dtype or q_nope.dtype)
    lse = np.full((batch, capacity, num_heads), -np.inf, dtype)

    for b in range(batch):
        count, context_len = int(tree.num_nodes[b]), int(kv.context_lens[b])
        if count == 0:
            continue
        visible = _visible_keys(tree.visibility_bits[b, :count, :], count, context_len, keys)
        first = context_len if keys == "tree" else 0
        pages, slots = kv.locate("tree_attention", np.arange(first, first + visible.shape[1]), b)
        values = kv.ckv[pages, slots].astype(dtype, copy=False)  # (T, C)
        rope_keys = kv.kpe[pages, slots].astype(dtype, copy=False)  # (T, R)
        block = max(1, SCORES_AT_ONCE // max(1, num_heads * visible.shape[1]))
        for start in range(0, count, block):
            rows = slice(start, min(start + block, count))
            seen = np.repeat(visible[rows], num_heads, axis=0)
            nope, pe = (q[b, rows].reshape(len(seen), q.shape[-1]).astype(dtype, copy=False) for q in (q_nope, q_pe))
            with np.errstate(over="ignore", invalid="ignore"):  # hidden keys may hold anything, and scores be -inf
                scores = dtype(sm_scale) * (nope @ values.T + pe @ rope_keys.T)
                block_out, block_lse = _softmax_average(scores, seen, values)
            out[b, rows] = block_out.reshape(out[b, rows].shape)
            lse[b, rows] = block_lse.reshape(lse[b, rows].shape)
    return out, lse


def _visible_keys(bits: Array, count: int, context_len: int, keys: str) -> Array:
    """Return bool (count, T): all of the context first, then the tree, as far as `keys` asks for them."""
    words = bits.shape[-1]
    padded = np.zeros((32 * words, words), np.uint32)
    padded[:count] = bits
    of_tree = unpack_visibility(padded, np.int32(count))[:count, :count]
    of_context = np.ones((count, context_len), bool)
    parts = {"all": (of_context, of_tree), "context": (of_context,), "tree": (of_tree,)}
    return np.concatenate(parts[keys], axis=1)


def _softmax_average(scores: Array, seen: Array, values: Array) -> tuple[Array, Array]:
    """Average `values` (T, C) under softmax(scores) (rows, T) over the seen keys; an empty row gives 0 and -inf."""
    scores = np.where(seen, scores, scores.dtype.type(-np.inf))
    largest = scores.max(axis=1, initial=-np.inf, keepdims=True)
    shift = np.where(largest == -np.inf, 0, largest)  # -inf - -inf would be NaN
    weights = np.exp(scores - shift)
    total = np.zeros(shift.shape, scores.dtype)
    weighted = np.zeros((len(scores), values.shape[1]), scores.dtype)
    # 0 * NaN is NaN: the NaN and inf of hidden keys are added apart, to the rows that see them
    hidden = np.flatnonzero(~seen.all(axis=0))
    apart = hidden[~np.isfinite(values[hidden]).all(axis=1)]
    held_apart = values[apart]
    if apart.size:
        values = values.copy()
        values[apart] = 0
    for start in range(0, values.shape[0], KEYS_PER_SUM):
        part = slice(start, start + KEYS_PER_SUM)
        total += weights[:, part].sum(axis=1, keepdims=True)
        weighted += weights[:, part] @ values[part]
    for key, value in zip(apart, held_apart, strict=True):
        rows = seen[:, key]
        weighted[rows] += weights[rows, key, None] * value
    empty = total == 0
    average = weighted / np.where(empty, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + largest  # log(0) = -inf
    return average, lse[:, 0]


def merge_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, compute_dtype: Any = None
) -> tuple[Array, Array]:
    """Combine attention over two disjoint key sets; see `api.merge_states`."""
    widest = np.float64 if out_a.dtype == np.float64 else np.float32
    dtype = compute_dtype or widest
    lse_a, lse_b = lse_a.astype(dtype), lse_b.astype(dtype)
    largest = np.maximum(lse_a, lse_b)
    shift = np.where(largest == -np.inf, 0, largest)
    with np.errstate(over="ignore"):  # a difference of -inf is right: its weight is 0
        weight_a, weight_b = (np.asarray(np.exp(lse - shift)) for lse in (lse_a, lse_b))
    for weight in (weight_a, weight_b):
        weight[weight < np.finfo(widest).smallest_normal] = 0
    total = weight_a + weight_b
    # a side of weight 0 does not count, whatever its `out` holds
    part_a, part_b = (
        np.where(weight[..., None] == 0, 0, out.astype(dtype)) * weight[..., None]
        for out, weight in ((out_a, weight_a), (out_b, weight_b))
    )
    merged = (part_a + part_b) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        lse = np.log(total) + largest
    # and the bits of the other side are copied
    only_a, only_b = (weight_a == 1) & (weight_b == 0), (weight_b == 1) & (weight_a == 0)
    kind = compute_dtype or out_a.dtype
    out = np.where(only_a[..., None], out_a.astype(kind), merged.astype(kind))
    out = np.where(only_b[..., None], out_b.astype(kind), out)
    return out, np.where(only_a, lse_a, np.where(only_b, lse_b, lse))


def convert_lse(lse: Array, *, base: float, empty: float) -> Array:
    """Turn a foreign log-sum-exp into nats with -inf for empty rows; see `api.convert_lse`."""
    is_empty = lse == empty if np.isinf(empty) else lse <= empty
    converted = lse if base == np.e else lse * lse.dtype.type(np.log(base))
    return np.where(is_empty, lse.dtype.type(-np.inf), converted)
