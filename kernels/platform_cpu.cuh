// The half of platform.cuh for CPUs, by g++: a thread has a share of the items, a tile is a thread.

#ifndef SOK_PLATFORM_CPU_CUH_
#define SOK_PLATFORM_CPU_CUH_

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error g++ 12 or newer is needed, for its _Float16. Set CXX to the name of one, such as g++-12
#endif

#include <math.h>
#include <string.h>

// Always: g++ drops calls of a function that does nothing but prefetch.
#define SOK_DEVICE static inline __attribute__((always_inline))
#define SOK_LONG_DEVICE SOK_DEVICE
#define SOK_DEVICE_MEMBER inline __attribute__((always_inline))
#define SOK_ONE_BY_ONE
#define SOK_AT_A_TIME(count)

// One thread searches by itself. A larger tile walks through its lanes in turn, which tests the
// arithmetic of tiles without a GPU.
#ifndef SOK_TILE
#define SOK_TILE 1
#endif

// Items whose memory is asked for before the first of them is worked on, and how many rows ahead a
// row kernel asks for. A miss to memory takes about 100 ns, a row's work 5 to 20; on a 2-core
// EPYC 64 and 16 were 15 % and 30 % faster than 32 and 8.
#ifndef SOK_BLOCK
#define SOK_BLOCK 64
#endif
#ifndef SOK_AHEAD
#define SOK_AHEAD 16
#endif

// Neighbouring columns of a row with which a worker computes at a time, and how many of these. They
// are in vector registers; g++ 12 keeps some arrays of f32 in memory, which takes twice as long.
#ifdef __AVX__
typedef f32 SokVector __attribute__((vector_size(32)));
#else
typedef f32 SokVector __attribute__((vector_size(16)));
#endif
typedef f32 SokSmallVector __attribute__((vector_size(16)));
#define SOK_VECTORS ((i64)(64 / sizeof(SokVector)))
#define SOK_SUMS 8
#define SOK_BATCH 1  // what a processor does by itself
#define SOK_VECTORS_LIE_ANYWHERE true

// Which items of a part are this call's: those from `from` to `to`, where there are `of`.
struct SokShare {
  i64 from, to, of;
};
// A loop over another number of things has the same part of them.
SOK_DEVICE i64 sok_part_of(i64 n, i64 items, i64 of) {
  return n == of ? items : (i64)((__int128)n * items / of);
}
SOK_DEVICE i64 sok_slice_begin(const SokShare& share, i64 n) {
  return sok_part_of(n, share.from, share.of);
}
SOK_DEVICE i64 sok_slice_end(const SokShare& share, i64 n) {
  return sok_part_of(n, share.to, share.of);
}

