// emu_undefined.cpp: what C++ leaves undefined ends the launch with a message, in every build without a sanitizer.
//
// Kernels are compiled with some checks of -fsanitize=undefined (emulate/_build.py lists them), which call the functions
// below with a description of the place and the types: the interface that g++ and clang++ share with libubsan, which is
// not needed here. Where a GPU defines the result, the message says so.
#include "emu_scheduler.h"

#if !defined(EMU_ASAN) && !defined(EMU_TSAN)

namespace {

struct Location {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;  // kind 0: integer, info: the binary logarithm of its bits, times two, plus one if it is signed
  char name[1];         // in quotes
};

struct Name {  // of a type, without quotes and words that say nothing
  char text[120];
  explicit Name(const Type& type) {
    const char* begin = type.name + (*type.name == '\'');
    for (const char* word : {"const ", "volatile ", "struct "})
      if (!strncmp(begin, word, strlen(word))) begin += strlen(word);
    snprintf(text, sizeof text, "%s", begin);
    if (char* end = strchr(text, '\'')) *end = 0;
  }
};

emu_where place(const Location& location) { return {location.file, int(location.line)}; }

bool is_signed(const Type& type) { return type.kind == 0 && (type.info & 1); }
unsigned bits_of(const Type& type) { return 1u << (type.info >> 1); }
long long value_of(const Type& type, uintptr_t raw) {
  unsigned unused = bits_of(type) < 64 ? 64 - bits_of(type) : 0;
  return is_signed(type) ? (long long)(raw << unused) >> unused : (long long)raw;
}

struct Mismatch {
  Location location;
  const Type* type;
  unsigned char log_alignment, kind;
};
void mismatch(const Mismatch* data, uintptr_t address) {
  unsigned alignment = 1u << data->log_alignment;
  Name name(*data->type);
  if (address < 65536)
    emu_fail(place(data->location), "accesses a null pointer to `%s`, %llu bytes behind it", name.text,
             (unsigned long long)address);
  emu_fail(place(data->location),
           "misaligned access: the address of this `%s` is %llu more than a multiple of %u bytes, which it must be",
           name.text, (unsigned long long)(address % alignment), alignment);
}

struct Shift {
  Location location;
  const Type *left, *right;
};
void shift(const Shift* data, uintptr_t, uintptr_t count) {
  emu_fail(place(data->location), "shift of a %u-bit value by %lld, expected 0 to %u", bits_of(*data->left),
           value_of(*data->right, count), bits_of(*data->left) - 1);
}

struct Division {
  Location location;
  const Type* type;
};
void division(const Division* data, uintptr_t, uintptr_t divisor) {
  if (value_of(*data->type, divisor) == 0) emu_fail(place(data->location), "integer division by zero");
  emu_fail(place(data->location), "integer division of the smallest `%s` by -1", Name(*data->type).text);
}

struct Cast {
  Location location;
  const Type *from, *to;
};
void cast(const Cast* data, uintptr_t raw) {
  double value = 0;
  if (data->from->info == 64) {
    memcpy(&value, &raw, sizeof value);
  } else {
    float narrow;
    memcpy(&narrow, &raw, sizeof narrow);
    value = narrow;
  }
  emu_fail(place(data->location),
           "%g does not fit `%s`: undefined in C++; a GPU gives the nearest number that does, 0 for NaN, as "
           "__float2int_rz and its relatives do",
           value, Name(*data->to).text);
}

struct Index {
  Location location;
  const Type *array, *index;
};
void bounds(const Index* data, uintptr_t index) {
  emu_fail(place(data->location), "index %lld is outside of `%s`", value_of(*data->index, index),
           Name(*data->array).text);
}

}  // namespace

// Compilers call the second form where they take the report for the end, the first elsewhere.
#define EMU_HANDLER(name, Data, call)                                                                      \
  EMU_API void __ubsan_handle_##name(const Data* data, uintptr_t a, uintptr_t b) { (void)a, (void)b, call; } \
  EMU_API void __ubsan_handle_##name##_abort(const Data* data, uintptr_t a, uintptr_t b) { (void)a, (void)b, call; }
EMU_HANDLER(type_mismatch_v1, Mismatch, mismatch(data, a))
EMU_HANDLER(shift_out_of_bounds, Shift, shift(data, a, b))
EMU_HANDLER(divrem_overflow, Division, division(data, a, b))
EMU_HANDLER(float_cast_overflow, Cast, cast(data, a))
EMU_HANDLER(out_of_bounds, Index, bounds(data, a))

#endif
