"""best_first_tree against sorting all prefixes, and its kernels and topology against the reference, bit for bit."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, best_first_tree, build_tree, emulate, top_candidates, workspace_bytes
from ddtree_cupy.containers.topology import derive_topology
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError, UnsupportedError
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_logits, draft_trees
from ddtree_cupy.tree_build.topology import topology as run_topology
from tests.tree_build.cases import (
    batch_of,
    garbage_like,
    options,
    oracle_prefixes,
    request,
    t6_candidates,
    tables,
    tree_of,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
pytestmark = pytest.mark.usefixtures("best_first")
schedules = st.integers(0, 9)


def table(draft_len, width, seed, *, tied=False):
    """Return unbatched candidates; tied ones lie on a grid where whole paths tie."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 6, (draft_len, width)) * 0.25 if tied else random.standard_normal((draft_len, width))
    logits = -np.sort(-values, axis=-1).astype(np.float32)
    ids = np.broadcast_to(np.arange(width, dtype=np.int32), logits.shape).copy()
    lse = logits[:, 0] + (np.float32(0.5) if tied else np.float32(1.3))
    return Candidates(ids, logits, lse)


def check(backend, candidates, **arguments):
    """Compare a tree with the reference's, every array bit by bit; return the kernel's."""
    found = backend(best_first_tree, candidates, **arguments)
    assert_identical(found, best_first_tree(candidates, **arguments))
    return found


@given(candidates=tables, chosen=options, data=st.data(), seed=schedules)
def test_best_first_tree_matches_oracle(backend, candidates, chosen, data, seed):
    """Ragged budgets, some above the capacity, and inactive requests; also for one request without the batch axis."""
    candidates = backend.narrowed(candidates if candidates.is_batched else candidates.with_batch())
    backend, batch = replace(backend, seed=seed), len(candidates.lse)
    budgets = np.array([data.draw(st.integers(0, 80)) for _ in range(batch)], np.int32)
    roots = np.array([data.draw(st.integers(-1, 99)) for _ in range(batch)], np.int32)
    size = data.draw(st.integers(0, 70))
    tree = backend(best_first_tree, candidates, budget=budgets, root_token_ids=roots, capacity=size, **chosen)
    assert tree.validate().token_ids.shape == (batch, size + 1)
    for b, root in enumerate(roots.tolist()):
        one = request(candidates, b)
        if root >= 0:
            prefixes = oracle_prefixes(one, min(int(budgets[b]), size), **chosen)
            wanted = tree_of(prefixes, root=root, capacity=size, status=int(np.isnan(one.lse).any()))
            assert_identical(request(tree, b), wanted)
        arguments = {"budget": budgets[b, ...], "root_token_ids": roots[b, ...], "capacity": size, **chosen}
        assert_identical(backend(best_first_tree, one, **arguments), request(tree, b))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 1025])
def test_best_first_tree_matches_reference_at_node_counts(kernels, count, tied):
    budget = count - 1
    tree = check(kernels, table(12, min(count, 200), count, tied=tied), budget=budget, root_token_ids=1)
    assert int(tree.num_nodes) == count


def test_best_first_tree_matches_reference_beyond_shared_memory(kernels):
    candidates = table(8, 300, 5)
    assert workspace_bytes(best_first_tree, candidates, budget=2500, root_token_ids=0) == 0  # NumPy needs none
    check(kernels, candidates, budget=2500, root_token_ids=0)


def test_best_first_tree_matches_reference_on_equal_scores(kernels):
    """Every open child ties: rank paths decide all of it."""
    even = Candidates(*(np.zeros((4, 30), t) for t in (np.int32, np.float32)), np.full(4, 3.0, np.float32))
    even.token_ids[:] = np.arange(30)
    check(kernels, even, budget=150, root_token_ids=0)
    certain = replace(even, lse=np.zeros(4, np.float32))  # children tie with their parents
    check(kernels, certain, budget=150, root_token_ids=0)


def test_best_first_tree_matches_reference_on_float32_subnormals(kernels):
    tiny = np.float32(1e-40)
    logits = np.array([[tiny, 0.0, -tiny], [0.0, -tiny, -3 * tiny]], np.float32)
    ids = np.array([[0, 1, 2], [0, 1, 2]], np.int32)
    check(kernels, Candidates(ids, logits, np.array([tiny, 0.0], np.float32)), budget=12, root_token_ids=0)


@pytest.mark.parametrize("draft_len", [1, 40, 300])
def test_best_first_tree_matches_reference_on_deep_drafts(kernels, draft_len):
    check(kernels, table(draft_len, 2, 1), budget=400, root_token_ids=0, max_children=2, spine=draft_len)


def topology(backend, parents, num_nodes):
    return backend(lambda *arrays: tuple(run_topology(*arrays, backend=backend.name).values()), parents, num_nodes)


@given(tree=draft_trees(batched=True, max_nodes=70), seed=schedules)
def test_topology_matches_reference(kernels, tree, seed):
    found = topology(replace(kernels, seed=seed), tree.parents, tree.num_nodes)
    assert_identical(found, tuple(derive_topology(tree.parents, tree.num_nodes)))


@pytest.mark.parametrize("options", [{}, {"spine": 2}, {"max_children": 3}], ids=str)
@pytest.mark.parametrize("budget", [33, 200, 1_700])
def test_best_first_tree_matches_reference_when_more_than_a_warp_ties(kernels, budget, options):
    """All paths of a depth have one score: buckets hold ties and, past 1,024 nodes, what a lane looks through, too."""
    logits = np.zeros((5, 6), np.float32)
    candidates = Candidates(np.tile(np.arange(6, dtype=np.int32), (5, 1)), logits, logits[:, 0] + 1)
    for seed in range(4):
        check(replace(kernels, seed=seed), candidates, budget=budget, root_token_ids=1, **options)


