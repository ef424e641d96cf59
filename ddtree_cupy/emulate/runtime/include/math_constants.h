// math_constants.h: the constants of CUDA's header that kernels use.
#pragma once
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
#define CUDART_INF __longlong_as_double(0x7ff0000000000000ll)
#define CUDART_NAN __longlong_as_double(0xfff8000000000000ll)
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f
