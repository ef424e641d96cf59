"""KernelSpec and the launcher, on the emulator: what it converts, accepts and refuses."""

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import ArgumentError, CompileError, DTypeError, LayoutError, MissingGPUError
from ddtree_cupy.kernels import KernelSpec, Plan, Step, get_kernel, registry

pytestmark = [
    pytest.mark.emulate,
    pytest.mark.skipif(not emulate.available()[0], reason=emulate.available()[1]),
]

CODE = """#include <cuda_bf16.h>
template <typename T>
__global__ void axpy(const T* x, long long stride, T* y, const float* bias, int n, float a, double b, bool negate) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  extern __shared__ float s[];
  if (i >= n) return;
  s[threadIdx.x] = a * (float)x[i * stride] + (float)b + (bias ? bias[i] : 0.f);
  y[i] = (T)(negate ? -s[threadIdx.x] : s[threadIdx.x]);
}
"""


def make_spec(spelled="float", **changes):
    fields = {"code": CODE, "strided": "x", "nullable": "bias", "max_threads": 64}
    return KernelSpec("axpy.cu", changes.pop("entry", f"axpy<{spelled}>"), **(fields | changes))


def launch(*, spec=None, grid=(1,), block=(8,), shared_mem=256, without=(), **changes):
    values = {
        "x": np.arange(4, dtype=np.float32),
        "stride": 1,
        "y": np.zeros(4, np.float32),
        "bias": None,
        "n": 4,
        "a": 2.0,
        "b": 1,
        "negate": False,
    }
    values |= changes
    given = {name: value for name, value in values.items() if name not in without}
    get_kernel(spec or make_spec(), "emulate")(grid, block, shared_mem=shared_mem, **given)
    return values["y"]


def test_launch_converts_plain_numbers():
    assert launch().tolist() == [1, 3, 5, 7]
    assert launch(a=np.float64(0.5), n=np.int64(3), negate=1).tolist() == [-1, -1.5, -2, 0]
    assert launch(bias=np.full(4, 10, np.float32)).tolist() == [11, 13, 15, 17]


def test_strided_arguments_take_views():
    x = np.arange(8, dtype=np.float32)
    assert launch(x=x[::-2], stride=-2).tolist() == [15, 11, 7, 3]


def test_bfloat16_arrays():
    spec = make_spec("__nv_bfloat16")
    bf16 = np.dtype(ml_dtypes.bfloat16)
    assert launch(spec=spec, x=np.arange(4).astype(bf16), y=np.zeros(4, bf16)).tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": np.zeros(4)}, DTypeError, "axpy.cu: axpy<float>: `x` is float64, expected float32"),
        ({"x": [0.0]}, DTypeError, r"`x` is a builtins\.list, expected a numpy\.ndarray"),
        ({"y": None}, ArgumentError, "`y` is None, expected a float32 array"),
        ({"y": np.zeros(8, np.float32)[::2]}, LayoutError, r"`y` has strides \(8,\), expected a C-contiguous array"),
        ({"n": 2**31}, ArgumentError, "`n` is 2147483648, too large for int32"),
        ({"n": 4.0}, DTypeError, "`n` is a float, expected int32"),
        ({"n": np.int64(2**40)}, ArgumentError, "`n` is 1099511627776, too large for int32"),
        ({"a": "x"}, DTypeError, "`a` is a str, expected float32"),
        ({"without": ("y", "n")}, ArgumentError, "`y` is missing, `n` is missing; expected x, stride, y"),
        ({"z": 1}, ArgumentError, "`z` is unknown; expected x, stride, y"),
        ({"block": (65,)}, ArgumentError, "expected 1 to 64 threads"),
        ({"block": (0,)}, ArgumentError, "expected 1 to 64 threads"),
        ({"grid": (1, 65536)}, ArgumentError, "grid"),
        ({"grid": (-1,)}, ArgumentError, "grid"),
        ({"shared_mem": 10**6}, ArgumentError, "1000000 bytes of dynamic shared memory, at most 232448"),
    ],
)
def test_launch_rejects(changes, error, message):
    with pytest.raises(error, match=message):
        launch(**changes)


def test_empty_grids_do_nothing():
    assert not launch(grid=(0,)).any()
    assert not launch(grid=(3, 0)).any()


def test_read_only_output_is_refused():
    y = np.zeros(4, np.float32)
    y.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        launch(y=y)


def test_kernels_are_compiled_once():
    assert get_kernel(make_spec(), "emulate") is get_kernel(make_spec(), "emulate")
    assert get_kernel(make_spec(), "emulate") is not get_kernel(make_spec(defines=("X=1",)), "emulate")
    with pytest.raises(ArgumentError, match="backend 'gpu': expected one of cupy, emulate"):
        get_kernel(make_spec(), "gpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": CODE.replace("return;", "retrun;")}, r"(?s)axpy\.cu: axpy<float> for the CPU emulator: axpy\.cu:6"),
        ({"entry": "axpy<floaf>"}, "floaf"),
        ({"entry": "axpi"}, "axpy.cu: axpi for the CPU emulator: .*no kernel"),
        ({"strided": "keys"}, "strided names keys"),
    ],
)
def test_wrong_specs_are_compile_errors(changes, message):
    with pytest.raises(CompileError, match=message):
        get_kernel(make_spec(**changes), "emulate")


def test_names_of_launch_options_are_no_parameters():
    code = 'extern "C" __global__ void f(int shared_mem) {}'
    with pytest.raises(ArgumentError, match="a parameter is named `shared_mem`"):
        get_kernel(KernelSpec("f.cu", "f", code=code), "emulate")


STRUCTS = """struct Row { const float* x; int n; float factor[2]; };
extern "C" __global__ void scale(Row row, float* y) {
  int i = threadIdx.x;
  if (i < row.n) y[i] = row.x[i] * row.factor[0] + row.factor[1];
}
"""


def test_structs_are_passed_by_value():
    kernel = get_kernel(KernelSpec("scale.cu", "scale", code=STRUCTS), "emulate")
    x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    row = {"x": x, "n": 2, "factor": [2.0, 1.0]}
    kernel((1,), (32,), row=row, y=y)
    assert y.tolist() == [1, 3, 0]
    Plan((Step(kernel.spec, (1,), (32,)),), args={"n": 3}).run(
        "emulate", {"x": x, "factor": [2.0, 1.0], "y": y}
    )  # members by their names
    assert y.tolist() == [1, 3, 5]
    with pytest.raises(DTypeError, match=r"`row\.x` is float64, expected float32"):
        kernel((1,), (32,), row={**row, "x": np.arange(3.0)}, y=y)
    with pytest.raises(DTypeError, match="`row` is a int, expected a mapping of x, n, factor"):
        kernel((1,), (32,), row=3, y=y)


def test_specs_are_keys():
    assert make_spec() == make_spec()
    assert len({make_spec(), make_spec(), make_spec(defines=("A",))}) == 2
    assert make_spec(defines=("A=1",)).compiler_options == ("--std=c++17", "-DA=1")


def test_registered_specs_keep_their_order(monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    specs = [make_spec(defines=(name,)) for name in "abc"]
    registry.register(lambda: specs[:2])
    registry.register(lambda: specs[::-1])
    assert registry.registered_specs() == tuple(specs)


def test_missing_gpu_is_explained():
    try:
        import cupy

        present = cupy.is_available()
    except Exception:
        present = False
    if present:
        pytest.skip("there is a GPU")
    with pytest.raises(MissingGPUError, match=r"pip install -e '\.\[cuda13\]'|emulate\.active"):
        get_kernel(make_spec(), "cupy")
