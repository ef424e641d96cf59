"""What C++ leaves undefined is an error with the line, in builds without a sanitizer; what a GPU defines is right."""

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError
from tests.emulate.cases import run

pytestmark = pytest.mark.emulate

SMALLEST = "(-2147483647 - 1)"


def launch(body, n=1):
    """Run four threads that know n, a number the compiler does not know; return x."""
    code = f'extern "C" __global__ void k(float* x, int n) {{\nint i = threadIdx.x;\n{body}\n}}'
    x = np.zeros(8, np.float32)
    emulate.Module(code).get_function("k")((1,), (4,), (x, np.int32(n)))
    return x


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x[0] = reinterpret_cast<float4*>(x + n)->y;", r"misaligned access: .* `float4` is \d+ more .* of 16 bytes"),
        ("x[0] = *reinterpret_cast<double*>(x + n);", r"misaligned access: .* `double` is 4 more .* of 8 bytes"),
        ("x[0] = 7 / (n - 1);", "integer division by zero"),
        ("x[0] = 7u % (n - 1);", "integer division by zero"),
        ("x[0] = 7ll / (n - 1ll);", "integer division by zero"),
        (f"x[0] = ({SMALLEST} + n - 1) / (n - 2);", "integer division .* of the smallest .* by -1"),
        ("x[0] = 1u << (n + 31);", "shift of a 32-bit value by 32, expected 0 to 31"),
        ("x[0] = 8 >> (n - 2);", "shift of a 32-bit value by -1, expected 0 to 31"),
        ("x[0] = 1ull << (n + 63);", "shift of a 64-bit value by 64, expected 0 to 63"),
        ("x[0] = int(n * 3e9f);", r"3e\+09 does not fit `int`: .*a GPU gives the nearest"),
        ("x[0] = unsigned(n * -1.0f);", "-1 does not fit `unsigned int`"),
        ("x[0] = int(n * 1e300);", r"1e\+300 does not fit `int`"),
        ("x[0] = int(n * __int_as_float(0x7fc00000));", "nan does not fit `int`"),
        (
            "__shared__ float s[4]; s[i + n] = 1; x[i] = s[i];",
            r"index 4 is outside of `float ?\[4\]`",
        ),
        ("float s[4] = {}; x[i] = s[i - n];", r"index -1 is outside of `float ?\[4\]`"),
        ("__shared__ float s[2][4]; s[n][i + n] = 1; x[i] = s[0][i];", r"index 4 is outside of `float ?\[4\]`"),
    ],
)
def test_undefined_behaviour_is_reported_with_its_line(body, message):
    with pytest.raises(EmulatorError, match=rf"^k: block \(0,0,0\) thread \(\d,0,0\): kernel\.cu:3: .*{message}"):
        launch(body)
    assert run("x[threadIdx.x] = 1;").sum() == 64  # the emulator is fine afterwards


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x[i] = n + 2147483647;", -(2.0**31)),  # wraps, as on a GPU, and as hashes want it
        ("x[i] = (n * 65537) * 65537;", 131073),
        ("x[i] = __float2int_rz(n * 3e9f);", 2.0**31),
        ("x[i] = __float2uint_rz(n * -1.0f);", 0),
        ("x[i] = __float2int_rn(n * __int_as_float(0x7fc00000));", 0),
        ("x[i] = unsigned(n * 4e9f) == 4000000000u;", 1),
        ("x[i] = -8 >> n;", -4),
        ("x[i] = -1 << n;", -2),
        ("float s[4] = {1, 2, 3, 4}; float* end = &s[4]; x[i] = end[-n];", 4),
        (f"x[i] = {SMALLEST} / n;", -(2.0**31)),
    ],
)
def test_what_a_gpu_defines_is_right(body, expected):
    assert launch(body)[:4].tolist() == [expected] * 4
