"""One call of every public function with all its arguments, and objects that are like arrays."""

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import numpy as np

from ddtree_cupy import (
    AcceptResult,
    DraftTree,
    PagedKV,
    accept,
    best_first_tree,
    build_tree,
    choose_budget,
    commit_kv,
    convert_lse,
    greedy_targets,
    merge_states,
    sample_targets,
    top_candidates,
    tree_attention,
    write_kv,
)

RNG = np.random.default_rng(0)
F32 = np.float32


def of(*values):
    return np.array(values, np.int32)


def normal(*shape):
    return RNG.standard_normal(shape).astype(F32)


LOGITS = normal(2, 3, 8)
TREE = DraftTree.from_parents([[7, 10, 11], [7, 12, -1]], [[-1, 0, 0], [-1, 0, -1]])
CANDIDATES = top_candidates(LOGITS, 4)
RESULT = AcceptResult(of([0, 2, -1], [0, 1, -1]), of(1, 1), of(5, 6))
POOL = normal(4, 4, 32)
KV = PagedKV(POOL[..., :16], POOL[..., 16:], of([0, 1], [2, 3]), of(3, 2))
QUERIES = normal(2, 3, 2, 16)
STATE = normal(2, 3, 2, 16), normal(2, 3, 2)
TARGETS = {"target_logits": LOGITS, "num_nodes": of(3, 2)}
TREE_OPTIONS = {"budget": of(5, 4), "root_token_ids": of(1, 2)}

CALLS = {
    top_candidates: {"draft_logits": LOGITS, "k": 4, "draft_lens": of(3, 1)},
    best_first_tree: {"candidates": CANDIDATES, **TREE_OPTIONS},
    build_tree: {"draft_logits": LOGITS, "draft_lens": of(3, 1), **TREE_OPTIONS},
    choose_budget: {"path_scores": np.array([0.0, -1.0]), "cost": np.array([1.0, 1.5])},
    write_kv: {"kv": KV, "ckv_rows": normal(2, 3, 16), "kpe_rows": normal(2, 3, 16), "num_rows": of(3, 2)},
    tree_attention: {"tree": TREE, "q_nope": QUERIES, "q_pe": QUERIES, "kv": KV, "sm_scale": 0.3},
    merge_states: dict(zip(("out_a", "lse_a", "out_b", "lse_b"), STATE * 2, strict=True)),
    convert_lse: {"lse": STATE[1], "base": 2.0, "empty": np.inf},
    greedy_targets: TARGETS,
    sample_targets: {**TARGETS, "uniforms": np.full((2, 3), 0.5), "temperature": np.array([0.5, 1.5])},
    accept: {"tree": TREE, "target_token_ids": of([11, 5, 6], [12, 1, 9])},
    commit_kv: {"kv": KV, "result": RESULT},
}


def arguments_of(function):
    """Yield (name, value) of every array of a call; a field of a container as in `kv.page_table`."""
    for name, value in CALLS[function].items():
        if is_dataclass(value):
            arrays = ((f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value))
            yield from ((each, array) for each, array in arrays if isinstance(array, np.ndarray))
        elif isinstance(value, np.ndarray):
            yield name, value


def places(choose):
    """Return (function, name) of every array of every call that `choose` takes."""
    return [(function, name) for function in CALLS for name, array in arguments_of(function) if choose(name, array)]


def run_with(backend, function, **changed):
    """Run a call with some arrays changed by `{name: value}`; return its result, with the cache if it writes one."""
    arguments = {key: fresh(value) for key, value in CALLS[function].items()}
    for name, value in changed.items():
        owner, _, field = name.partition(".")
        arguments[owner] = replace(arguments[owner], **{field: value}) if field else value
    result = backend.run(function, **arguments)
    return (result, arguments["kv"]) if function is write_kv else result


def fresh(value):
    return value.map(np.copy) if is_dataclass(value) else value


class OnlyArray:
    """Has `__array__` alone, as arrays of JAX do but for their name."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.astype(dtype)


class OnlyDLPack:
    """Has DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class Tensor(OnlyDLPack):
    """Looks like a bfloat16 tensor of torch, of which torch makes no NumPy array."""

    dtype = "torch.bfloat16"
    requires_grad = False

    def view(self, dtype):
        return OnlyDLPack(self.array.view(dtype))

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


Tensor.__module__ = "torch"


class CupyArray:
    """Has what checks read of a CuPy array; the values are NumPy's."""

    data = SimpleNamespace(device_id=0)

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype, self.flags, self.ndim = array.shape, array.dtype, array.flags, array.ndim

    def astype(self, dtype):
        return type(self)(self.array.astype(dtype))


CupyArray.__module__ = "cupy"
