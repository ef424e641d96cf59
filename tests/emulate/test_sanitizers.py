"""AddressSanitizer, UBSan and ThreadSanitizer find what the emulator alone cannot; each in a child process."""

import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError, UnsupportedError
from tests.emulate.cases import run_python

pytestmark = [pytest.mark.emulate, pytest.mark.sanitizer, pytest.mark.slow]

CHILD = r'''
import sys
import numpy as np
from ddtree_cupy import emulate
code = """extern "C" __global__ void k(const float* x, float* y, int n) {
  int t = threadIdx.x;
  y += 64 * blockIdx.x;
%s
}"""
x, y = np.ones(64, np.float32), np.zeros(128, np.float32)
function = emulate.Module(code).get_function("k")
for seed in range(int(sys.argv[1])):
    function((2,), (64,), (x, y, np.int32(2147483647)), 256, seed)
print("finished", y.sum())
'''
# Reductions, dynamic and static shared memory, warp operations, named barriers, early loops: nothing here is wrong.
GOOD = """
  __shared__ float s[64];
  extern __shared__ float d[];
  s[t] = x[t];
  d[t] = 2;
  __syncthreads();
  float v = s[63 - t] * d[t ^ 1];
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();
  if (t < 32) s[t] = v;
  __syncthreads();
  y[t] = s[t & 31];
  __syncthreads();
  atomicAdd(&y[0], 0.0f);
  if (t < 32) s[t] = x[t];
  if (t < 32) emu_named_arrive(1, 64, EMU_HERE);
  else emu_named_barrier(1, 64, nullptr, nullptr, EMU_HERE);
  if (t >= 32) y[t] = s[t - 32];
"""


@pytest.fixture(autouse=True)
def gnu_compiler():
    if "clang" in emulate.compiler():
        pytest.skip("the sanitizer modes need g++")


def run(kind, body, seeds=2):
    child = run_python(CHILD % body, str(seeds), **emulate.sanitizer_environment(kind))
    return child.returncode, child.stdout.decode(), child.stderr.decode()


@pytest.mark.parametrize("kind", ["asan+ubsan", "tsan"])
def test_good_kernel_is_clean(kind):
    code, out, err = run(kind, GOOD)
    assert code == 0, err
    assert out.startswith("finished")
    assert "WARNING: ThreadSanitizer" not in err


DYNAMIC = "extern __shared__ float s[];\ns[t] = 1;\n__syncthreads();\n"


@pytest.mark.parametrize(
    ("kind", "body", "report"),
    [
        ("asan", "__shared__ float s[60]; s[t] = 1; __syncthreads(); y[t] = s[t];", "global-buffer-overflow"),
        ("asan", DYNAMIC + "y[t] = s[t - 1];", "use-after-poison"),
        ("asan", DYNAMIC + "s[t - 1] = 1;", "use-after-poison"),
        ("asan", DYNAMIC + "y[t] = s[t + 1];", "heap-buffer-overflow"),
        ("asan", DYNAMIC + "s[t + 1] = 1;", "heap-buffer-overflow"),
        ("asan", "y[t + 1] = x[t];", "heap-buffer-overflow"),
        ("ubsan", "y[t] = n + t + 1;", "signed integer overflow"),
        ("ubsan", "*(float4*)(y + 1) = make_float4(1, 2, 3, 4);", "misaligned address"),
        ("tsan", "__shared__ float s[64];\ns[t] = t;\ny[t] = s[63 - t];", "data race"),
    ],
    ids=[
        "static",
        "read before",
        "write before",
        "read after",
        "write after",
        "global",
        "overflow",
        "misaligned",
        "race",
    ],
)
def test_fault_is_reported(kind, body, report):
    code, out, err = run(kind, body)
    assert code != 0, out
    assert report in err
    assert f"kernel.cu:{4 + body.count(chr(10))}" in err or kind == "tsan"


def test_arriving_at_a_named_barrier_orders_nothing_after_it():
    body = """__shared__ float s[64];
    s[t] = t;
    if (t < 32) emu_named_barrier(1, 64, nullptr, nullptr, EMU_HERE);
    else emu_named_arrive(1, 64, EMU_HERE);
    %s"""
    # in index order thread 63 arrives last, so nobody waits any more, but only those who wait see the others' stores
    code, _, err = run("tsan", body % "if (t == 63) y[t] = s[0];", seeds=1)
    assert code == 66
    assert "data race" in err
    assert "kernel.cu:8" in err
    code, _, err = run("tsan", body % "if (t == 0) y[t] = s[63];", seeds=2)
    assert code == 0, err


def test_wrong_start_is_explained(monkeypatch):
    monkeypatch.setenv("DDTREE_EMULATE_SANITIZE", "asan")
    with pytest.raises(EmulatorError, match="sanitizer_environment"):
        emulate.Module('extern "C" __global__ void k() {}')
    monkeypatch.setenv("DDTREE_EMULATE_SANITIZE", "msan")
    with pytest.raises(UnsupportedError, match="msan"):
        emulate.Module('extern "C" __global__ void k() {}')
    with pytest.raises(UnsupportedError, match="msan"):
        emulate.sanitizer_environment("msan")
