// The half of platform.cuh for GPUs, by NVRTC and nvcc: threads, tiles, atomics, 16-bit floats.

#ifndef SOK_PLATFORM_GPU_CUH_
#define SOK_PLATFORM_GPU_CUH_

#define SOK_DEVICE __device__ __forceinline__
// A function that is long and in many places: its code is there once in a kernel.
#define SOK_LONG_DEVICE static __device__ __noinline__
#define SOK_DEVICE_MEMBER __device__ __forceinline__

// Lanes that search for one key together: a power of two up to 32. One lane per slot of a line
// reads the line with a single request.
#ifndef SOK_TILE
#define SOK_TILE SOK_LINE
#endif

// Lanes that share one row in a row kernel. A warp per row reads 128 bytes of f32 at a time.
#ifndef SOK_ROW_LANES
#define SOK_ROW_LANES 32
#endif
// In front of a loop that takes too many registers where it is unrolled.
#define SOK_ONE_BY_ONE _Pragma("unroll 1")
// In front of a loop over items: how many are loaded before the first is used.
#define SOK_AT_A_TIME(count) SOK_PRAGMA(unroll count)
#define SOK_PRAGMA(text) _Pragma(#text)
// Items that a thread handles together, and how many rows ahead it asks for: hiding the latency of
// memory is the hardware's work here.
#define SOK_BLOCK 1
#define SOK_AHEAD 0

// Neighbouring columns of a row with which a lane computes at a time, and how many of these.
typedef SokColumns<f32, 4> SokVector;
typedef SokVector SokSmallVector;
#define SOK_VECTORS 1
// Sums that are kept side by side, where one alone would wait for each addition.
#define SOK_SUMS 1
// Items of a long sum that are loaded before the first is added.
#define SOK_BATCH 4
#define SOK_VECTORS_LIE_ANYWHERE false

// Which items of a part are this thread's: its number among the threads of the part.
struct SokShare {
  i64 thread, num_threads;
};

#define SOK_FOR_EACH(i, n) \
  SOK_ONE_BY_ONE           \
  for (i64 i = share.thread; i < (n); i += share.num_threads)
#define SOK_FOR_EACH_BLOCK(first, count, n) \
  SOK_ONE_BY_ONE                            \
  for (i64 first = share.thread, count = 1; first < (n); first += share.num_threads)
#define SOK_FOR_EACH_ROW(r, n)                         \
  const SokLanes r##_lanes = sok_lanes(SOK_ROW_LANES); \
  (void)r##_lanes;                                     \
  SOK_ONE_BY_ONE                                       \
  for (i64 r = share.thread / SOK_ROW_LANES; r < (n); r += share.num_threads / SOK_ROW_LANES)
#define SOK_FOR_EACH_COLUMN(c, dim) \
  for (i64 c = threadIdx.x % SOK_ROW_LANES; c < (dim); c += SOK_ROW_LANES)
#define SOK_FOR_EACH_TILE(i, n) \
  SOK_ONE_BY_ONE                \
  for (i64 i = share.thread / SOK_TILE; i < (n); i += share.num_threads / SOK_TILE)
#define SOK_FOR_EACH_TILE_BLOCK(first, count, n)                    \
  SOK_ONE_BY_ONE                                                    \
  for (i64 first = share.thread / SOK_TILE, count = 1; first < (n); \
       first += share.num_threads / SOK_TILE)

// What a lane moves with one request.
struct alignas(16) SokWord {
  u64 low, high;
};