@pytest.mark.emulate
def test_best_first_tree_keeps_the_state_of_each_request_apart():
    """Trees too large for shared memory have their state in the workspace: a request's part is what it is alone."""
    first, second = table(3, 20, 5), table(3, 20, 6)
    both = Candidates(*(np.stack(pair) for pair in zip(vars(first).values(), vars(second).values(), strict=True)))
    arguments = {"budget": 2_100, "root_token_ids": 1, "capacity": 2_100}

    def state_of(candidates):
        workspace = np.full(workspace_bytes(best_first_tree, candidates, **arguments), 0xFF, np.uint8)
        assert_identical(best_first_tree(candidates, **arguments, workspace=workspace), expected[id(candidates)])
        return workspace

    expected = {id(candidates): best_first_tree(candidates, **arguments) for candidates in (first, second, both)}
    with emulate.active():
        assert_identical(state_of(both), np.concatenate([state_of(first), state_of(second)]))


@given(tree=draft_trees(batched=True, max_nodes=40), seed=st.integers(0, 2**32 - 1))
def test_topology_never_reads_padding_nor_follows_bad_parents(kernels, tree, seed):
    """Padding is ignored; a parent that does not come before its child ends the climb and no access is illegal."""
    random = np.random.default_rng(seed)
    padding = np.arange(tree.parents.shape[1]) >= tree.num_nodes[:, None]
    parents = np.where(padding, random.integers(-(2**31), 2**31, padding.shape), tree.parents).astype(np.int32)
    found = topology(kernels, parents, tree.num_nodes)
    assert_identical(found, tuple(derive_topology(tree.parents, tree.num_nodes)))
    absurd = random.choice(np.array([-(2**31), -2, -1, 0, 5, 2**31 - 1], np.int32), padding.shape)
    counts = random.choice(np.array([-5, 2**31 - 1, 3], np.int32), len(parents))
    topology(kernels, absurd, counts)


@given(
    logits=draft_logits(
        max_vocab=30, dtypes=("float32", "float16", "bfloat16", "float64"), non_finite=True, strided=None
    ),
    chosen=options,
    budget=st.integers(0, 50),
    seed=schedules,
)
def test_build_tree_is_identical_to_its_two_stages(backend, logits, chosen, budget, seed):
    """The candidates of the whole vocabulary give the same tree as the few that the budget can use."""
    logits, backend = backend.narrowed(logits), replace(backend, seed=seed)
    arguments = {"budget": budget, "root_token_ids": 3, "capacity": budget, **chosen}
    tree = backend(build_tree, logits, check_finite=False, **arguments).validate()
    candidates = backend(top_candidates, logits, logits.shape[-1], check_finite=False)
    assert_identical(tree, best_first_tree(candidates, **arguments))


@pytest.mark.parametrize("budgets", [[-(2**31), 2**31 - 1, 3, -1], [0, 4, 2**30, 9]])
def test_best_first_tree_never_trusts_device_values(kernels, budgets):
    candidates = batch_of(t6_candidates(), 4)
    budgets, roots = np.array(budgets, np.int32), np.array([5, -7, 2**31 - 1, 0], np.int32)
    tree = kernels(best_first_tree, candidates, budget=budgets, root_token_ids=roots, capacity=4)
    clamped = best_first_tree(
        candidates, budget=np.clip(budgets, 0, 4), root_token_ids=np.maximum(roots, -1), capacity=4
    )
    assert_identical(tree, clamped)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_emulated_build_tree_is_identical_with_out_and_workspace(dtype):
    logits = np.random.default_rng(0).standard_normal((2, 3, 50)).astype(dtype)
    with emulate.active():
        wanted = build_tree(logits, budget=20, root_token_ids=1)
        out, _ = garbage_like(wanted)
        workspace = np.full(workspace_bytes(build_tree, logits, budget=20, root_token_ids=1), 0xFF, np.uint8)
        assert build_tree(logits, budget=20, root_token_ids=1, out=out, workspace=workspace) is out
        assert_identical(out, wanted)
        one = build_tree(logits[1], budget=20, root_token_ids=1)
    assert_identical(one, wanted.map(lambda array: array[1, ...]))


def test_best_first_tree_kernels_reject(kernels):
    candidates = batch_of(t6_candidates(), 2)
    budgets = np.array([1, 2], np.int32)
    if kernels.name == "cupy":  # elsewhere the budgets are on the host
        with pytest.raises(ArgumentError, match="capacity="):
            kernels(best_first_tree, candidates, budget=budgets, root_token_ids=0)
    with pytest.raises(DTypeError, match=r"`candidates\.lse`.*float64"):
        kernels(best_first_tree, t6_candidates(np.float64), budget=1, root_token_ids=0)
    strided = replace(candidates, logits=candidates.logits.repeat(2, axis=-1)[..., ::2])
    with pytest.raises(LayoutError, match=r"`candidates\.logits`"):
        kernels(best_first_tree, strided, budget=1, root_token_ids=0)
    deep = table(300, 1, 0)
    with pytest.raises(UnsupportedError, match="`max_children` has 300 entries"):
        kernels(best_first_tree, deep, budget=1, root_token_ids=0, max_children=[1] * 300)
