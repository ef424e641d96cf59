// ddtree_emulate.h: CUDA's device language on a host compiler. Included in front of every translated kernel text.
#pragma once
#include "emu_language.h"
#include "emu_warp.h"
#include "emu_atomics.h"
#include "emu_math.h"
#include "emu_half.h"
#include "emu_async.h"
#include "emu_intrinsics.h"
#include "emu_simd.h"
#include "emu_kernel.h"
