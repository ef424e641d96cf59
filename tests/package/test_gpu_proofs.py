"""What only a GPU can show: captured graphs, long contexts, pools beyond 2^31 elements, a thousand equal repeats."""

from functools import partial

import numpy as np
import pytest

from ddtree_cupy import (
    DraftTree,
    PagedKV,
    accept,
    build_tree,
    commit_kv,
    greedy_targets,
    sample_targets,
    tree_attention,
    workspace_bytes,
    write_kv,
)
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.backends import Backend
from ddtree_cupy.tree_attention.versions import VERSIONS
from tests.tree_attention.cases import BFLOAT16, assert_state, tree_case

pytestmark = pytest.mark.gpu

GPU = Backend("cupy")
CAPACITY, HEADS, WIDTH, ROPE, VOCAB = 40, 4, 64, 16, 500


class Round:
    """One decoding round on preallocated arrays, eager or captured: build, write keys, attend, accept, commit."""

    def __init__(self, batch, max_context, page_size=16):
        import cupy

        self.batch, max_pages = batch, -(-(max_context + CAPACITY + 1) // page_size)
        rng = cupy.random.default_rng(0)

        def normal(*shape):
            return rng.standard_normal(shape, dtype=np.float32)

        self.logits = 3 * normal(batch, 6, VOCAB)
        self.budgets = cupy.full(batch, 5, np.int32)
        self.roots = cupy.zeros(batch, np.int32)
        nodes = CAPACITY + 1
        self.rows = normal(batch, nodes, WIDTH), normal(batch, nodes, ROPE)
        self.q = normal(batch, nodes, HEADS, WIDTH), normal(batch, nodes, HEADS, ROPE)
        self.pool = normal(batch * max_pages, page_size, WIDTH + ROPE)
        table = np.random.default_rng(1).permutation(batch * max_pages).astype(np.int32).reshape(batch, max_pages)
        self.lens = cupy.ones(batch, np.int32)
        self.kv = PagedKV(self.pool[..., :WIDTH], self.pool[..., WIDTH:], cupy.asarray(table), self.lens)
        self.options = {"root_token_ids": self.roots, "budget": self.budgets, "capacity": CAPACITY}
        self.tree = build_tree(self.logits, **self.options)
        self.target_logits = normal(batch, nodes, VOCAB)
        self.uniforms = rng.random((batch, nodes))
        self.build_space = cupy.empty(workspace_bytes(build_tree, self.logits, **self.options), np.uint8)
        size = workspace_bytes(tree_attention, self.tree, *self.q, self.kv, sm_scale=1.0, variant="v2_split_kv")
        self.attention_space = cupy.empty(size, np.uint8)
        self.out = cupy.empty_like(self.q[0]), cupy.empty(self.q[0].shape[:3], np.float32)
        self.greedy, self.sampled = (cupy.empty((batch, nodes), np.int32) for _ in "ab")
        self.result = accept(self.tree, self.greedy)
        self.new_lens = cupy.empty_like(self.lens)

    def run(self):
        build_tree(self.logits, out=self.tree, workspace=self.build_space, **self.options)
        write_kv(self.kv, *self.rows, num_rows=self.tree.num_nodes)
        tree_attention(
            self.tree,
            *self.q,
            self.kv,
            sm_scale=0.2,
            variant="v2_split_kv",
            out=self.out,
            workspace=self.attention_space,
        )
        greedy_targets(self.target_logits, num_nodes=self.tree.num_nodes, out=self.greedy)
        options = {"temperature": 0.7, "num_nodes": self.tree.num_nodes, "out": self.sampled}
        sample_targets(self.target_logits, self.uniforms, **options)
        accept(self.tree, self.greedy, out=self.result)
        commit_kv(self.kv, self.result, out=self.new_lens)

    def results(self):
        arrays = (self.tree, self.out, self.greedy, self.sampled, self.result, self.new_lens, self.pool)
        return GPU.get(arrays)


def test_round_replayed_from_a_graph_is_identical_to_eager():
    """Captured at context 1 and budget 5; replayed at 100,000 and other budgets, after the pool was overwritten."""
    import cupy

    one = Round(batch=2, max_context=100_000)
    one.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        one.run()
        stream.synchronize()
        stream.begin_capture()
        one.run()
        graph = stream.end_capture()
        for lens, budgets, seed in (([100_000, 3], [40, 0], 1), ([0, 77_777], [17, 33], 2), ([1, 1], [5, 5], 3)):
            generator = cupy.random.default_rng(seed)
            one.lens[:] = cupy.asarray(lens, np.int32)
            one.budgets[:] = cupy.asarray(budgets, np.int32)
            one.logits[:] = 3 * generator.standard_normal(one.logits.shape, dtype=np.float32)
            one.target_logits[:] = generator.standard_normal(one.target_logits.shape, dtype=np.float32)
            one.target_logits[:, :, : VOCAB // 2] += one.logits[:, :1, : VOCAB // 2]  # so that paths have some length
            before = one.pool.copy()
            GPU.fill_pool()
            graph.launch(stream)
            stream.synchronize()
            replayed = one.results()
            one.pool[:] = before
            for array in (*one.out, one.greedy, one.sampled, one.new_lens):
                array.view(np.uint8).fill(0xFF)
            one.run()
            stream.synchronize()
            assert_identical(replayed, one.results())
            assert (replayed[4].num_accepted >= 0).all()
            one.pool[:] = before


def test_capture_without_buffers_is_rejected():
    import cupy

    one = Round(batch=1, max_context=1_000)  # long enough for v2 to need scratch
    stream = cupy.cuda.Stream(non_blocking=True)
    calls = [
        lambda: build_tree(one.logits, **one.options),
        lambda: tree_attention(one.tree, *one.q, one.kv, sm_scale=1.0),
        lambda: tree_attention(one.tree, *one.q, one.kv, sm_scale=1.0, variant="v2_split_kv", out=one.out),
        lambda: greedy_targets(one.target_logits),
        lambda: accept(one.tree, one.greedy),
        lambda: commit_kv(one.kv, one.result),
    ]
    with stream:
        for call in calls:
            call()  # compiled now, so that nothing but the buffers can be wrong
        stream.synchronize()
        stream.begin_capture()
        try:
            for call in calls:
                with pytest.raises(ArgumentError, match="captures a CUDA graph"):
                    call()
        finally:
            stream.end_capture()


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        (name, dtype)
        for name, version in VERSIONS.items()
        for dtype in (np.dtype(np.float32), BFLOAT16)
        if version.TRAITS.any_length and dtype.name in version.TRAITS.dtypes
    ],
    ids=str,
)
def test_versions_match_oracle_at_200_000_keys(variant, dtype):
    options = {"head_dims": (512, 64), "heads": 1, "page_size": 64, "dtype": dtype}
    case = tree_case(np.random.default_rng(1), [5], [200_000], **options)
    found = GPU(tree_attention, *case.arguments, sm_scale=case.sm_scale, variant=variant)
    assert_state(case, *found, variant=variant)


