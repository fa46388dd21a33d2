// What NVRTC knows without an include, for g++: the GPU's half of the kernels compiles with it.
//
// Every access to memory is reported (-fsanitize=thread calls __tsan_*, which scheduler.cpp has),
// so that an address that no array has is an error. What lanes do together, and every atomic, is a
// call to scheduler.cpp. Only what the kernels use is here: another intrinsic does not compile.
#ifndef SIMT_SHIM_H_
#define SIMT_SHIM_H_

#include <math.h>
#include <stddef.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define __CUDACC__ 1
#define __device__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
// Always: where lanes meet is known by the address that a call returns to, which is in the kernel.
#define SIMT_INLINE static inline __attribute__((always_inline))

struct SimtIndex {
  unsigned int x, y, z;
};
// Of the lane that runs now.
extern "C" SimtIndex simt_thread, simt_block, simt_block_size, simt_grid_size;
#define threadIdx simt_thread
#define blockIdx simt_block
#define blockDim simt_block_size
#define gridDim simt_grid_size

typedef unsigned long long simt_u64;
typedef unsigned int simt_u32;

// What all lanes of a mask do in one call. `kind` and `detail` must be the same for all of them.
enum SimtKind { SIMT_BALLOT, SIMT_SHUFFLE, SIMT_SHUFFLE_XOR, SIMT_SYNC };
extern "C" simt_u64 simt_together(int kind, int detail, simt_u32 mask, simt_u64 value, int lane);

SIMT_INLINE simt_u32 __ballot_sync(simt_u32 mask, int vote) {
  return (simt_u32)simt_together(SIMT_BALLOT, 0, mask, vote != 0, 0);
}
SIMT_INLINE void __syncwarp(simt_u32 mask = ~0u) { simt_together(SIMT_SYNC, 0, mask, 0, 0); }
extern "C" void simt_sync_block();
SIMT_INLINE void __syncthreads() { simt_sync_block(); }
// compiler.py makes of a variable that is shared a reference to what the block has of it.
extern "C" void* simt_shared(simt_u32 number, size_t size);
template <class T>
SIMT_INLINE T simt_shuffled(int kind, simt_u32 mask, T value, int lane, int width) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
  simt_u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = simt_together(kind, width, mask, bits, lane);
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
SIMT_INLINE T __shfl_sync(simt_u32 mask, T value, int lane, int width = 32) {
  return simt_shuffled(SIMT_SHUFFLE, mask, value, lane, width);
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(simt_u32 mask, T value, int lanes, int width = 32) {
  return simt_shuffled(SIMT_SHUFFLE_XOR, mask, value, lanes, width);
}

// Atomics: one after another, and between two of them any other lane may run.
extern "C" simt_u64 simt_cas64(simt_u64* p, simt_u64 expected, simt_u64 desired);
extern "C" simt_u32 simt_cas32(simt_u32* p, simt_u32 expected, simt_u32 desired);
extern "C" simt_u64 simt_add64(simt_u64* p, simt_u64 v);
extern "C" simt_u32 simt_add32(simt_u32* p, simt_u32 v);
extern "C" int simt_min32(int* p, int v);
extern "C" int simt_max32(int* p, int v);
SIMT_INLINE simt_u64 atomicCAS(simt_u64* p, simt_u64 a, simt_u64 b) { return simt_cas64(p, a, b); }
SIMT_INLINE simt_u32 atomicCAS(simt_u32* p, simt_u32 a, simt_u32 b) { return simt_cas32(p, a, b); }
SIMT_INLINE int atomicCAS(int* p, int a, int b) {
  return (int)simt_cas32((simt_u32*)p, (simt_u32)a, (simt_u32)b);
}
SIMT_INLINE simt_u64 atomicAdd(simt_u64* p, simt_u64 v) { return simt_add64(p, v); }
SIMT_INLINE simt_u32 atomicAdd(simt_u32* p, simt_u32 v) { return simt_add32(p, v); }
SIMT_INLINE int atomicAdd(int* p, int v) { return (int)simt_add32((simt_u32*)p, (simt_u32)v); }
SIMT_INLINE int atomicMin(int* p, int v) { return simt_min32(p, v); }
SIMT_INLINE int atomicMax(int* p, int v) { return simt_max32(p, v); }

extern "C" void simt_fence();
SIMT_INLINE void __threadfence() { simt_fence(); }

// Inline PTX; compiler.py turns an asm statement into a call of the function of its instruction.
// What is read or written has an order as every atomic has.
extern "C" void simt_release(const void* p, size_t size);
extern "C" simt_u64 simt_acquire64(const simt_u64* p);
SIMT_INLINE void ptx_ld_acquire_gpu_s64(long long& value, const long long* p) {
  value = (long long)simt_acquire64((const simt_u64*)p);
}
SIMT_INLINE void ptx_st_release_gpu_s64(long long* p, long long value) {
  simt_release(p, 8);
  *p = value;
}
// A relaxed access is what a volatile one is here: fresh, and a point where other lanes may go on.
#define SIMT_RELAXED(name, T, Register)                                            \
  SIMT_INLINE void ptx_ld_relaxed_gpu_global_##name(Register& value, const T* p) { \
    value = *(const volatile T*)p;                                                 \
  }                                                                                \
  SIMT_INLINE void ptx_st_relaxed_gpu_global_##name(T* p, Register value) {        \
    *(volatile T*)p = (T)value;                                                    \
  }
