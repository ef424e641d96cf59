"""`emulate.Module`: sources, options, arguments, the build cache, contexts and threads."""

import concurrent.futures
import re
import threading

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.emulate import _build
from ddtree_cupy.errors import (
    ArgumentError,
    CompileError,
    DTypeError,
    EmulatorError,
    LayoutError,
    UnsupportedError,
)
from tests.emulate.cases import run, run_python

pytestmark = pytest.mark.emulate

CODE = r"""
#ifndef FACTOR
#define FACTOR 2
#endif
extern "C" __global__ void __launch_bounds__(128) scale(const float* x, float* y, int n, double s, const void* any) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = (float)s * FACTOR * x[i] + (any == nullptr ? 0.f : 100.f);
}
template <typename T, int K>
__global__ void fill(T* y) { y[threadIdx.x] = T(K); }
"""
X, N, S = np.arange(4, dtype=np.float32), np.int32(4), np.float64(1)


def call(function, x=X, y=None, n=N, s=S, anything=None, **kwargs):
    y = np.zeros(4, np.float32) if y is None else y
    function((1,), (4,), (x, y, n, s, anything), **kwargs)
    return y


@pytest.fixture(scope="module")
def module():
    return emulate.Module(CODE, name_expressions=("fill<float, 3>", "fill<__nv_bfloat16, 4>"))


@pytest.fixture
def scale(module):
    return module.get_function("scale")


def test_module_runs_a_kernel_and_accepts_null(scale):
    assert call(scale).tolist() == [0, 2, 4, 6]
    assert call(scale, anything=np.zeros(1, np.int8)).tolist() == [100, 102, 104, 106]
    assert str(scale) == "Function(scale: const float32*, float32*, int32, float64, const void*)"


def test_template_instances_are_found_by_expression(module):
    assert module.kernels == ("fill<float, 3>", "fill<__nv_bfloat16, 4>", "scale")
    y = np.zeros(2, ml_dtypes.bfloat16)
    module.get_function("fill<__nv_bfloat16, 4>")((1,), (2,), (y,))
    assert y.tolist() == [4, 4]
    with pytest.raises(ArgumentError, match="no kernel 'fill<int, 1>'; it has fill<float, 3>"):
        module.get_function("fill<int, 1>")


def test_options_are_those_both_compilers_share():
    scale = emulate.Module(CODE, ("-DFACTOR=5", "-arch=sm_90a", "--std=c++17")).get_function("scale")
    assert call(scale).tolist() == [0, 5, 10, 15]
    scale = emulate.Module(CODE, ("--define-macro=FACTOR=7",)).get_function("scale")
    assert call(scale).tolist() == [0, 7, 14, 21]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X.astype(np.float64)}, DTypeError, r"argument 0 is float64, the kernel takes const float32\*"),
        ({"x": X.tolist()}, DTypeError, "argument 0 is a list"),
        ({"x": np.arange(8, dtype=np.float32)[::2]}, LayoutError, r"argument 0 is not C-contiguous \(strides \(8,\)\)"),
        ({"y": np.broadcast_to(np.float32(0), 4)}, LayoutError, "argument 1"),
        ({"n": 4}, DTypeError, "argument 2 is a int, expected a NumPy scalar for int32"),
        ({"n": np.int64(4)}, DTypeError, "argument 2 is int64, the kernel takes int32"),
        ({"n": np.uint32(4)}, DTypeError, "argument 2 is uint32"),
        ({"s": np.float32(4)}, DTypeError, "argument 3 is float32, the kernel takes float64"),
    ],
)
def test_arguments_are_checked_against_the_cpp_signature(scale, change, error, message):
    with pytest.raises(error, match=message):
        call(scale, **change)


def test_read_only_arrays_are_refused_for_outputs(scale):
    y = np.zeros(4, np.float32)
    y.flags.writeable = False
    with pytest.raises(LayoutError, match="argument 1 is read-only"):
        call(scale, y=y)


