# ruff: noqa: E501 (rows of tables)
"""Snippets over the sections of "C++ Language Extensions" of the CUDA C++ Programming Guide, and their right answers.

Each is the body of a kernel of 32 threads that writes `y[t]`, a double, for t = threadIdx.x; `declarations` stand in
front of the kernel. `expected` is one number for all threads, or a function of t. A refused snippet names the feature.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Snippet:
    """One use of a feature."""

    section: str
    body: str
    expected: Any = None
    declarations: str = ""
    qualifiers: str = "__global__ void"
    refused: str = ""

    @property
    def needs_libcu(self) -> bool:
        """Whether NVRTC needs headers that come with libcu++, not with NVRTC."""
        return "cooperative_groups" in self.declarations or "<cuda/std" in self.declarations


def values(section: str, declarations: str = "", **_: Any) -> Callable[..., list[Snippet]]:
    """Return a function that makes snippets `y[t] = expression;` of (expression, expected) pairs."""
    return lambda *pairs: [Snippet(section, f"y[t] = {code};", right, declarations) for code, right in pairs]


def bodies(section: str, *rows: tuple[Any, ...]) -> list[Snippet]:
    return [Snippet(section, *row) for row in rows]


def refused(section: str, *rows: tuple[str, ...]) -> list[Snippet]:
    return [Snippet(section, body, refused=feature, declarations="".join(more)) for feature, body, *more in rows]


FP16, BF16 = "#include <cuda_fp16.h>", "#include <cuda_bf16.h>"
GROUPS = "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;"

SNIPPETS = [
    *[
        Snippet("function specifiers", "y[t] = 1;", 1, qualifiers=qualifiers)
        for qualifiers in (
            "__global__ void",
            "void __global__",
            "__global__ __launch_bounds__(32) void",
            "__global__ void __launch_bounds__(32)",
            "__global__ void __launch_bounds__(32, 2)",
            "__launch_bounds__(64) __global__ void",
            "__global__ __maxnreg__(64) void",
            "KERNEL",
        )
    ],
    *bodies(
        "function specifiers",
        ("y[t] = twice(t);", lambda t: 2 * t, "__device__ int twice(int a) { return 2 * a; }"),
        ("y[t] = thrice(t);", lambda t: 3 * t, "__host__ __device__ int thrice(int a) { return 3 * a; }"),
        ("y[t] = four(t);", lambda t: 4 * t, "__device__ __forceinline__ int four(int a) { return 4 * a; }"),
        ("y[t] = five(t);", lambda t: 5 * t, "__device__ __noinline__ int five(int a) { return 5 * a; }"),
        ("y[t] = down(5);", 15, "__device__ int down(int n) { return n ? n + down(n - 1) : 0; }"),
        (
            "y[t] = most<int>(t, 7);",
            lambda t: max(t, 7),
            "template <class T> __device__ T most(T a, T b) { return a < b ? b : a; }",
        ),
        (
            "y[t] = apply(t, [](int a) { return a + 1; });",
            lambda t: t + 1,
            "template <class F> __device__ int apply(int a, F f) { return f(a); }",
        ),
        ("auto f = [=](int a) { return a + t; }; y[t] = f(1);", lambda t: t + 1),
        (
            "Point p{t, 2}; y[t] = p.sum();",
            lambda t: t + 2,
            "struct Point { int a, b; __device__ int sum() const { return a + b; } };",
        ),
        ("y[t] = cube(3);", 27, "constexpr int cube(int a) { return a * a * a; }"),
        ("y[t] = inner::g(t);", lambda t: t - 1, "namespace inner { __device__ int g(int a) { return a - 1; } }"),
        ("int (*f)(int) = sub; y[t] = f(t);", lambda t: t - 2, "__device__ int sub(int a) { return a - 2; }"),
        ("y[t] = int(Kind::b);", 5, "enum class Kind { a, b = 5 };"),
        ("Bits u; u.f = 1.0f; y[t] = u.i == 0x3f800000;", 1, "union Bits { float f; int i; };"),
        ('static_assert(sizeof(int) == 4, ""); y[t] = sizeof(long long);', 8),
        ("y[t] = sum(1, 2, 3);", 6, "template <class... A> __device__ int sum(A... a) { return (a + ...); }"),
        ("auto [a, b] = make_int2(t, 1); y[t] = a + b;", lambda t: t + 1),
        ("int a[] = {1, 2, 3}; int s = 0; for (int v : a) s += v; y[t] = s;", 6),
        ("if constexpr (sizeof(int) == 4) y[t] = 1; else y[t] = 2;", 1),
        ("int* __restrict__ p = nullptr; y[t] = p == nullptr;", 1),
    ),
    *bodies(
        "variable specifiers",
        ("__shared__ int s[32]; s[t] = t; __syncthreads(); y[t] = s[31 - t];", lambda t: 31 - t),
        ("__shared__ static int s[32]; s[t] = t; __syncthreads(); y[t] = s[t];", lambda t: t),
        ("static __shared__ int s[32]; s[t] = t; __syncthreads(); y[t] = s[t];", lambda t: t),
        ("__shared__ __align__(16) float4 s[32]; s[t].x = t; __syncwarp(); y[t] = s[t ^ 1].x;", lambda t: t ^ 1),
        ("__shared__ int s; if (t == 3) s = 9; __syncthreads(); y[t] = s;", 9),
        ("__shared__ volatile int s[32]; s[t] = t; __syncwarp(); y[t] = s[t];", lambda t: t),
        ("__shared__ int a[2][16]; a[t / 16][t % 16] = t; __syncthreads(); y[t] = a[1][3];", 19),
        ("y[t] = c1[t & 1];", lambda t: 3 + (t & 1), "__constant__ int c1[2] = {3, 4};"),
        ("if (t == 0) d1 = 5; __syncthreads(); y[t] = d1;", 5, "__device__ int d1;"),
        ("y[t] = d2[t & 3];", lambda t: (t & 3) ** 2, "__device__ const float d2[4] = {0, 1, 4, 9};"),
        (
            "y[t] = shared_of<int>(t);",
            lambda t: t ^ 1,
            "template <class T> __device__ T shared_of(int t) { __shared__ T s[32]; s[t] = t; __syncthreads(); return s[t ^ 1]; }",
        ),
        ("alignas(16) float v[4] = {1, 2, 3, 4}; y[t] = reinterpret_cast<float4*>(v)->z;", 3),
    ),
    *values("vector types")(
        ("make_int2(1, 2).y", 2),
        ("make_int3(1, 2, 3).z", 3),
        ("make_int4(1, 2, 3, 4).w", 4),
        ("make_uchar4(1, 2, 3, 255).w", 255),
        ("make_char2(-1, 2).x", -1),
        ("make_short2(-3, 4).x", -3),
        ("make_ushort3(1, 2, 65535).z", 65535),
        ("make_uint3(1, 2, 3).z", 3),
        ("make_longlong2(1, 1ll << 40).y", 2**40),
        ("make_ulonglong2(1, 2).y", 2),
        ("make_float1(2.5f).x", 2.5),
        ("make_float3(1, 2, 3.5f).z", 3.5),
        ("make_double2(1, 2.25).y", 2.25),
        ("sizeof(float3)", 12),
        ("alignof(float4)", 16),
        ("sizeof(double4)", 32),
        ("alignof(int2)", 8),
        ("sizeof(uchar3)", 3),
    ),
    *bodies(
        "built-in variables",
        ("y[t] = threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z;", lambda t: t),
        ("y[t] = blockDim.x + gridDim.x;", 33),
        ("y[t] = warpSize;", 32),
        ("uint3 a = threadIdx; y[a.x] = a.x;", lambda t: t),
        ("dim3 g = gridDim; y[t] = g.x * g.y * g.z;", 1),
        ("dim3 b = blockDim; uint3 i = blockIdx; y[t] = b.x + i.x;", 32),
        ("const auto& i = threadIdx; y[t] = i.x;", lambda t: t),
        ("dim3 d(2, 3); y[t] = d.x * d.y * d.z;", 6),
    ),
    *values("architecture")(("__CUDA_ARCH__ >= 900", 1), ("__CUDACC_RTC__", 1)),
    *bodies(
        "architecture",
        ("#ifdef __CUDA_ARCH__\ny[t] = 1;\n#else\ny[t] = 2;\n#endif", 1),
        ("#if defined(__CUDACC__)\ny[t] = 1;\n#endif", 1),
    ),
    *bodies(
        "fences and barriers",
        ("y[t] = t; __threadfence();", lambda t: t),
        ("y[t] = t; __threadfence_block();", lambda t: t),
        ("y[t] = t; __threadfence_system();", lambda t: t),
        ("__syncthreads(); y[t] = 1;", 1),
        ("y[t] = __syncthreads_count(t < 5);", 5),
        ("y[t] = __syncthreads_and(t < 32);", 1),
        ("y[t] = __syncthreads_or(t == 40);", 0),
        ("__syncwarp(); y[t] = 1;", 1),
        ("if (t < 16) __syncwarp(0xffff); y[t] = 1;", 1),
    ),
    *values("math")(
        ("sqrtf(4.0f)", 2),
        ("rsqrtf(0.25f)", 2),
        ("cbrtf(27.0f)", 3),
        ("hypotf(3, 4)", 5),
        ("rhypotf(3, 4) * 5", 1),
        ("norm3df(2, 3, 6)", 7),
        ("expf(0.0f)", 1),
        ("exp2f(3.0f)", 8),
        ("exp10f(2.0f)", 100),
        ("expm1f(0.0f)", 0),
        ("logf(1.0f)", 0),
        ("log2f(8.0f)", 3),
        ("log10f(1000.0f)", 3),
        ("log1pf(0.0f)", 0),
        ("powf(2, 10)", 1024),
        ("sinf(0.0f)", 0),
        ("cosf(0.0f)", 1),
        ("tanf(0.0f)", 0),
        ("sinpif(0.5f)", 1),
        ("cospif(1.0f)", -1),
        ("asinf(0.0f)", 0),
        ("acosf(1.0f)", 0),
        ("atan2f(0.0f, 1.0f)", 0),
        ("sinhf(0.0f)", 0),
        ("tanhf(0.0f)", 0),
        ("erff(0.0f)", 0),
        ("erfcf(0.0f)", 1),
        ("normcdff(0.0f)", 0.5),
        ("tgammaf(5.0f)", 24),
        ("lgammaf(1.0f)", 0),
        ("fmaf(2, 3, 4)", 10),
        ("fmodf(7, 4)", 3),
        ("remainderf(7, 4)", -1),
        ("copysignf(3, -1)", -3),
        ("fdimf(5, 3)", 2),
        ("fmaxf(1, 2)", 2),
        ("fminf(1, 2)", 1),
        ("fabsf(-2.5f)", 2.5),
        ("ceilf(1.2f)", 2),
        ("floorf(-1.2f)", -2),
        ("truncf(-1.7f)", -1),
        ("roundf(2.5f)", 3),
        ("rintf(2.5f)", 2),
        ("nearbyintf(3.5f)", 4),
        ("lrintf(2.5f)", 2),
        ("llroundf(2.5f)", 3),
        ("ldexpf(1.5f, 3)", 12),
        ("ilogbf(10.0f)", 3),
        ("logbf(10.0f)", 3),
        ("scalbnf(1.0f, 4)", 16),
        ("nextafterf(1.0f, 2.0f) > 1.0f", 1),
        ("fdividef(6, 3)", 2),
        ("saturate(t)", 1),
        ('isnan(nanf(""))', 1),
        ("isinf(1.0f / 0.0f)", 1),
        ("isfinite(1.0f)", 1),
        ("signbit(-0.0f) != 0", 1),
        ("sqrt(16.0)", 4),
        ("fma(2.0, 3.0, 1.0)", 7),
        ("pow(2.0, 0.5) > 1.414", 1),
        ("rsqrt(4.0)", 0.5),
        ("abs(-3)", 3),
        ("llabs(-3ll)", 3),
        ("min(2, 3)", 2),
        ("max(2u, 3u)", 3),
        ("max(-1, 1u)", 2**32 - 1),
        ("__expf(0.0f)", 1),
        ("__logf(1.0f)", 0),
        ("__powf(2.0f, 3.0f)", 8),
        ("__sinf(0.0f)", 0),
        ("__tanf(0.0f)", 0),
        ("__fdividef(6.0f, 3.0f)", 2),
        ("__saturatef(1.5f)", 1),
        ("__fadd_rz(1.0f, 1e-9f) == 1.0f", 1),
        ("__fadd_ru(1.0f, 1e-9f) > 1.0f", 1),
        ("__fsub_rd(1.0f, 1e-9f) < 1.0f", 1),
        ("__fmul_ru(1.1f, 1.1f) > __fmul_rd(1.1f, 1.1f)", 1),
        ("__fdiv_ru(1, 3) > __fdiv_rd(1, 3)", 1),
        ("__fsqrt_ru(2) > __fsqrt_rz(2)", 1),
        ("__frcp_ru(3) > __frcp_rd(3)", 1),
        ("__fmaf_ru(1, 1, 1e-9f) > 1", 1),
        ("__dadd_ru(1.0, 1e-20) > 1.0", 1),
        ("__dmul_rz(1.5, 1.5)", 2.25),
        ("__ddiv_ru(1, 3) > __ddiv_rd(1, 3)", 1),
        ("__fma_rd(1.0, 1.0, -1e-20) < 1.0", 1),
        ("__dsqrt_rn(4.0)", 2),
        ("__drcp_rn(4.0)", 0.25),
    ),
    *values("conversions")(
        ("__float2int_rn(2.5f)", 2),
        ("__float2int_rz(-2.7f)", -2),
        ("__float2int_ru(2.1f)", 3),
        ("__float2int_rd(-2.1f)", -3),
        ("__float2int_rz(3e9f)", 2**31 - 1),
        ("__float2uint_rz(-1.0f)", 0),
        ("__float2uint_rn(3e9f)", 3e9),
        ("__float2ll_rz(1e12f) == 999999995904ll", 1),
        ("__float2ull_rn(2.5f)", 2),
        ("__double2int_rn(2.5)", 2),
        ("__double2uint_rz(2.9)", 2),
        ("__double2ll_rz(-2.9)", -2),
        ("__int2float_rn(3)", 3),
        ("__int2float_rz(16777217)", 16777216),
        ("__int2float_ru(16777217)", 16777218),
        ("__uint2double_rn(4294967295u)", 2**32 - 1),
        ("__ll2float_rn(1ll << 40)", 2**40),
        ("__ull2double_rn(5)", 5),
        ("__double2float_rn(0.1) == 0.1f", 1),
        ("__double2float_rd(0.1) < 0.1f", 1),
        ("__float_as_int(1.0f) == 0x3f800000", 1),
        ("__int_as_float(0x40000000)", 2),
        ("__double2hiint(1.0) == 0x3ff00000", 1),
        ("__hiloint2double(0x3ff00000, 0)", 1),
        ("__longlong_as_double(0x4000000000000000ll)", 2),
    ),
    *values("integer intrinsics")(
        ("__popc(0xf0f0)", 8),
        ("__popcll(~0ull)", 64),
        ("__clz(1)", 31),
        ("__clzll(1)", 63),
        ("__ffs(8)", 4),
        ("__ffsll(0)", 0),
        ("__brev(1) == 0x80000000u", 1),
        ("__mulhi(1 << 30, 8)", 2),
        ("__umulhi(1u << 31, 4)", 2),
        ("__mul64hi(1ll << 62, 8)", 2),
        ("__umul64hi(1ull << 63, 4)", 2),
        ("__mul24(3, -4)", -12),
        ("__umul24(3, 5)", 15),
        ("__sad(1, 5, 2)", 6),
        ("__usad(1, 5, 2)", 6),
        ("__hadd(3, 6)", 4),
        ("__rhadd(3, 6)", 5),
        ("__uhadd(3u, 6u)", 4),
        ("__urhadd(3u, 6u)", 5),
        ("__byte_perm(0x33221100, 0x77665544, 0x0427) == 0x00442277", 1),
        ("__funnelshift_l(1u << 31, 0, 1)", 1),
        ("__funnelshift_r(0, 1, 1) == 0x80000000u", 1),
        ("__funnelshift_lc(7, 1, 40)", 7),
        ("__funnelshift_rc(1, 7, 40)", 7),
        ("__dp4a(0x01020304, 0x01010101, 5)", 15),
        ("__dp4a(0x01020304u, 0x01010101u, 5u)", 15),
        ("__dp2a_lo(0x00020003, 0x00000201, 1)", 8),
        ("__dp2a_hi(0x00020003, 0x02010000, 1)", 8),
    ),
    *refused("video instructions", ("video instructions", "y[t] = __vsads4(t, 2);")),
    *values("video instructions")(
        ("__vadd2(0x0001ffff, 0x00010001) == 0x00020000", 1),
        ("__vsub4(0x03030303, 0x01010101) == 0x02020202", 1),
        ("__vaddus4(0xff000000, 0x01000000) == 0xff000000", 1),
        ("__vmaxs2(0x0001ffff, 0) == 0x00010000", 1),
        ("__vmaxu2(0x0001ffff, 0) == 0x0001ffff", 1),
        ("__vminu4(0x01020304, 0x02020202) == 0x01020202", 1),
        ("__vabsdiffu4(0x05000000, 0x02000001) == 0x03000001", 1),
        ("__vcmpeq4(0x01020304, 0x01000300) == 0xff00ff00 - 0xff00 + 0xff00", 1),
        ("__vseteq2(0x00010002, 0x00010003) == 0x00010000", 1),
        ("__vavgu4(0x03000000, 0x04000000) == 0x04000000", 1),
        ("__vneg2(0x00010002) == 0xfffffffe", 1),
        ("__vabs4(0xff000000) == 0x01000000", 1),
    ),
    *bodies(
        "cache hints",
        *[
            (f"__shared__ int unused; y[t] = {name}(&y[t]) + 1;", 1)
            for name in ("__ldg", "__ldca", "__ldcg", "__ldcs", "__ldcv", "__ldlu")
        ],
        *[(f"{name}(&y[t], 2.0 + t);", lambda t: 2 + t) for name in ("__stwb", "__stcg", "__stcs", "__stwt")],
        ("y[t] = __ldg(reinterpret_cast<const int4*>(y)).x;", 0),
        ("y[t] = __ldg(reinterpret_cast<const double2*>(y)).y;", 0),
    ),
    *bodies(
        "time",
        ("long long a = clock64(), b = clock64(); y[t] = b >= a;", 1),
        ("clock_t a = clock(); y[t] = a == a;", 1),
        ("__nanosleep(20); y[t] = 1;", 1),
    ),
    *bodies(
        "atomics",
        *[
            (
                f"__shared__ {kind} s; if (t == 0) s = {start}; __syncthreads(); {name}(&s, {value}); __syncthreads(); y[t] = s;",
                right,
            )
            for name, kind, start, value, right in (
                ("atomicAdd", "int", 0, "t", 496),
                ("atomicAdd", "unsigned", 1, "1u", 33),
                ("atomicAdd", "float", 0, "0.5f", 16),
                ("atomicAdd", "double", 0, "0.25", 8),
                ("atomicAdd", "unsigned long long", 0, "1ull", 32),
                ("atomicSub", "int", 100, "1", 68),
                ("atomicMax", "int", -5, "t", 31),
                ("atomicMin", "int", 50, "t", 0),
                ("atomicMax", "unsigned long long", 0, "(unsigned long long)t", 31),
                ("atomicAnd", "unsigned", 255, "~(1u << t)", 0),
                ("atomicOr", "unsigned", 0, "1u << t", 2**32 - 1),
                ("atomicXor", "unsigned", 0, "1u << t", 2**32 - 1),
                ("atomicInc", "unsigned", 0, "9u", 2),
                ("atomicDec", "unsigned", 0, "9u", 8),
                ("atomicAdd_block", "int", 0, "1", 32),
            )
        ],
        ("__shared__ int s; if (t == 0) s = 0; __syncthreads(); atomicExch(&s, 7); __syncthreads(); y[t] = s;", 7),
        ("__shared__ int s; if (t == 0) s = 5; __syncthreads(); atomicCAS(&s, 5, 6); __syncthreads(); y[t] = s;", 6),
        (
            "__shared__ float2 s; if (t == 0) s = make_float2(0, 0); __syncthreads(); atomicAdd(reinterpret_cast<float*>(&s) + (t & 1), 1.0f); __syncthreads(); y[t] = s.y;",
            16,
        ),
        (
            "if (t == 0) for (int i = 0; i < 3; ++i) atomicAdd(reinterpret_cast<float2*>(y), make_float2(1, 2)); __syncthreads(); float s = reinterpret_cast<float2*>(y)->y; __syncthreads(); y[t] = s;",
            6,
        ),
        (
            "__shared__ __half2 s; if (t == 0) s = __float2half2_rn(0.0f); __syncthreads(); atomicAdd(&s, __float2half2_rn(1.0f)); __syncthreads(); y[t] = __low2float(s);",
            32,
            FP16,
        ),
    ),
    *bodies(
        "address spaces",
        ("__shared__ int s; y[t] = __isShared(&s) && !__isShared(y);", 1),
        ("__shared__ int s; y[t] = __isGlobal(y) && !__isGlobal(&s);", 1),
        ("volatile int v = t; y[t] = __isLocal((const void*)&v) && !__isLocal(y);", 1),
        ("__shared__ int s; y[t] = __cvta_generic_to_shared(&s) % 4;", 0),
    ),
    *bodies(
        "optimisation hints",
        ("y[t] = __builtin_expect(t == 3, 0) ? 1 : 2;", lambda t: 1 if t == 3 else 2),
        ("__builtin_assume(t >= 0); y[t] = t;", lambda t: t),
        ("const double* p = (const double*)__builtin_assume_aligned(y, 8); y[t] = p == y;", 1),
        ("int s = 0;\n#pragma unroll\nfor (int i = 0; i < 4; ++i) s += i;\ny[t] = s;", 6),
        ("int s = 0;\n#pragma unroll 1\nfor (int i = 0; i < 4; ++i) s += i;\ny[t] = s;", 6),
        ("if (t > 40) __builtin_unreachable(); y[t] = 1;", 1),
    ),
    *values("warp functions")(
        ("__shfl_sync(~0u, t, 3)", 3),
        ("__shfl_sync(~0u, t, 1, 8)", lambda t: t // 8 * 8 + 1),
        ("__shfl_up_sync(~0u, t, 1)", lambda t: max(t - 1, 0)),
        ("__shfl_down_sync(~0u, t, 2)", lambda t: t + 2 if t < 30 else t),
        ("__shfl_xor_sync(~0u, t, 5)", lambda t: t ^ 5),
        ("__shfl_sync(~0u, 1.5, 0)", 1.5),
        ("__shfl_sync(~0u, 1ll << 40, 0)", 2**40),
        ("__shfl_sync(~0u, 2.5f, 7)", 2.5),
        ("__all_sync(~0u, t < 32)", 1),
        ("__any_sync(~0u, t == 31)", 1),
        ("__ballot_sync(~0u, t & 1) == 0xaaaaaaaau", 1),
        ("__popc(__match_any_sync(~0u, t / 8))", 8),
        ("__reduce_add_sync(~0u, t)", 496),
        ("__reduce_max_sync(~0u, t)", 31),
        ("__reduce_min_sync(~0u, (unsigned)t)", 0),
        ("__reduce_or_sync(~0u, 1u << t) == ~0u", 1),
        ("__reduce_and_sync(~0u, ~0u) == ~0u", 1),
        ("__reduce_xor_sync(~0u, 1u)", 0),
        ("(__activemask() >> t) & 1", 1),
    ),
    *bodies(
        "warp functions",
        ("int same; y[t] = __match_all_sync(~0u, 1, &same) == ~0u && same;", 1),
        ("if (t < 8) y[t] = __shfl_sync(0xff, t, 0) + 1; else y[t] = 1;", 1),
        ("float v = t; for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o); y[t] = v;", 496),
    ),
    *[
        Snippet("half and bfloat16", body, right, declarations)
        for declarations, one, pair, to in (
            (FP16, "__half", "__half2", "__float2half"),
            (BF16, "__nv_bfloat16", "__nv_bfloat162", "__float2bfloat16"),
        )
        for body, right in (
            (f"{one} a = {to}(1.5f), b = {to}(2.0f); y[t] = float(a * b + a - b / b);", 3.5),
            (f"{one} a = {to}(1.5f); y[t] = float(__hmul(a, a)) + float(__hfma(a, a, a)) + float(__hneg(a));", 4.5),
            (f"{one} a = {to}(1.5f), b = {to}(2.0f); y[t] = (a < b) + __hgt(b, a) + __heq(a, a) + (a != b);", 4),
            (
                f"{pair} a = {{{to}(1.0f), {to}(2.0f)}}, b = a; a = a + b * b - a / b; a += b; y[t] = __low2float(a) + __high2float(a);",
                9,
            ),
            (
                f"{pair} a = {{{to}(1.0f), {to}(2.0f)}}; y[t] = (a == a) + __high2float(__hadd2(a, a)) + __low2float(-a);",
                4,
            ),
            (f"{one} a = {to}(float(t)); y[t] = float(__shfl_sync(~0u, a, 5));", 5),
        )
    ],
    *bodies(
        "cooperative groups",
        ("auto b = cg::this_thread_block(); b.sync(); y[t] = b.thread_rank() + b.size();", lambda t: t + 32, GROUPS),
        ("auto b = cg::this_thread_block(); y[t] = b.group_index().x + b.thread_index().x;", lambda t: t, GROUPS),
        (
            "auto w = cg::tiled_partition<32>(cg::this_thread_block()); y[t] = w.shfl_down(t, 1);",
            lambda t: min(t + 1, 31),
            GROUPS,
        ),
        (
            "auto w = cg::tiled_partition<8>(cg::this_thread_block()); y[t] = w.thread_rank() + 100 * w.meta_group_rank();",
            lambda t: t % 8 + 100 * (t // 8),
            GROUPS,
        ),
        (
            "auto w = cg::tiled_partition<4>(cg::this_thread_block()); int v = t; for (int o = 2; o; o /= 2) v += w.shfl_xor(v, o); y[t] = v;",
            lambda t: 16 * (t // 4) + 6,
            GROUPS,
        ),
        (
            "auto w = cg::tiled_partition<16>(cg::this_thread_block()); w.sync(); y[t] = w.ballot(t & 1) == 0xaaaa;",
            1,
            GROUPS,
        ),
        (
            "auto w = cg::tiled_partition<16>(cg::this_thread_block()); y[t] = w.any(t == 3) + w.all(t < 16);",
            lambda t: 2 if t < 16 else 0,
            GROUPS,
        ),
        (
            "cg::thread_block_tile<32> w = cg::tiled_partition<32>(cg::this_thread_block()); y[t] = cg::reduce(w, t, cg::plus<int>());",
            496,
            "#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\nnamespace cg = cooperative_groups;",
        ),
    ),
    *bodies(
        "asynchronous copies",
        (
            "__shared__ double s[32]; if (t == 0) for (int i = 0; i < 32; ++i) y[i] = i; __syncthreads(); __pipeline_memcpy_async(&s[t], &y[t], 8); "
            "__pipeline_commit(); __pipeline_wait_prior(0); __syncthreads(); y[t] = s[31 - t];",
            lambda t: 31 - t,
            "#include <cuda_pipeline.h>",
        ),
    ),
    *bodies(
        "assertions and output",
        ("assert(t < 32); y[t] = 1;", 1),
        ("if (t > 40) __trap(); y[t] = 1;", 1),
        ("if (t > 40) __brkpt(); y[t] = 1;", 1),
        ('if (t > 40) printf("%d\\n", t); y[t] = 1;', 1),
    ),
    *bodies(
        "memory allocation",
        ("int* p = (int*)malloc(4); *p = t; y[t] = *p; free(p);", lambda t: t),
        ("int* p = new int[2]; p[1] = t; y[t] = p[1]; delete[] p;", lambda t: t),
    ),
    *bodies(
        "headers",
        ("y[t] = (uint32_t)1 + sizeof(cuda::std::int64_t);", 9, "#include <cuda/std/cstdint>"),
        ("y[t] = cuda::std::is_same<int, int>::value;", 1, "#include <cuda/std/type_traits>"),
        ("y[t] = isinf(CUDART_INF_F) + isnan(CUDART_NAN_F);", 2, "#include <math_constants.h>"),
        ("y[t] = make_float2(1, 2).y;", 2, "#include <vector_types.h>"),
    ),
    *refused(
        "textures",
        ("textures and surfaces", "y[t] = tex1Dfetch<float>(cudaTextureObject_t(0), t);"),
        ("textures and surfaces", "y[t] = tex2D<float>(cudaTextureObject_t(0), 0.0f, 0.0f);"),
        ("textures and surfaces", "float v; surf1Dread(&v, cudaSurfaceObject_t(0), 0); y[t] = v;"),
    ),
    *refused(
        "cooperative groups",
        ("groups of cooperative_groups", "cg::this_grid().sync(); y[t] = 1;", GROUPS),
        ("groups of cooperative_groups", "auto g = cg::coalesced_threads(); y[t] = g.size();", GROUPS),
        ("groups of cooperative_groups", "cg::this_cluster().sync(); y[t] = 1;", GROUPS),
    ),
    *refused(
        "inline PTX",
        ("inline PTX without a host twin", 'unsigned r; asm("mov.u32 %0, %%laneid;" : "=r"(r)); y[t] = r;'),
        ("inline PTX without a host twin", 'asm volatile("bar.sync 0;"); y[t] = 1;'),
    ),
    *refused(
        "math",
        ("inverse error functions", "y[t] = erfinvf(0.0f);"),
        ("inverse error functions", "y[t] = normcdfinv(0.5);"),
        ("inverse error functions", "y[t] = cyl_bessel_i0f(0.0f);"),
    ),
    *refused("address spaces", ("the address space of constants", "y[t] = __isConstant(y);")),
    *refused(
        "libcu++",
        ("libcu++ beyond", "cuda::atomic<int> a(1); y[t] = a.load();", "#include <cuda/atomic>"),
        (
            "libcu++ beyond",
            "__shared__ cuda::barrier<cuda::thread_scope_block> b; y[t] = 1;",
            "#include <cuda/barrier>",
        ),
    ),
    *refused("clusters", ("thread block clusters", "__cluster_barrier_arrive(); y[t] = 1;")),
]