@pytest.mark.parametrize("variant", VERSIONS)
def test_kernels_address_pools_beyond_2_31_elements(variant):
    """4.4 GB of bfloat16; the request's pages lie at the end, where an int32 offset would wrap."""
    import cupy

    num_pages, page_size = 64_000, 64
    pool = cupy.zeros((num_pages, page_size, 576), BFLOAT16)
    assert pool.size > 2**31
    case = tree_case(
        np.random.default_rng(2), [9], [150], head_dims=(512, 64), heads=2, page_size=page_size, dtype=BFLOAT16
    )
    table = np.arange(num_pages - 1, num_pages - 1 - case.kv.page_table.shape[1], -1, dtype=np.int32)[None]
    kv = PagedKV(pool[..., :512], pool[..., 512:], cupy.asarray(table), cupy.asarray(case.kv.context_lens))
    host = [case.kv.ckv.base[page] for page in case.kv.page_table[0] if page < 2**29]
    for number, rows in enumerate(host):
        pool[table[0, number]] = cupy.asarray(rows)
    rows = cupy.asarray(host[2][22:31])  # the tree's own rows, written anew by the kernel
    pool[table[0, 2], 22:31] = 0
    write_kv(kv, rows[None, :, :512], rows[None, :, 512:], num_rows=9)
    queries = GPU.put(case.arguments[:3])
    found = GPU.get(tree_attention(*queries, kv, sm_scale=case.sm_scale, variant=variant))
    assert_state(case, *found, variant=variant)


SHAPES = [  # tree nodes and context of each request
    ([64], [700]),
    ([33, 7], [700, 65]),
    ([1], [5_000]),
    ([65], [9_000]),
    ([5] * 9, [0, 1, 63, 64, 65, 127, 500, 900, 3_000]),
    ([200, 1, 64], [100, 20_000, 1]),
    ([12] * 4, [2_000] * 4),
    ([64] * 3, [0, 0, 4_096]),
]