def test_wrong_number_of_arguments_and_bad_launches(scale):
    y = np.zeros(4, np.float32)
    good = (X, y, np.int32(4), np.float64(1), None)
    with pytest.raises(ArgumentError, match="4 arguments, expected 5"):
        scale((1,), (4,), good[:4])
    with pytest.raises(EmulatorError, match="no GPU accepts"):
        scale((1,), (1025,), good)
    with pytest.raises(EmulatorError, match="no GPU accepts"):
        scale((1, 70000), (4,), good)
    with pytest.raises(UnsupportedError, match="300000 bytes of shared memory"):
        scale((1,), (4,), good, 300_000)
    with pytest.raises(UnsupportedError, match=r"10\.5 bytes of shared memory"):
        scale((1,), (4,), good, 10.5)
    for odd in (1, (), (1, 1, 1, 1), (1.5,), ("1",), (-1,), (2**32,)):
        with pytest.raises(ArgumentError, match=rf"`grid` is {re.escape(repr(odd))}, expected a tuple of one to three"):
            scale(odd, (4,), good)
    scale((0,), (4,), good)
    assert not y.any()


def test_strided_arrays_pass_when_asked_for():
    code = """extern "C" __global__ void get(const int* x, long long stride, int* y) {
      y[threadIdx.x] = x[threadIdx.x * stride];
    }"""
    x, y = np.arange(8, dtype=np.int32)[::-2], np.zeros(4, np.int32)
    emulate.Module(code).get_function("get")((1,), (4,), (x, np.int64(-2), y), strided=True)
    assert y.tolist() == [7, 5, 3, 1]


def test_struct_by_value():
    code = """struct alignas(64) Map { unsigned char bytes[128]; };
    extern "C" __global__ void get(const __grid_constant__ Map map, int* y) { y[0] = map.bytes[127]; }"""
    y = np.zeros(1, np.int32)
    value = np.arange(128, dtype=np.uint8).view("V128")
    emulate.Module(code).get_function("get")((1,), (1,), (value, y))
    assert y[0] == 127


def test_extern_c_block_and_kernels_named_like_libc():
    code = """extern "C" {
    __global__ void accept(int* y) { y[0] = 1; }
    __global__ void write(int* y) { y[0] = 2; }
    }
    // extern "C" __global__ void ghost(int* y) {}
    """
    module = emulate.Module(code)
    assert module.kernels == ("accept", "write")
    y = np.zeros(1, np.int32)
    for name in module.kernels:
        module.get_function(name)((1,), (1,), (y,))
        assert y[0] == 1 + (name == "write")


def test_statics_keep_their_values_between_launches():
    code = """__device__ int call() { static int calls; return ++calls; }
    template <class T> __device__ T call_template() { static T calls; return ++calls; }
    extern "C" __global__ void k(int* y) {
      static int calls;
      y[0] = ++calls, y[1] = call(), y[2] = call_template<int>();
    }"""
    function, y = emulate.Module(code).get_function("k"), np.zeros(3, np.int32)
    for launch in (1, 2):
        function((1,), (1,), (y,))
        assert y.tolist() == [launch] * 3


