// Moving bytes: 16 at a time where the addresses allow it, smaller pieces where they do not, and
// asynchronously to shared memory.
#ifndef NVTE_EP_DEVICE_MEMORY_CUH_
#define NVTE_EP_DEVICE_MEMORY_CUH_

#include <cstdint>

namespace nvte_ep::device {

constexpr int kWarp = 32;

// Largest power of two, up to 16, that divides an address and the strides that are added to it.
template <typename... Strides>
inline int alignment_of(const void* base, Strides... strides) {
  const uint64_t bits = (reinterpret_cast<uint64_t>(base) | ... | static_cast<uint64_t>(strides)) | 16u;
  return static_cast<int>(bits & (~bits + 1));
}

// A pointer of which the compiler cannot see where it points: to global memory.
template <typename T>
__device__ __forceinline__ T* in_global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// bytes of 16 (0 to 16, a multiple of alignment or of 1 byte) between memory of which alignment is known; the
// rest is zero.
__device__ __forceinline__ uint4 load16(const void* from, int alignment, int bytes = 16) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (alignment >= 16 && bytes == 16) {
    v = *static_cast<const uint4*>(from);
  } else if (alignment >= 4 && bytes % 4 == 0) {
    const uint32_t* p = static_cast<const uint32_t*>(from);
    if (bytes > 0) v.x = p[0];
    if (bytes > 4) v.y = p[1];
    if (bytes > 8) v.z = p[2];
    if (bytes > 12) v.w = p[3];
  } else {
    const uint8_t* p = static_cast<const uint8_t*>(from);
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < bytes) word[i / 4] |= static_cast<uint32_t>(p[i]) << (8 * (i % 4));
    }
    v = make_uint4(word[0], word[1], word[2], word[3]);
  }
  return v;
}

__device__ __forceinline__ void store16(void* to, uint4 v, int alignment, int bytes = 16) {
  if (alignment >= 16 && bytes == 16) {
    *static_cast<uint4*>(to) = v;
  } else if (alignment >= 4 && bytes % 4 == 0) {
    uint32_t* p = static_cast<uint32_t*>(to);
    if (bytes > 0) p[0] = v.x;
    if (bytes > 4) p[1] = v.y;
    if (bytes > 8) p[2] = v.z;
    if (bytes > 12) p[3] = v.w;
  } else {
    uint8_t* p = static_cast<uint8_t*>(to);
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < bytes) p[i] = static_cast<uint8_t>(word[i / 4] >> (8 * (i % 4)));
    }
  }
}

// The first bytes of 16; the rest zero.
__device__ __forceinline__ uint4 first_bytes(uint4 v, int bytes) {
  const auto mask = [bytes](int first) -> uint32_t {
    const int n = bytes - first;
    return n <= 0 ? 0u : (n >= 4 ? 0xFFFFFFFFu : (1u << (8 * n)) - 1u);
  };
  return make_uint4(v.x & mask(0), v.y & mask(4), v.z & mask(8), v.w & mask(12));
}

__device__ __forceinline__ uint2 load8(const void* from, int alignment) {
  if (alignment >= 8) return *static_cast<const uint2*>(from);
  const uint4 v = load16(from, alignment, 8);
  return make_uint2(v.x, v.y);
}
__device__ __forceinline__ void store8(void* to, uint2 v, int alignment) {
  if (alignment >= 8) {
    *static_cast<uint2*>(to) = v;
  } else {
    store16(to, make_uint4(v.x, v.y, 0, 0), alignment, 8);
  }
}
__device__ __forceinline__ uint32_t load4(const void* from, int alignment) {
  return alignment >= 4 ? *static_cast<const uint32_t*>(from) : load16(from, 1, 4).x;
}
__device__ __forceinline__ uint32_t load2(const void* from, int alignment) {
  if (alignment >= 2) return *static_cast<const uint16_t*>(from);
  const uint8_t* p = static_cast<const uint8_t*>(from);
  return p[0] | static_cast<uint32_t>(p[1]) << 8;
}

// ---- asynchronous copies to shared memory: 16 bytes each, in groups that a thread waits for ----

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// By its address in shared memory: a pointer to it is made anew wherever it is used.
__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void copy_async16(uint32_t shared_to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_to), "l"(from) : "memory");
}
// Without a branch.
__device__ __forceinline__ void copy_async16_if(bool wanted, uint32_t shared_to, const void* from) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.b32 wanted, %2, 0;\n\t"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(shared_to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroupsLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

}  // namespace nvte_ep::device

#endif  // NVTE_EP_DEVICE_MEMORY_CUH_
