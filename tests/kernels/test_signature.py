"""Reading a kernel's parameters from its text."""

import pytest

from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels import Arg, KernelSpec
from ddtree_cupy.kernels.signature import mismatches, parse_parameters

CODE = """
// __global__ void attend(int ghost)
template <typename T, int D = 64>
__global__ void __launch_bounds__(128, 2)
attend(const T* __restrict__ q,  // [N, H, C]
       T* __restrict__ out, float* __restrict__ lse, long long q_stride, unsigned long long seed,
       /* bits */ const unsigned int* bits, const float sm_scale, bool causal) {}
extern "C" __global__ void walk(const int *parents, int num_nodes) {}
"""
ARGS = (
    Arg.input("q", "bfloat16"),
    Arg.output("out", "bfloat16"),
    Arg.output("lse", "float32"),
    Arg.scalar("q_stride", "int64"),
    Arg.scalar("seed", "uint64"),
    Arg.input("bits", "uint32"),
    Arg.scalar("sm_scale", "float32"),
    Arg.scalar("causal", "bool"),
)


def spec(args, entry="attend<__nv_bfloat16, 64>"):
    return KernelSpec(source="a.cu", code=CODE, entry=entry, args=args)


def test_table_and_source_agree():
    assert mismatches(spec(ARGS)) == []
    assert mismatches(spec((Arg.input("parents", "int32"), Arg.scalar("num_nodes", "int32")), "walk")) == []


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (0, Arg.input("query", "bfloat16")),
        (0, Arg.input("q", "float16")),
        (0, Arg.output("q", "bfloat16")),
        (1, Arg.input("out", "bfloat16")),
        (3, Arg.scalar("q_stride", "int32")),
        (5, Arg.scalar("bits", "uint32")),
        (6, Arg.scalar("sm_scale", "float64")),
    ],
)
def test_each_kind_of_mismatch_is_named(index, wrong):
    changed = [*ARGS[:index], wrong, *ARGS[index + 1 :]]
    (line,) = mismatches(spec(tuple(changed)))
    assert f"`{wrong.name}`" in line


def test_missing_rows_and_kernels():
    assert mismatches(spec(ARGS[:-1])) == ["a.cu: attend<__nv_bfloat16, 64>: 7 arguments in the table, 8 in the source"]
    with pytest.raises(CompileError, match="no kernel 'other'"):
        parse_parameters(CODE, "other")