LOADS_ANY_NAME = """
import os
from pathlib import Path
from ddtree_cupy import emulate
from ddtree_cupy.errors import CompileError
good = "extern \\"C\\" __global__ void k(int* y) { y[0] = 1; }  // größer"
for name, code in ((b"gr\\xc3\\xb6.cu", good.encode()), (b"\\xff.cu", good.encode("latin-1"))):
    path = Path(os.fsdecode(name))
    path.write_bytes(code)
    emulate.Module(path)
    path.write_bytes(code.replace(b"1;", b"undefined;"))
    try:
        emulate.Module(path)
    except CompileError as error:
        assert "was not declared" in str(error)
    else:
        raise AssertionError
emulate.Module(good)
"""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_sources_and_their_names_may_hold_any_characters(locale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = LOADS_ANY_NAME.encode("ascii", "backslashreplace").decode()
    child = run_python(program, LC_ALL=locale, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert child.returncode == 0, child.stderr


def test_path_and_includes(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.cuh").write_text("#pragma once\n#define A 4\n")
    (tmp_path / "k.cu").write_text(
        '#include "sub/a.cuh"\n#include "sub/a.cuh"\nextern "C" __global__ void k(int* y) { y[0] = A; }\n'
    )
    y = np.zeros(1, np.int32)
    for path in (tmp_path / "k.cu", str(tmp_path / "k.cu")):
        emulate.Module(path).get_function("k")((1,), (1,), (y,))
        assert y[0] == 4
    with pytest.raises(CompileError, match=r"absent\.cu"):
        emulate.Module(str(tmp_path / "absent.cu"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('\n\nextern "C" __global__ void k(int* y) {\n  y[0] = oops;\n}', r"kernel\.cu:4:\d+: error: .*oops"),
        ('extern "C" __global__ void k(float* y) { y[0] = INFINITY; }', "INFINITY"),
        (
            'extern "C" __global__ void k(float* y) { asm volatile("membar.gl;"); }',
            r"(?s)^kernel\.cu:1: inline PTX .*Error",
        ),
        ("int x;\n", "no kernel"),
        ('#include "nothing.cuh"\n', r"kernel\.cu:1: cannot find 'nothing\.cuh'"),
    ],
)
def test_compile_errors_name_file_and_line(code, message):
    with pytest.raises(CompileError, match=message):
        emulate.Module(code)


SIMPLE = 'extern "C" __global__ void k(int* y) {}'


@pytest.mark.parametrize(
    ("code", "kernels"),
    [
        ('#define KERNEL extern "C" __global__ void\nKERNEL k(int* y) { y[0] = 1; }', ("k",)),
        ("#define MAKE(name) " + SIMPLE.replace(" k(", " name(") + "\nMAKE(a)\nMAKE(b)", ("a", "b")),
        ('#if 0\nextern "C" __global__ void gone(int* y) {}\n#endif\n' + SIMPLE, ("k",)),
        (
            '#if __CUDA_ARCH__ > 900\nextern "C" __global__ void late(int* y) {}\n#endif\n' + SIMPLE,
            ("k",),
        ),
        ('extern "C" void __global__ __launch_bounds__(64) k(int* y) {}', ("k",)),
        (SIMPLE + "  // as in kernel.cu", ("k",)),
    ],
    ids=["macro", "macros", "if 0", "architecture", "order", "text that ends like a path"],
)
def test_kernels_are_those_that_the_preprocessor_leaves(code, kernels):
    assert emulate.Module(code).kernels == kernels


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), 900),
        (("-arch=sm_80",), 800),
        (("-arch", "sm_86"), 860),
        (("--gpu-architecture=compute_120",), 1200),
        (("-D", "WIDE", "-D FAST=1", "--gpu-architecture", "sm_80"), 800),
    ],
)
def test_the_architecture_is_selectable(options, expected):
    code = 'extern "C" __global__ void k(int* y) {\n#ifdef __CUDA_ARCH__\ny[0] = __CUDA_ARCH__;\n#endif\n}'
    y = np.zeros(1, np.int32)
    emulate.Module(code, options).get_function("k")((1,), (1,), (y,))
    assert y[0] == expected


def test_includes_are_looked_up_in_folders_of_the_options(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "two.cuh").write_text("#define TWO 2\n")
    code = '#include "two.cuh"\nextern "C" __global__ void k(int* y) { y[0] += TWO; }'
    for text in (code, code.replace('"two.cuh"', "<two.cuh>")):
        y = np.zeros(1, np.int32)
        emulate.Module(text, (f"-I{tmp_path / 'inner'}",)).get_function("k")((1,), (1,), (y,))
        assert y[0] == 2
    with pytest.raises(CompileError, match=r"kernel\.cu:1: cannot find 'two\.cuh' in .*; the option -Ifolder adds one"):
        emulate.Module(code)


def test_variables_of_a_module_are_arrays():
    code = """namespace { __constant__ float scale[2] = {2, 3}; }
    __device__ int count = 5;
    extern "C" __global__ void k(float* y) { y[0] = scale[0] + scale[1]; count += 1; }"""
    module, y = emulate.Module(code), np.zeros(1, np.float32)
    scale, count = module.get_global("scale", np.float32), module.get_global("count", np.int32)
    assert (scale.tolist(), count.tolist()) == ([2, 3], [5])
    scale[:] = 10, 20
    module.get_function("k")((1,), (1,), (y,))
    assert (y[0], count[0]) == (30, 6)
    with pytest.raises(ArgumentError, match=r"kernel\.cu has no variable 'size'; it has count, scale"):
        module.get_global("size")
    with pytest.raises(ArgumentError, match=r"'count' has 4 bytes, not a whole number of float64"):
        module.get_global("count", np.float64)


def test_active_is_seen_in_this_context_only():
    assert not emulate.is_active()
    with emulate.active(seed=7):
        assert emulate.is_active()
        assert emulate.current_seed() == 7
        with emulate.active(seed=0):
            assert emulate.current_seed() == 0
        seen = []
        thread = threading.Thread(target=lambda: seen.append(emulate.is_active()))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not emulate.is_active()