SIMT_RELAXED(u64, simt_u64, simt_u64)
SIMT_RELAXED(u32, simt_u32, simt_u32)
SIMT_RELAXED(u8, unsigned char, unsigned short)
SIMT_INLINE void ptx_cvt_f32_f16(float& value, unsigned short bits) {
  _Float16 half;
  memcpy(&half, &bits, sizeof half);
  value = (float)half;
}
SIMT_INLINE void ptx_cvt_rn_f16_f32(unsigned short& bits, float value) {
  _Float16 half = (_Float16)value;
  memcpy(&bits, &half, sizeof half);
}

template <class To, class From>
SIMT_INLINE To simt_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
SIMT_INLINE simt_u32 __float_as_uint(float x) { return simt_bits<simt_u32>(x); }
SIMT_INLINE float __uint_as_float(simt_u32 x) { return simt_bits<float>(x); }
SIMT_INLINE long long __double_as_longlong(double x) { return simt_bits<long long>(x); }
SIMT_INLINE double __longlong_as_double(long long x) { return simt_bits<double>(x); }
SIMT_INLINE simt_u32 __umulhi(simt_u32 a, simt_u32 b) {
  return (simt_u32)(((simt_u64)a * b) >> 32);
}
SIMT_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SIMT_INLINE int __popc(simt_u32 x) { return __builtin_popcount(x); }

// How a launch calls a kernel for one lane: `cells` has the address of each argument.
template <class T>
struct SimtCode {
  static_assert(__is_class(T), "a parameter is a struct, a pointer, an i64 or an f32");
  static constexpr char value = 'S';
};
template <class T>
struct SimtCode<T*> {
  static constexpr char value = 'P';
};
template <>
struct SimtCode<long long> {
  static constexpr char value = '#';
};
template <>
struct SimtCode<float> {
  static constexpr char value = '.';
};
template <class T>
struct SimtCode<const T&> : SimtCode<T> {};
template <class... A>
static const char* simt_signature(void (*)(A...)) {
  static const char text[] = {SimtCode<A>::value..., 0};
  return text;
}
// Its own reads of the arguments are not the kernel's.
template <class... A, size_t... I>
SIMT_INLINE void simt_apply(void (*kernel)(A...), const simt_u64* cells,
                            std::index_sequence<I...>) {
  kernel(*(const std::remove_reference_t<A>*)cells[I]...);
}
template <class... A>
SIMT_INLINE void simt_apply(void (*kernel)(A...), const simt_u64* cells) {
  simt_apply(kernel, cells, std::index_sequence_for<A...>{});
}
#define SIMT_KERNEL(name)                                                                          \
  extern "C" __attribute__((no_sanitize("thread"))) void simt_call_##name(const simt_u64* cells) { \
    simt_apply(&name, cells);                                                                      \
  }                                                                                                \
  extern "C" const char* simt_signature_##name() { return simt_signature(&name); }

#endif  // SIMT_SHIM_H_
