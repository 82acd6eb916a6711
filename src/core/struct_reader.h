// Versioned structs: a caller's struct may be older (shorter) or newer (longer) than ours.
#ifndef NVTE_EP_CORE_STRUCT_READER_H_
#define NVTE_EP_CORE_STRUCT_READER_H_

#include <algorithm>
#include <cstring>

#include "core/status.h"

namespace nvte_ep {

// Copies what both sides know; the rest of *out is zero, which means default. A tail that we do not know must be zero: an
// option that is dropped in silence is worse than one refused.
template <typename T>
Status read_struct(const T* in, uint32_t v1_size, const char* name, T* out) {
  if (in == nullptr) return invalid_argument(name, ": expected a struct, got NULL");
  const uint32_t size = in->struct_size;
  if (size < v1_size) {
    return invalid_argument(name, ".struct_size: expected at least ", v1_size, ", got ", size,
                            " (set it with the INIT macro)");
  }
  if (size > sizeof(T)) {
    if (size > 65536) return invalid_argument(name, ".struct_size: expected at most 65536, got ", size);
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(in);
    if (std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char b) { return b != 0; })) {
      return unsupported(name, ": this library knows ", sizeof(T), " bytes of it, got ", size,
                         " with fields set beyond: the caller is newer than the library");
    }
  }
  *out = T{};
  std::memcpy(static_cast<void*>(out), in, std::min<size_t>(size, sizeof(T)));
  if (out->flags != 0) return unsupported(name, ".flags: expected 0, got ", out->flags);
  return Status();
}

// Checks an output struct before any work is done.
template <typename T>
Status check_out_struct(const T* out, uint32_t v1_size, const char* name) {
  T ignored;
  return read_struct(out, v1_size, name, &ignored);
}

// Writes what the caller has room for; struct_size stays the caller's.
template <typename T>
void write_struct(const T& value, T* out) {
  const uint32_t size = out->struct_size;
  std::memcpy(static_cast<void*>(out), &value, std::min<size_t>(size, sizeof(T)));
  out->struct_size = size;
}

template <typename Int>
Status check_reserved(Int value, const char* name) {
  return value == 0 ? Status() : unsupported(name, ": expected 0, got ", value);
}

inline Status check_enum(int32_t value, int32_t count, const char* name) {
  if (value >= 0 && value < count) return Status();
  return unsupported(name, ": expected a known value below ", count, ", got ", value);
}

inline Status check_bool(int32_t value, const char* name) { return check_enum(value, 2, name); }

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_STRUCT_READER_H_