@pytest.mark.parametrize("seed", [1.5, None, True, "1", -1, 2**64, np.float32(1), np.bool_(True)])
def test_seeds_that_are_no_schedule_are_rejected(scale, seed):
    error = DTypeError if type(seed) is not int else ArgumentError
    message = rf"`seed` is {re.escape(repr(seed))}, expected .*0 <= seed < 2\*\*64"
    with pytest.raises(error, match=f"emulate.active: {message}"), emulate.active(seed):
        pass
    if seed is not None:  # None: the seed of the enclosing `active`
        with pytest.raises(error, match=f"scale: {message}"):
            call(scale, seed=seed)


@pytest.mark.parametrize("cut_sums", ["no", None, 2, 1.5])
def test_active_rejects_what_is_no_bool(cut_sums):
    with pytest.raises(DTypeError, match=f"emulate.active: `cut_sums` is {cut_sums!r}, expected True or False"):
        emulate.active(cut_sums=cut_sums).__enter__()


@pytest.mark.parametrize("cut_sums", [True, np.False_])
def test_active_takes_bools(scale, cut_sums):
    with emulate.active(cut_sums=cut_sums):
        call(scale)


def test_seeds_may_be_numpy_integers(scale):
    with emulate.active(np.uint64(2**64 - 1)):
        assert emulate.current_seed() == 2**64 - 1
        assert call(scale, seed=np.int8(3)).tolist() == [0, 2, 4, 6]


def test_active_seed_is_the_default_schedule():
    code = 'extern "C" __global__ void k(int* y) { y[0] = blockIdx.x; }'
    function, y = emulate.Module(code).get_function("k"), np.zeros(1, np.int32)
    with emulate.active(seed=1):
        function((3,), (1,), (y,))
    assert y[0] == 0
    function((3,), (1,), (y,))
    assert y[0] == 2


def test_launches_from_many_threads_take_turns(scale):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: call(scale).tolist(), range(40)))
    assert results == [[0, 2, 4, 6]] * 40


def test_concurrent_processes_may_build_the_same_module(tmp_path):
    program = (
        "import numpy as np; from ddtree_cupy import emulate\n"
        "y = np.zeros(1, np.int32)\n"
        "code = 'extern \"C\" __global__ void k(int* y) { y[0] = 41; }'\n"
        "emulate.Module(code).get_function('k')((1,), (1,), (y,)); assert y[0] == 41"
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        children = list(pool.map(lambda _: run_python(program, DDTREE_CACHE_DIR=str(tmp_path)), range(2)))
    assert [child.returncode for child in children] == [0, 0]
    left = sorted(path.suffix for path in (tmp_path / "emulate").iterdir())
    assert left == [".cpp", ".so", ".so"]


def test_portable_thread_switch_gives_the_same_results(monkeypatch):
    monkeypatch.setenv("DDTREE_EMULATE_UCONTEXT", "1")
    body = """__shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    __syncthreads();
    x[threadIdx.x] = s[63 - threadIdx.x] + __reduce_add_sync(~0u, 1);"""
    y = run(body, blocks=2, seed=3, dtype=np.int32, element="int")
    assert y.tolist() == [95 - i for i in range(64)]


def test_missing_compiler_is_explained(monkeypatch):
    monkeypatch.setenv("DDTREE_CXX", "no-such-compiler")
    assert emulate.available() == (False, "DDTREE_CXX is 'no-such-compiler', which is not an executable")
    with pytest.raises(UnsupportedError, match="no-such-compiler"):
        emulate.Module(CODE)
    with pytest.raises(UnsupportedError, match="no-such-compiler"), emulate.active():
        pass
    monkeypatch.delenv("DDTREE_CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "install g++ or clang++" in emulate.available()[1]
    monkeypatch.setattr(_build.sys, "platform", "win32")
    assert "win32" in emulate.available()[1]


def test_sparse_array_reaches_past_32_bit_offsets():
    code = """extern "C" __global__ void copy(const short* x, short* y, long long row, int wide) {
      int t = threadIdx.x;
      y[t] = wide ? x[row * 512 + t] : x[(int)(unsigned)(row * 512 + t)];
    }"""
    pool = emulate.sparse_array((2**22 + 1, 512), np.int16)
    pool[2**22] = np.arange(512)
    y = np.full(512, -1, np.int16)
    function = emulate.Module(code).get_function("copy")
    function((1,), (512,), (pool, y, np.int64(2**22), np.int32(1)))
    assert pool.size > 2**31
    np.testing.assert_array_equal(y, np.arange(512))
    assert emulate.sparse_array((0, 3), "float32").shape == (0, 3)
    with pytest.raises(ArgumentError, match="shape"):
        emulate.sparse_array((-1,), "int8")
