"""Reading a kernel's parameters, and the structs among them, from its text."""

import numpy as np
import pytest

from ddtree_cupy.errors import ArgumentError, CompileError
from ddtree_cupy.kernels import KernelSpec, registered_specs
from ddtree_cupy.kernels.signature import parse_args
from ddtree_cupy.kernels.source import constants_of
from ddtree_cupy.kernels.structs import StructLayout

CODE = """
#define INDEX long long
using Number = float;
constexpr int LEVELS = 2 * 2;
// __global__ void attend(int ghost)
template <class T>
struct Pool {
  T* rows;             // [P, page_size]
  const int* table;
  long long page_stride, slot_stride;
  int num_pages;
  __device__ int page(int position) const { if (position) { return 1; } return 0; }
  static constexpr int NOTHING = 0;
};
struct Limits { bool strict; double least; int of_level[LEVELS]; };
template <typename T, int D = 64>
__global__ void __launch_bounds__(128, 2)
attend(const T* __restrict__ q,  // [N, H, C]
       T* __restrict__ out, float* __restrict__ lse, long long q_stride, unsigned long long seed,
       /* bits */ const unsigned int* bits, const float sm_scale, bool causal) {}
extern "C" __global__ void walk(const int *parents, int4* cuts, void* any, INDEX stride, Number scale) {}
template <class T> __global__ void gather(Pool<const T> pool, const __grid_constant__ Limits limits, T* out) {}
"""


def read(entry, **options):
    return [str(arg) for arg in parse_args(CODE, entry, **options)]


def test_parameters_are_read_with_types_and_constness():
    assert read("attend<__nv_bfloat16, 64>") == [
        "const bfloat16* q",
        "bfloat16* out",
        "float32* lse",
        "int64 q_stride",
        "uint64 seed",
        "const uint32* bits",
        "float32 sm_scale",
        "bool causal",
    ]
    assert read("walk") == ["const int32* parents", "int32* cuts", "void* any", "int64 stride", "float32 scale"]
    assert read("walk", defines={"Number": "double"})[-1] == "float64 scale"


def test_structs_are_read_with_their_members():
    pool, limits, out = parse_args(CODE, "gather<__half>", strided="rows", nullable="table out")
    assert [str(field) for field in pool.fields] == [
        "const float16* rows",
        "const int32* table",
        "int64 page_stride",
        "int64 slot_stride",
        "int32 num_pages",
    ]
    assert [(field.name, field.count) for field in limits.fields] == [("strict", 1), ("least", 1), ("of_level", 4)]
    assert pool.fields[0].strided
    assert pool.fields[1].nullable
    assert (out.strided, out.nullable) == (False, True)


@pytest.mark.parametrize(
    ("entry", "options", "words"),
    [
        ("other", {}, "no kernel 'other'"),
        ("attend<float>", {"strided": "q keys"}, "strided names keys, which 'attend<float>' does not take"),
        ("gather<float>", {"nullable": "row"}, "nullable names row"),
    ],
)
def test_what_the_source_does_not_have_is_refused(entry, options, words):
    with pytest.raises(CompileError, match=words):
        parse_args(CODE, entry, **options)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [("Unknown x", "cannot tell what `Unknown x` is"), ("int", "cannot read the kernel parameter 'int'")],
)
def test_what_the_source_does_not_explain_is_refused(parameters, words):
    spec = KernelSpec("a.cu", "f", code=f"__global__ void f({parameters}) {{}}")
    with pytest.raises(CompileError, match=f"a.cu: f: {words}"):
        print(spec.args)


def test_structs_are_packed_as_a_compiler_lays_them_out():
    pool, limits, _ = parse_args(CODE, "gather<float>")
    rows = np.zeros(3, np.float32)
    layout = StructLayout("pool", pool.fields)
    packed = layout.pack(rows=rows, table=None, page_stride=-5, slot_stride=6, num_pages=7)
    members = np.dtype([("rows", "u8"), ("table", "u8"), ("strides", "i8", 2), ("pages", "i4")], align=True)
    assert layout.nbytes == members.itemsize == packed.nbytes
    assert (layout.offset_of("rows"), layout.offset_of("table")) == (0, 8)
    assert packed.view(members)[0].tolist()[:2] == (rows.ctypes.data, 0)
    assert packed.view(members)["strides"].tolist() == [[-5, 6]]
    assert packed.view(members)["pages"].tolist() == [7]
    of_limits = StructLayout("limits", limits.fields).pack(strict=True, least=0.5, of_level=[1, 2, 3, 4])
    members = np.dtype([("strict", "?"), ("least", "f8"), ("of_level", "i4", 4)], align=True)
    (found,) = of_limits.view(members).tolist()
    assert (found[0], found[1], found[2].tolist()) == (True, 0.5, [1, 2, 3, 4])


def test_structs_name_what_does_not_fit():
    layout = StructLayout("pool", parse_args(CODE, "gather<float>")[0].fields)
    values = {"rows": None, "table": None, "page_stride": 1, "slot_stride": 1, "num_pages": 1}
    with pytest.raises(ArgumentError, match="struct pool: got rows, table; expected rows, table, page_stride"):
        layout.pack(rows=None, table=None)
    with pytest.raises(ArgumentError, match=r"struct pool: .*2147483647"):
        layout.pack(**{**values, "num_pages": 2**31})


def test_constants_are_read_from_a_text():
    text = "constexpr int A = 4;\nconstexpr int B = A * 8 + 1;\nconstexpr float C = 0.5f;\nconstexpr int D = f(A);\n"
    text += "template <class T>\nconstexpr int E = 0;\ntemplate <>\nconstexpr int E<__half> = B / 2;\n"
    assert constants_of(text) == {"A": 4, "B": 33, "E": 0, "E<__half>": 16}


@pytest.mark.parametrize("spec", registered_specs(), ids=lambda spec: spec.label)
def test_kernels_of_the_library_take_few_arguments(spec):
    assert 3 <= len(spec.args) <= 14
    assert all(arg.dtype for arg in spec.args if arg.role != "struct")
