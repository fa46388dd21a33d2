// Where the GPU and the CPU differ: platform_gpu.cuh and platform_cpu.cuh are the two halves. Every
// kernel is written once on top of this file.
//
// On the GPU (NVRTC, no include path) a kernel is a __global__ function and a loop over items is a
// grid-stride loop. On the CPU (g++) a kernel is a plain function that every worker thread of
// cpu_runtime.cpp calls; the same loop then walks the worker's own contiguous slice of the items.
#ifndef SOK_PLATFORM_CUH_
#define SOK_PLATFORM_CUH_

typedef long long i64;
typedef unsigned long long u64;
typedef int i32;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef float f32;
typedef double f64;

// 16-bit row formats, kept as their bits: arithmetic is always done in f32.
struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

// Neighbouring columns of a row; four of f32 are what a lane of a GPU moves with one request, and
// of four f64 it takes two.
template <class T, int kWidth>
struct alignas(kWidth * sizeof(T) < 16 ? kWidth * sizeof(T) : 16) SokColumns {
  T column[kWidth];
};

// Kernels: one thread an item, a row for several lanes, a key for a tile of lanes, an item for a
// whole block of threads of a GPU. parts.cuh makes of them what Python calls.
#define SOK_KERNEL(name) SOK_DEVICE void name##_of_part
#define SOK_ROW_KERNEL(name) SOK_KERNEL(name)
#define SOK_TILE_KERNEL(name) SOK_KERNEL(name)
#define SOK_TEAM_KERNEL(name) SOK_KERNEL(name)

// The row number of a key that has no row.
#define SOK_NO_ROW 0xFFFFFFFFu

// Slots of an index in one cache line of 64 bytes, the piece that a search reads at a time.
#ifndef SOK_LINE
#define SOK_LINE 4
#endif

#ifdef __CUDACC__
#include "platform_gpu.cuh"
#else
#include "platform_cpu.cuh"
#endif

// ------------------------------------------------------------------------------------------ both
SOK_DEVICE f32 to_f32(f32 x) { return x; }
SOK_DEVICE f32 to_f32(f64 x) { return (f32)x; }
SOK_DEVICE f32 to_f32(bf16 x) { return sok_bits_f32((u32)x.bits << 16); }
// Rounds to nearest even; a NaN stays a NaN.
SOK_DEVICE bf16 to_bf16(f32 x) {
  u32 bits = sok_f32_bits(x);
  bf16 y;
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    y.bits = (u16)((bits >> 16) | 0x40u);
  else
    y.bits = (u16)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  return y;
}
// Columns of a row as a vector, or as one f32.
#ifdef __CUDACC__
template <class T>
SOK_DEVICE void sok_load_columns(const T* from, SokVector* to) {
  const SokColumns<T, 4> four = *(const SokColumns<T, 4>*)from;
  for (int k = 0; k < 4; ++k) to->column[k] = to_f32(four.column[k]);
}
template <class T>
SOK_DEVICE void sok_load_columns(const T* from, f32* to) {
  *to = to_f32(*from);
}
template <class Vector>
SOK_DEVICE void sok_store_columns(const Vector& from, f32* to) {
  const Vector whole = from;  // a copy by reference is one store for each column
  *(Vector*)to = whole;
}
#else
template <class Vector>
SOK_DEVICE void sok_load_columns(const f32* from, Vector* to) {
  memcpy(to, from, sizeof *to);
}
template <class T, class Vector>
SOK_DEVICE void sok_load_columns(const T* from, Vector* to) {
  f32 columns[sizeof *to / sizeof(f32)];
  for (i64 c = 0; c < (i64)(sizeof *to / sizeof(f32)); ++c) columns[c] = to_f32(from[c]);
  memcpy(to, columns, sizeof *to);
}
template <class Vector>
SOK_DEVICE void sok_store_columns(const Vector& from, f32* to) {
  memcpy(to, &from, sizeof from);
}
#endif
SOK_DEVICE void from_f32(f32 x, f32* out) { *out = x; }
SOK_DEVICE void from_f32(f32 x, f64* out) { *out = x; }
SOK_DEVICE void from_f32(f32 x, f16* out) { *out = to_f16(x); }
SOK_DEVICE void from_f32(f32 x, bf16* out) { *out = to_bf16(x); }

#include "parts.cuh"

#endif  // SOK_PLATFORM_CUH_
