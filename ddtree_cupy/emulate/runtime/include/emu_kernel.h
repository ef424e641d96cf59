// emu_kernel.h: the kernel's own C++ type tells how to unpack its arguments and what Python must pass.
#pragma once
#include "emu_half.h"

// ctypes twin: emulate/_native.py
struct emu_parameter {
  unsigned char is_pointer, is_const;
  unsigned char kind;  // 0 other, 1 signed, 2 unsigned, 3 float, 4 bool, 5 half, 6 bfloat16
  unsigned bytes;      // of the scalar or of the pointed-at element (0: void)
};
struct emu_kernel {
  const char* name;
  emu_thunk thunk;
  unsigned num_parameters;
  const emu_parameter* parameters;
  unsigned cluster;  // blocks of a cluster
};

namespace emu {

template <class T>
constexpr emu_parameter describe() {
  using U = std::remove_cv_t<std::remove_reference_t<T>>;
  if constexpr (std::is_pointer_v<U>) {
    using Element = std::remove_pointer_t<U>;
    if constexpr (std::is_void_v<Element>) {
      return {1, std::is_const_v<Element>, 0, 0};
    } else {
      emu_parameter element = describe<Element>();
      return {1, std::is_const_v<Element>, element.kind, element.bytes};
    }
  } else {
    unsigned char kind = std::is_same_v<U, bool>            ? 4
                         : std::is_floating_point_v<U>      ? 3
                         : std::is_same_v<U, __half>        ? 5
                         : std::is_same_v<U, __nv_bfloat16> ? 6
                         : !std::is_integral_v<U>           ? 0
                         : std::is_signed_v<U>              ? 1
                                                            : 2;
    return {0, 0, kind, sizeof(U)};
  }
}

template <class T>
struct Argument {  // a copy, as Python aligns structs less than C++ may ask for
  alignas(T) unsigned char bytes[sizeof(T)];
  explicit Argument(const void* from) { __builtin_memcpy(bytes, from, sizeof bytes); }
  T& get() { return *reinterpret_cast<T*>(bytes); }
};

template <class Function>
struct Signature;
template <class... A>
struct Signature<void (*)(A...)> {
  static constexpr emu_parameter kParameters[] = {describe<A>()..., emu_parameter{}};
  static constexpr unsigned kCount = sizeof...(A);
  template <size_t... I>
  static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(Argument<std::remove_cv_t<std::remove_reference_t<A>>>(args[I]).get()...);
  }
};

}  // namespace emu

// One row of the module's table; the expression may hold commas ("kernel<float, 64>").
#define EMU_KERNEL(name, cluster, ...)                                                                   \
  emu_kernel {                                                                                           \
    name,                                                                                                \
        [](void** args) {                                                                                \
          using S = emu::Signature<decltype(&__VA_ARGS__)>;                                              \
          S::call(&__VA_ARGS__, args, std::make_index_sequence<S::kCount>());                            \
        },                                                                                               \
        emu::Signature<decltype(&__VA_ARGS__)>::kCount, emu::Signature<decltype(&__VA_ARGS__)>::kParameters, \
        cluster                                                                                          \
  }