@pytest.mark.parametrize(("nodes", "context"), SHAPES, ids=str)
@pytest.mark.parametrize("variant", VERSIONS)
def test_tree_attention_is_identical_over_1000_repeats(variant, nodes, context):
    """Two inputs take turns, so that what a launch leaves behind is not what the next one wants."""
    import cupy

    sizes = VERSIONS[variant].TRAITS.head_sizes
    head_dims = (64, 16) if sizes is None or (64, 16) in sizes else sizes[0]
    options = {"head_dims": head_dims, "heads": 8, "page_size": 16, "dtype": BFLOAT16}
    cases = [tree_case(np.random.default_rng(seed), nodes, context, **options) for seed in (3, 4)]
    calls = [
        partial(tree_attention, *GPU.put(case.arguments), sm_scale=case.sm_scale, variant=variant) for case in cases
    ]
    wanted = [call() for call in calls]
    out = tuple(map(cupy.empty_like, wanted[0]))
    differences = cupy.zeros((), np.int64)
    for turn in range(1000):
        calls[turn % 2](out=out)
        differences += (out[0].view(np.uint16) != wanted[turn % 2][0].view(np.uint16)).sum()
        differences += (out[1].view(np.uint32) != wanted[turn % 2][1].view(np.uint32)).sum()
    assert int(differences) == 0


def test_from_parents_on_the_device_is_identical_to_the_host():
    rng = np.random.default_rng(4)
    for nodes in (1, 2, 33, 65, 300):
        parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)], np.int32)
        token_ids = np.arange(nodes, dtype=np.int32)
        padded = np.pad(np.stack([parents, parents]), ((0, 0), (0, 5)), constant_values=-1)
        tokens = np.pad(np.stack([token_ids, token_ids]), ((0, 0), (0, 5)), constant_values=-1)
        tokens[1], padded[1] = -1, -1
        found = DraftTree.from_parents(*GPU.put((tokens, padded)))
        assert "cuda:0" in repr(found)
        assert_identical(GPU.get(found), DraftTree.from_parents(tokens, padded))
        one = DraftTree.from_parents(*GPU.put((token_ids, parents)))
        assert_identical(GPU.get(one.validate()), DraftTree.from_parents(token_ids, parents))


def test_mixed_libraries_and_devices_are_rejected():
    case = tree_case(np.random.default_rng(5), [3], [9], head_dims=(16, 16))
    tree, q_nope, q_pe, kv = case.arguments
    with pytest.raises(DTypeError, match=r"cupy\.asarray"):
        tree_attention(tree, GPU.put(q_nope), q_pe, kv, sm_scale=1.0)
    transposed = GPU.put(np.ascontiguousarray(q_nope.transpose(0, 1, 3, 2))).transpose(0, 1, 3, 2)
    with pytest.raises(LayoutError, match="q_nope"):
        tree_attention(*GPU.put((tree,)), transposed, *GPU.put((q_pe, kv)), sm_scale=1.0)
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeError, match=r"cupy\.from_dlpack"):
        accept(tree, torch.zeros((1, 3), dtype=torch.int32, device="cuda"))


def test_torch_bfloat16_arrives_without_a_copy():
    torch = pytest.importorskip("torch")
    import cupy

    case = tree_case(np.random.default_rng(6), [3], [9], head_dims=(16, 16), dtype=BFLOAT16)
    arguments = GPU.put(case.arguments)
    tensor = torch.tensor(case.q_nope.astype(np.float32), device="cuda").to(torch.bfloat16)
    q_nope = cupy.from_dlpack(tensor)
    assert q_nope.data.ptr == tensor.data_ptr()
    out, lse = tree_attention(arguments[0], q_nope, *arguments[2:], sm_scale=case.sm_scale)
    assert_state(case, *GPU.get((out, lse)))


def test_interop_shares_containers_with_torch_both_ways():
    torch = pytest.importorskip("torch")
    import cupy

    from ddtree_cupy.interop import from_torch, to_torch

    case = tree_case(np.random.default_rng(6), [3], [9], head_dims=(16, 16), dtype=BFLOAT16)
    tree, kv = DraftTree.from_parents(np.arange(5), [-1, 0, 0, 1, 3]), case.kv
    for container in GPU.put((tree, kv)):
        tensors = to_torch(container)
        again = from_torch(tensors, type(container), xp=cupy)
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):  # None, or a host integer
                assert getattr(again, name) == getattr(container, name)
                continue
            assert tensor.is_cuda
            shared = getattr(container, name).data.ptr, getattr(again, name).data.ptr
            assert shared == (tensor.data_ptr(), tensor.data_ptr())
            assert_identical(cupy.asnumpy(getattr(again, name)), cupy.asnumpy(getattr(container, name)))
