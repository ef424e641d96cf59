"""AddressSanitizer, UBSan and ThreadSanitizer find what the emulator alone cannot; each in a child process."""

import os
import subprocess
import sys

import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError, UnsupportedError

pytestmark = [pytest.mark.emulate, pytest.mark.sanitizer]

CHILD = r'''
import sys
import numpy as np
from ddtree_cupy import emulate
code = """extern "C" __global__ void k(const float* x, float* y, int n) {
  int t = threadIdx.x;
%s
}"""
x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
function = emulate.Module(code).get_function("k")
for seed in range(2):
    function((2,), (64,), (x, y, np.int32(2147483647)), 256, seed)
print("finished", y.sum())
'''
# Reductions, dynamic and static shared memory, warp operations, early loops: nothing here is wrong.
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
"""


@pytest.fixture(autouse=True)
def gnu_compiler():
    if "clang" in emulate.compiler():
        pytest.skip("the sanitizer modes need g++")


def run(kind, body):
    environment = os.environ | emulate.sanitizer_environment(kind) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", CHILD % body], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return child.returncode, child.stdout, child.stderr


@pytest.mark.parametrize("kind", ["asan+ubsan", "tsan"])
def test_good_kernel_is_clean(kind):
    code, out, err = run(kind, GOOD)
    assert code == 0, err
    assert out.startswith("finished")
    assert "WARNING: ThreadSanitizer" not in err


@pytest.mark.parametrize(
    ("kind", "body", "report"),
    [
        ("asan", "__shared__ float s[60]; s[t] = 1; __syncthreads(); y[t] = s[t];", "global-buffer-overflow"),
        ("asan", "extern __shared__ float s[];\ns[t + 1] = 1;\n__syncthreads(); y[t] = s[t];", "heap-buffer-overflow"),
        ("asan", "y[t + 1] = x[t];", "heap-buffer-overflow"),
        ("ubsan", "y[t] = n + t + 1;", "signed integer overflow"),
        ("ubsan", "*(float4*)(y + 1) = make_float4(1, 2, 3, 4);", "misaligned address"),
        ("tsan", "__shared__ float s[64];\ns[t] = t;\ny[t] = s[63 - t];", "data race"),
    ],
    ids=["static-shared", "dynamic-shared", "global", "overflow", "misaligned", "race"],
)
def test_fault_is_reported(kind, body, report):
    code, out, err = run(kind, body)
    assert code != 0, out
    assert report in err
    assert "kernel.cu:" in err


def test_wrong_start_is_explained(monkeypatch):
    monkeypatch.setenv("DDTREE_EMULATE_SANITIZE", "asan")
    with pytest.raises(EmulatorError, match="sanitizer_environment"):
        emulate.Module('extern "C" __global__ void k() {}')
    monkeypatch.setenv("DDTREE_EMULATE_SANITIZE", "msan")
    with pytest.raises(UnsupportedError, match="msan"):
        emulate.Module('extern "C" __global__ void k() {}')
    with pytest.raises(UnsupportedError, match="msan"):
        emulate.sanitizer_environment("msan")