// Whether rows of `dim` elements can be moved in words of 16 bytes. Chunks lie on 16 bytes.
//
// dense  the dense array beside the chunks; null: there is none
template <class T>
SOK_DEVICE bool sok_moves_words(i64 dim, const T* dense) {
  return dim * (i64)sizeof(T) % (i64)sizeof(SokWord) == 0 && (u64)dense % sizeof(SokWord) == 0;
}
SOK_DEVICE SokVector operator+(const SokVector& a, const SokVector& b) {
  SokVector sum;
  for (int k = 0; k < 4; ++k) sum.column[k] = a.column[k] + b.column[k];
  return sum;
}
SOK_DEVICE SokVector operator-(const SokVector& a, const SokVector& b) {
  SokVector difference;
  for (int k = 0; k < 4; ++k) difference.column[k] = a.column[k] - b.column[k];
  return difference;
}
SOK_DEVICE SokVector operator*(f32 a, const SokVector& b) {
  SokVector product;
  for (int k = 0; k < 4; ++k) product.column[k] = a * b.column[k];
  return product;
}
SOK_DEVICE SokVector operator/(const SokVector& a, f32 b) {
  SokVector quotient;
  for (int k = 0; k < 4; ++k) quotient.column[k] = a.column[k] / b;
  return quotient;
}
SOK_DEVICE f32 sok_unless_nan(f32 x) { return x == x ? x : 0.0f; }
SOK_DEVICE SokVector sok_unless_nan(const SokVector& x) {
  SokVector kept;
  for (int k = 0; k < 4; ++k) kept.column[k] = sok_unless_nan(x.column[k]);
  return kept;
}
// Whether a lane can take four columns of such rows at a time: of f32, with one request.
template <class T>
SOK_DEVICE bool sok_moves_quads(i64 dim, const T* dense) {
  return dim % 4 == 0 && (u64)dense % sizeof(SokColumns<T, 4>) == 0;
}
// Lanes that work on a row together: neighbours, 2^shift of them.
struct SokLanes {
  u32 lane, shift;  // this one's number
};
SOK_DEVICE SokLanes sok_lanes(i64 wanted) {
  u32 shift = 0;
  while (shift < 5 && (1 << shift) < wanted) ++shift;
  return SokLanes{threadIdx.x & ((1u << shift) - 1u), shift};
}
SOK_DEVICE u32 sok_mask(const SokLanes& lanes) {
  const u32 count = 1u << lanes.shift, first = threadIdx.x & 31u & ~(count - 1u);
  return (lanes.shift == 5 ? ~0u : (1u << count) - 1u) << first;
}
// Whether it is so for one of the lanes, told to the first of them.
SOK_DEVICE bool sok_is_of_row(const SokLanes& lanes, bool is) {
  const bool is_so = __ballot_sync(sok_mask(lanes), is) != 0;
  return is_so && lanes.lane == 0;
}
// What the lanes of a row have together, for all of them: in an order that their number decides.
SOK_DEVICE f64 sok_sum_of_row(const SokLanes& lanes, f64 x) {
  for (u32 distance = (1u << lanes.shift) / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(sok_mask(lanes), x, (int)distance);
  return x;
}
// A row has as many lanes as words, up to a warp, rounded up to a power of two.
#define SOK_FOR_EACH_ROW_OF_WORDS(r, n, words) \
  const SokLanes r##_lanes = sok_lanes(words); \
  SOK_ONE_BY_ONE                               \
  for (i64 r = share.thread >> r##_lanes.shift; r < (n); r += share.num_threads >> r##_lanes.shift)
#define SOK_FOR_EACH_WORD(w, lanes, words) \
  SOK_ONE_BY_ONE                           \
  for (u32 w = (lanes).lane; w < (u32)(words); w += 1u << (lanes).shift)
#define SOK_FOR_EACH_WORD_OF_ROW(w, r, words) SOK_FOR_EACH_WORD(w, r##_lanes, words)
#define SOK_IS_FIRST_WORD(r) (r##_lanes.lane == 0)
// A tile is SOK_TILE neighbouring lanes of a warp. All of them walk through a kernel on one path,
// since what they decide by is voted; one of them, the leader, writes.
SOK_DEVICE u32 sok_tile_first_lane() { return threadIdx.x & 31u & ~(SOK_TILE - 1u); }
SOK_DEVICE u32 sok_tile_threads() {
  return (SOK_TILE == 32 ? ~0u : (1u << (SOK_TILE & 31)) - 1u) << sok_tile_first_lane();
}
SOK_DEVICE bool sok_is_leader() { return (threadIdx.x & (SOK_TILE - 1u)) == 0; }
// What the leader has, for all lanes.
template <class T>
SOK_DEVICE T sok_from_leader(T x) {
  return __shfl_sync(sok_tile_threads(), x, 0, SOK_TILE);
}
// The smallest number that a lane of the tile has, for all lanes.
SOK_DEVICE u64 sok_tile_min(u64 x) {
  for (int distance = SOK_TILE / 2; distance > 0; distance /= 2) {
    u64 other = __shfl_xor_sync(sok_tile_threads(), x, distance, SOK_TILE);
    x = other < x ? other : x;
  }
  return x;
}
// The lanes of a tile share the items of a loop.
#define SOK_FOR_EACH_OF_TILE(w, count) \
  for (i64 w = threadIdx.x & (SOK_TILE - 1u); w < (count); w += SOK_TILE)
// The lanes of a tile copy `count` words, fewer than 2^31. Each has read four before it writes the
// first: a compiler cannot do that by itself, as the two places could overlap.
template <class W>
SOK_DEVICE void sok_copy_words(const W* from, W* to, i64 count) {
  const u32 end = (u32)count;
  u32 w = threadIdx.x & (SOK_TILE - 1u);
  SOK_ONE_BY_ONE
  for (; w + 3 * SOK_TILE < end; w += 4 * SOK_TILE) {
    const W* source = from + w;
    W* target = to + w;
    W words[4];
    for (int k = 0; k < 4; ++k) words[k] = source[k * SOK_TILE];
    for (int k = 0; k < 4; ++k) target[k * SOK_TILE] = words[k];
  }
  SOK_ONE_BY_ONE
  for (; w < end; w += SOK_TILE) to[w] = from[w];
}
// Bit w of the result says whether is(w), for w < kCount <= 32.
template <int kCount, class Is>
SOK_DEVICE u32 sok_vote(Is is) {
  u32 bits = 0;
  for (int first = 0; first < kCount; first += SOK_TILE) {
    int w = first + (int)(threadIdx.x & (SOK_TILE - 1u));
    u32 votes = __ballot_sync(sok_tile_threads(), w < kCount && is(w)) >> sok_tile_first_lane();
    bits |= (SOK_TILE == 32 ? votes : votes & ((1u << (SOK_TILE & 31)) - 1u)) << first;
  }
  return bits;
}
// The number of the lowest bit that is set.
SOK_DEVICE int sok_lowest_bit(u32 bits) { return __ffs((int)bits) - 1; }

// What the lanes of a tile read of kCount words that lie one behind another, each with one request.
template <int kCount>
struct SokWords {
  SokWord mine[(kCount + SOK_TILE - 1) / SOK_TILE];
};
template <int kCount>
SOK_DEVICE SokWords<kCount> sok_read_words(const void* from) {
  SokWords<kCount> words;
  for (int i = 0, w = (int)(threadIdx.x & (SOK_TILE - 1u)); w < kCount; ++i, w += SOK_TILE)
    words.mine[i] = ((const SokWord*)from)[w];
  return words;
}
// The lower half of word w, which sok_vote asks this lane for.
template <int kCount>
SOK_DEVICE u64 sok_low(const SokWords<kCount>& words, int w) {
  return words.mine[w / SOK_TILE].low;
}
// The upper half of word w, for all lanes.
template <int kCount>
SOK_DEVICE u64 sok_high(const SokWords<kCount>& words, int w) {
  u64 high = 0;
  for (int i = 0; i < (kCount + SOK_TILE - 1) / SOK_TILE; ++i)  // no index that is unknown
    if (i == w / SOK_TILE) high = words.mine[i].high;
  return __shfl_sync(sok_tile_threads(), high, w & (SOK_TILE - 1), SOK_TILE);
}

SOK_DEVICE void sok_prefetch(const void*) {}

// Accesses of what other threads use during this launch: each is made where it stands, and counts
// for the whole GPU. One of a volatile variable counts for the host and for other GPUs too.
SOK_DEVICE u64 sok_load(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
SOK_DEVICE u32 sok_load(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
SOK_DEVICE u8 sok_load(const u8* p) {
  u16 v;  // PTX has no smaller register
  asm volatile("ld.relaxed.gpu.global.u8 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return (u8)v;
}
SOK_DEVICE i64 sok_load(const i64* p) { return (i64)sok_load((const u64*)p); }
SOK_DEVICE i32 sok_load(const i32* p) { return (i32)sok_load((const u32*)p); }
SOK_DEVICE void sok_store(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
SOK_DEVICE void sok_store(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
SOK_DEVICE void sok_store(u8* p, u8 v) {
  const u16 wide = v;
  asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" ::"l"(p), "h"(wide) : "memory");
}
SOK_DEVICE void sok_store(i64* p, i64 v) { sok_store((u64*)p, (u64)v); }
SOK_DEVICE void sok_store(i32* p, i32 v) { sok_store((u32*)p, (u32)v); }
// What was written before a released value is there for whoever acquires that value.
SOK_DEVICE i64 sok_load_acquire(const i64* p) {
  i64 v;
  asm volatile("ld.acquire.gpu.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
SOK_DEVICE void sok_store_release(i64* p, i64 v) {
  asm volatile("st.release.gpu.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
SOK_DEVICE i64 sok_cas(i64* p, i64 expected, i64 desired) {
  return (i64)atomicCAS((u64*)p, (u64)expected, (u64)desired);
}
SOK_DEVICE u32 sok_cas(u32* p, u32 expected, u32 desired) {
  return atomicCAS(p, expected, desired);
}
SOK_DEVICE i32 sok_cas(i32* p, i32 expected, i32 desired) {
  return atomicCAS(p, expected, desired);
}
SOK_DEVICE void sok_min(i32* p, i32 v) { atomicMin(p, v); }
SOK_DEVICE void sok_max(i32* p, i32 v) { atomicMax(p, v); }

// What the threads of a warp have together, for all of them.
SOK_DEVICE i64 sok_sum_of_warp(i64 x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// A warp adds to a counter at once: thousands of warps that count each lane by itself would wait
// for each other. All threads of a kernel come to both of these, at the same time in its warp.
//
// Adds what each thread has counted.
SOK_DEVICE void sok_count(i64* counter, i64 count) {
  count = sok_sum_of_warp(count);
  if (count && (threadIdx.x & 31u) == 0) atomicAdd((u64*)counter, (u64)count);
}
// A number for each thread that wants one, from the counter on.
SOK_DEVICE i64 sok_take_number(i64* counter, bool wants) {
  const u32 lane = threadIdx.x & 31u, all = __ballot_sync(~0u, wants);
  u64 first = 0;
  if (lane == 0 && all) first = atomicAdd((u64*)counter, (u64)__popc(all));
  first = __shfl_sync(~0u, first, 0);
  return (i64)(first + (u64)__popc(all & ((1u << lane) - 1u)));
}
// All threads of a warp walk together: i can be n or more.
#define SOK_FOR_EACH_OF_WARP(i, n) \
  SOK_ONE_BY_ONE                   \
  for (i64 i = share.thread; i - (i64)(threadIdx.x & 31u) < (n); i += share.num_threads)

// The same with a key for each tile of a warp.
#define SOK_FOR_EACH_TILE_OF_WARP(i, n)                                                  \
  SOK_ONE_BY_ONE                                                                         \
  for (i64 i = share.thread / SOK_TILE; i - (i64)((threadIdx.x & 31u) / SOK_TILE) < (n); \
       i += share.num_threads / SOK_TILE)

SOK_DEVICE u32 sok_f32_bits(f32 x) { return __float_as_uint(x); }
SOK_DEVICE f32 sok_bits_f32(u32 x) { return __uint_as_float(x); }
SOK_DEVICE u64 sok_f64_bits(f64 x) { return (u64)__double_as_longlong(x); }
SOK_DEVICE f64 sok_bits_f64(u64 x) { return __longlong_as_double((i64)x); }
SOK_DEVICE u32 sok_high_u32(u32 a, u32 b) { return __umulhi(a, b); }

SOK_DEVICE f32 sok_sqrt(f32 x) { return sqrtf(x); }
SOK_DEVICE f64 sok_sqrt(f64 x) { return sqrt(x); }
// Apart: it is long, and seldom what a rule needs.
SOK_LONG_DEVICE f32 sok_pow(f32 x, f32 y) { return powf(x, y); }

SOK_DEVICE f32 to_f32(f16 x) {
  f32 y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
SOK_DEVICE f16 to_f16(f32 x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

#endif  // SOK_PLATFORM_GPU_CUH_