#define SOK_FOR_EACH(i, n) \
  for (i64 i = sok_slice_begin(share, n), i##_end = sok_slice_end(share, n); i < i##_end; ++i)
#define SOK_FOR_EACH_BLOCK(first, count, n)                                                  \
  for (i64 first = sok_slice_begin(share, n), first##_end = sok_slice_end(share, n), count;  \
       count = first##_end - first < SOK_BLOCK ? first##_end - first : SOK_BLOCK, count > 0; \
       first += count)
#define SOK_FOR_EACH_ROW(r, n) SOK_FOR_EACH_ROW_OF_WORDS(r, n, )
#define SOK_FOR_EACH_COLUMN(c, dim) for (i64 c = 0; c < (dim); ++c)
#define SOK_FOR_EACH_TILE(i, n) SOK_FOR_EACH(i, n)
typedef u32 SokWord;  // the compiler makes vectors of whatever is copied
template <class T>
SOK_DEVICE bool sok_moves_words(i64, const T*) {
  return false;
}
template <class T>
SOK_DEVICE bool sok_moves_quads(i64, const T*) {
  return false;
}
template <class T>
SOK_DEVICE T sok_unless_nan(const T& x) {
  return x == x ? x : T{};
}
struct SokLanes {};
SOK_DEVICE bool sok_is_of_row(const SokLanes&, bool is) { return is; }
SOK_DEVICE f64 sok_sum_of_row(const SokLanes&, f64 x) { return x; }
#define SOK_FOR_EACH_ROW_OF_WORDS(r, n, words) \
  const SokLanes r##_lanes{};                  \
  (void)r##_lanes;                             \
  SOK_FOR_EACH(r, n)
#define SOK_FOR_EACH_WORD(w, lanes, words) for (i64 w = 0; w < (words); ++w)
#define SOK_FOR_EACH_WORD_OF_ROW(w, r, words) SOK_FOR_EACH_WORD(w, , words)
#define SOK_IS_FIRST_WORD(r) true
#define SOK_FOR_EACH_TILE_BLOCK(first, count, n) SOK_FOR_EACH_BLOCK(first, count, n)

SOK_DEVICE bool sok_is_leader() { return true; }
template <class T>
static inline T sok_from_leader(T x) {
  return x;
}
static inline u64 sok_tile_min(u64 x) { return x; }
template <class W>
SOK_DEVICE void sok_copy_words(const W* from, W* to, i64 count) {
  for (i64 w = 0; w < count; ++w) to[w] = from[w];
}
#define SOK_FOR_EACH_OF_TILE(w, count) for (i64 w = 0; w < (count); ++w)
template <int kCount, class Is>
static inline u32 sok_vote(Is is) {
  u32 bits = 0;
  for (int first = 0; first < kCount; first += SOK_TILE)
    for (int lane = 0; lane < SOK_TILE; ++lane) {
      int w = first + lane;
      bits |= (u32)(w < kCount && is(w)) << w;
    }
  return bits;
}
SOK_DEVICE int sok_lowest_bit(u32 bits) { return __builtin_ctz(bits); }

// Words are left where they are: 16 bytes each, of whose upper half others may write a part.
typedef u64 __attribute__((may_alias)) SokHalf;
template <int kCount>
struct SokWords {
  const SokHalf* from;
};
template <int kCount>
SOK_DEVICE SokWords<kCount> sok_read_words(const void* from) {
  return {(const SokHalf*)from};
}
template <int kCount>
SOK_DEVICE u64 sok_low(const SokWords<kCount>& words, int w) {
  return words.from[2 * w];
}
template <int kCount>
SOK_DEVICE u64 sok_high(const SokWords<kCount>& words, int w) {
  return __atomic_load_n(words.from + 2 * w + 1, __ATOMIC_RELAXED);
}

SOK_DEVICE void sok_prefetch(const void* p) { __builtin_prefetch(p); }

SOK_DEVICE i64 sok_load(const i64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
SOK_DEVICE i32 sok_load(const i32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
SOK_DEVICE void sok_store(i32* p, i32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
SOK_DEVICE u8 sok_load(const u8* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
SOK_DEVICE void sok_store(u8* p, u8 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
SOK_DEVICE u32 sok_load(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
SOK_DEVICE u64 sok_load(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
SOK_DEVICE void sok_store(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
SOK_DEVICE void sok_store(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
SOK_DEVICE void sok_store(i64* p, i64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
SOK_DEVICE i64 sok_load_acquire(const i64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
SOK_DEVICE void sok_store_release(i64* p, i64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
// Returns what was there: equal to `expected` where the exchange happened.
template <class T>
static inline T sok_cas(T* p, T expected, T desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
SOK_DEVICE void sok_min(i32* p, i32 v) {
  i32 seen = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (v < seen &&
         !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
SOK_DEVICE void sok_max(i32* p, i32 v) {
  i32 seen = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (v > seen &&
         !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

SOK_DEVICE void sok_count(i64* counter, i64 count) {
  if (count) __atomic_fetch_add(counter, count, __ATOMIC_RELAXED);
}
SOK_DEVICE i64 sok_take_number(i64* counter, bool wants) {
  return wants ? __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED) : 0;
}
#define SOK_FOR_EACH_OF_WARP(i, n) SOK_FOR_EACH(i, n)
#define SOK_FOR_EACH_TILE_OF_WARP(i, n) SOK_FOR_EACH_TILE(i, n)

SOK_DEVICE u32 sok_f32_bits(f32 x) {
  u32 y;
  memcpy(&y, &x, sizeof y);
  return y;
}
SOK_DEVICE f32 sok_bits_f32(u32 x) {
  f32 y;
  memcpy(&y, &x, sizeof y);
  return y;
}
SOK_DEVICE u64 sok_f64_bits(f64 x) {
  u64 y;
  memcpy(&y, &x, sizeof y);
  return y;
}
SOK_DEVICE f64 sok_bits_f64(u64 x) {
  f64 y;
  memcpy(&y, &x, sizeof y);
  return y;
}
SOK_DEVICE u32 sok_high_u32(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }

SOK_DEVICE f32 sok_sqrt(f32 x) { return __builtin_sqrtf(x); }
SOK_DEVICE f64 sok_sqrt(f64 x) { return __builtin_sqrt(x); }
SOK_DEVICE f32 sok_pow(f32 x, f32 y) { return powf(x, y); }

SOK_DEVICE f32 to_f32(f16 x) {
  _Float16 h;
  memcpy(&h, &x.bits, sizeof h);
  return (f32)h;
}
SOK_DEVICE f16 to_f16(f32 x) {
  _Float16 h = (_Float16)x;
  f16 y;
  memcpy(&y.bits, &h, sizeof h);
  return y;
}

#endif  // SOK_PLATFORM_CPU_CUH_
