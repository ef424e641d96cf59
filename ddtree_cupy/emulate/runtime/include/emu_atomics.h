// emu_atomics.h: atomics and cache-hinted loads and stores.
//
// Threads only change places at synchronisation points, so a plain read-modify-write would do; the compiler's atomics
// make ThreadSanitizer treat these accesses as atomic, as CUDA does (relaxed order). Fences matter to it alone.
#pragma once
#include "emu_language.h"

#if defined(__SANITIZE_THREAD__)
#define EMU_FENCE() emu_fence()
#define EMU_ORDER_ATOMIC(address) emu_order_atomic(address)
#else
#define EMU_FENCE() ((void)0)
#define EMU_ORDER_ATOMIC(address) ((void)0)
#endif

namespace emu {
template <class T>
using identity = typename std::common_type<T>::type;  // not deduced: atomicAdd(float*, 1) works

template <class T, class Update>
T read_modify_write(T* address, Update update) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "no atomic of this size");
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  Bits* bits = reinterpret_cast<Bits*>(address);
  EMU_ORDER_ATOMIC(address);
  Bits old_bits = __atomic_load_n(bits, __ATOMIC_RELAXED), new_bits;
  T old_value;
  do {
    __builtin_memcpy(&old_value, &old_bits, sizeof old_value);
    T new_value = update(old_value);
    __builtin_memcpy(&new_bits, &new_value, sizeof new_bits);
  } while (!__atomic_compare_exchange_n(bits, &old_bits, new_bits, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old_value;
}
}  // namespace emu

#define EMU_ATOMIC(name, expression)                                                                 \
  template <class T>                                                                                 \
  T name(T* address, emu::identity<T> v) {                                                           \
    return emu::read_modify_write(address, [v](T old) -> T { return static_cast<T>(expression); });  \
  }                                                                                                  \
  template <class T>                                                                                 \
  T name##_block(T* address, emu::identity<T> v) {                                                   \
    return name(address, v);                                                                         \
  }
EMU_ATOMIC(atomicAdd, old + v)
EMU_ATOMIC(atomicSub, old - v)
EMU_ATOMIC(atomicMax, old < v ? v : old)
EMU_ATOMIC(atomicMin, v < old ? v : old)
EMU_ATOMIC(atomicExch, ((void)old, v))
EMU_ATOMIC(atomicOr, old | v)
EMU_ATOMIC(atomicAnd, old & v)
EMU_ATOMIC(atomicXor, old ^ v)
EMU_ATOMIC(atomicInc, old >= v ? T(0) : old + 1)
EMU_ATOMIC(atomicDec, (old == 0 || old > v) ? v : old - 1)
template <class T>
T atomicCAS(T* address, emu::identity<T> compare, emu::identity<T> v) {
  return emu::read_modify_write(address, [=](T old) -> T { return old == compare ? v : old; });
}
inline void __threadfence() { EMU_FENCE(); }
inline void __threadfence_block() {}  // within a block, barriers order
inline void __threadfence_system() { EMU_FENCE(); }
inline void __nanosleep(unsigned) {}

#define EMU_LOAD(name)                                                                                 \
  template <class T>                                                                                   \
  T name(const T* address, EMU_FROM) {                                                                 \
    if (emu::is_shared(address)) emu_fail(EMU_CALLER, #name " reads shared memory: it is for global memory"); \
    return *address;                                                                                   \
  }
#define EMU_STORE(name)                                                                                \
  template <class T>                                                                                   \
  void name(T* address, emu::identity<T> value, EMU_FROM) {                                            \
    if (emu::is_shared(address)) emu_fail(EMU_CALLER, #name " writes shared memory: it is for global memory"); \
    *address = value;                                                                                  \
  }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
