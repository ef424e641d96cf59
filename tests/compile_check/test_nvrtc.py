"""NVRTC without a GPU: resources per architecture, limits, errors."""

import pytest

from ddtree_cupy.compile_check import nvrtc, resources
from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels import KernelSpec

CODE = """#include <cuda_bf16.h>
template <typename T>
__global__ void __launch_bounds__(128) flip(const T* x, T* y, float scale) {
  __shared__ float s[128];
  s[threadIdx.x] = (float)x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = (T)(s[127 - threadIdx.x] * scale);
}
extern "C" __global__ void __launch_bounds__(1024, 2) heavy(const float* x, float* y) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x + i * 1024];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) y[threadIdx.x + i * 1024] = v[i] * v[63 - i];
}
"""
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4flipIfEvPKT_PS0_f' for 'sm_90'
ptxas info    : Function properties for _Z4flipIfEvPKT_PS0_f
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 512 bytes smem
ptxas info    : Compile time = 1.2 ms
ptxas info    : Compiling entry function 'heavy' for 'sm_90'
ptxas info    : Function properties for heavy
    152 bytes stack frame, 148 bytes spill stores, 144 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 152 bytes cumulative stack size
"""


def flip(dtype, spelled, **changes):
    fields = {"source": "t/flip.cu", "code": CODE, "entry": f"flip<{spelled}>", "max_threads": 128}
    return KernelSpec(**(fields | changes))


HEAVY = KernelSpec("t/flip.cu", "heavy", code=CODE)


def test_parse_log():
    found = resources.parse_log(LOG)
    assert found["_Z4flipIfEvPKT_PS0_f"] == {
        "registers": 10,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "stack_bytes": 0,
        "static_shared_bytes": 512,
        "barriers": 1,
    }
    assert found["heavy"]["spill_store_bytes"] == 148
    assert found["heavy"]["static_shared_bytes"] == 0
    assert resources.parse_log("") == {}


def test_arch_specific_kernels_are_compiled_for_their_arch_only():
    assert resources.archs_of(flip("float32", "float"), resources.ARCHS) == (
        *("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    )
    assert resources.archs_of(flip("float32", "float", arch_specific="sm_90a"), resources.ARCHS) == ("sm_90a",)


def test_problems_name_each_broken_limit():
    spec = flip("float32", "float", max_registers=8, max_threads=1024, max_shared_bytes=100 * 1024)
    row = resources.Resources("t/flip.cu", "flip<float>", "sm_120", 80, 0, 4, 8, 200 * 1024, 1)
    found = resources.problems([row], [spec])
    assert len(found) == 5
    assert found[0] == "t/flip.cu: flip<float> on sm_120: 80 registers, at most 8"
    assert "102400 bytes of shared memory, the architecture has 99 KiB" in found[3]


needs_nvrtc = pytest.mark.skipif(not nvrtc.available()[0], reason=nvrtc.available()[1])


@pytest.mark.nvrtc
@needs_nvrtc
def test_kernel_table_covers_every_architecture():
    half = flip("float16", "__half", arch_specific="sm_90a", code="#include <cuda_fp16.h>\n" + CODE)
    specs = [flip("float32", "float"), flip("bfloat16", "__nv_bfloat16"), half, HEAVY]
    rows = resources.kernel_table(specs=specs)
    assert [row.arch for row in rows[:6]] == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert len(rows) == 6 + 6 + 1 + 6
    assert {row.static_shared_bytes for row in rows[:13]} == {512}
    assert all(0 < row.registers <= 64 for row in rows)
    assert any("bytes spilled" in line and "heavy" in line for line in resources.problems(rows, specs))
    assert not [line for line in resources.problems(rows, specs) if "flip<" in line]
    text = resources.format_table(rows)
    assert len(text.splitlines()) == len(rows) + 1
    assert resources.as_json(rows)[0]["kernel"] == "flip<float>"


@pytest.mark.nvrtc
@needs_nvrtc
def test_errors_name_our_file_architecture_and_version():
    version = ".".join(map(str, nvrtc.version()))
    with pytest.raises(CompileError, match=rf"(?s)^t/x\.cu\(7\): error.*t/x\.cu for sm_90, NVRTC {version}.*-ftz=true"):
        nvrtc.compile_text('#line 7 "t/x.cu"\nint x = oops;\n', "sm_90", name="t/x.cu")
    with pytest.raises(CompileError, match="no such kernel"):
        resources.kernel_table(["sm_90"], [flip("float32", "float", entry="absent")])
    with pytest.raises(CompileError, match="sm_12345"):
        nvrtc.compile_text("int x;", "sm_12345")


@pytest.mark.nvrtc
@needs_nvrtc
def test_plain_architectures_are_known_to_this_nvrtc():
    plain = {arch for arch in resources.ARCHS if not arch.endswith("a")}
    assert plain <= set(nvrtc.supported_archs())
