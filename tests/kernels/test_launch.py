"""KernelSpec and the launcher, on the emulator: what it converts, accepts and refuses."""

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import ArgumentError, CompileError, DTypeError, LayoutError, MissingGPUError
from ddtree_cupy.kernels import Arg, KernelSpec, get_kernel, registry

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


def make_spec(dtype="float32", spelled="float", **changes):
    args = (
        Arg.input("x", dtype, strided=True),
        Arg.scalar("stride", "int64"),
        Arg.output("y", dtype),
        Arg.input("bias", "float32", nullable=True),
        Arg.scalar("n", "int32"),
        Arg.scalar("a", "float32"),
        Arg.scalar("b", "float64"),
        Arg.scalar("negate", "bool"),
    )
    fields = {"source": "axpy.cu", "code": CODE, "entry": f"axpy<{spelled}>", "args": args, "max_threads": 64}
    return KernelSpec(**(fields | changes))


def launch(args=None, *, spec=None, grid=(1,), block=(8,), shared_mem=256, **changes):
    y = np.zeros(4, np.float32)
    values = {
        "x": np.arange(4, dtype=np.float32),
        "stride": 1,
        "y": y,
        "bias": None,
        "n": 4,
        "a": 2.0,
        "b": 1,
        "negate": False,
    }
    values |= changes
    get_kernel(spec or make_spec(), "emulate")(
        grid, block, tuple(values.values()) if args is None else args, shared_mem
    )
    return values["y"]


def test_launch_converts_plain_numbers():
    assert launch().tolist() == [1, 3, 5, 7]
    assert launch(a=np.float64(0.5), n=np.int64(3), negate=1).tolist() == [-1, -1.5, -2, 0]
    assert launch(bias=np.full(4, 10, np.float32)).tolist() == [11, 13, 15, 17]


def test_strided_arguments_take_views():
    x = np.arange(8, dtype=np.float32)
    assert launch(x=x[::-2], stride=-2).tolist() == [15, 11, 7, 3]


def test_bfloat16_arrays():
    spec = make_spec("bfloat16", "__nv_bfloat16")
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
        ({"args": (1, 2)}, ArgumentError, "2 arguments, expected 8: x, stride, y"),
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
        ({"args": make_spec().args[:-1]}, "the argument table has 7 rows, the kernel takes 8"),
        (
            {"args": (Arg.input("x", "float64"), *make_spec().args[1:])},
            r"`x` is input float64, the kernel takes const float32\*",
        ),
        ({"args": (Arg.output("x", "float32"), *make_spec().args[1:])}, "`x` is output float32"),
        ({"code": CODE.replace("return;", "retrun;")}, r"(?s)axpy\.cu: axpy<float> for the CPU emulator: axpy\.cu:6"),
        ({"entry": "axpy<floaf>"}, "floaf"),
    ],
)
def test_wrong_specs_are_compile_errors(changes, message):
    with pytest.raises(CompileError, match=message):
        get_kernel(make_spec(**changes), "emulate")


def test_specs_check_themselves():
    with pytest.raises(ArgumentError, match="occurs twice: x, x"):
        make_spec(args=(Arg.input("x", "int32"), Arg.input("x", "int32")))
    with pytest.raises(TypeError, match="data type"):
        make_spec(args=(Arg.input("x", "flaot32"),))
    assert make_spec() == make_spec()
    assert len({make_spec(), make_spec(), make_spec(defines=("A",))}) == 2
    assert make_spec(defines=("A=1",)).compiler_options == ("--std=c++17", "-DA=1")


def test_registered_specs_keep_their_order(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    specs = [registry.register(make_spec(defines=(name,))) for name in "abc"]
    registry.register(specs[0])
    assert registry.registered_specs() == tuple(specs)


def test_missing_gpu_is_explained():
    try:
        import cupy

        present = cupy.is_available()
    except Exception:
        present = False
    if present:
        pytest.skip("there is a GPU")
    with pytest.raises(MissingGPUError, match=r"pip install 'ddtree-cupy\[cuda13\]'|emulate\.active"):
        get_kernel(make_spec(), "cupy")
