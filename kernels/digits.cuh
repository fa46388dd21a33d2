// The digits of labels, by which items are sorted (sort.cu), on a GPU.
#ifndef SOK_DIGITS_CUH_
#define SOK_DIGITS_CUH_

#include "tiles.cuh"

#ifdef __CUDACC__
constexpr u32 kMostDigits = 512, kMostPasses = 4;

struct DigitCounts {
  u32 count[kMostPasses * kMostDigits];
};

// Counts the digits of labels for all passes of a sort: each digit has `bits` bits.
//
// label_of  item -> its label
// note      item, its label: told when several were asked for
// counts    (passes, 2^bits)  grow
template <class LabelOf, class Note>
SOK_DEVICE void count_digits(const SokShare share, i64 n, i64 passes, i64 bits, u32* counts,
                             LabelOf label_of, Note note) {
  __shared__ DigitCounts own;
  const u32 all = (u32)passes << bits, mask = (1u << bits) - 1;
  SOK_ONE_BY_ONE
  for (u32 d = threadIdx.x; d < all; d += blockDim.x) own.count[d] = 0;
  __syncthreads();
  constexpr i64 kBatch = 4;  // that are asked for before the first is counted
  SOK_ONE_BY_ONE
  for (i64 i = share.thread; i < n; i += kBatch * share.num_threads) {
    i32 labels[kBatch];
    for (i64 j = 0; j < kBatch; ++j) {
      const i64 item = i + j * share.num_threads;
      labels[j] = item < n ? label_of(item) : -1;
    }
    for (i64 j = 0; j < kBatch; ++j) {
      if (labels[j] < 0) continue;
      note(i + j * share.num_threads, labels[j]);
      SOK_ONE_BY_ONE
      for (u32 pass = 0; pass < (u32)passes; ++pass)
        atomicAdd(own.count + (pass << bits | ((u32)labels[j] >> pass * bits & mask)), 1u);
    }
  }
  __syncthreads();
  SOK_ONE_BY_ONE
  for (u32 d = threadIdx.x; d < all; d += blockDim.x)
    if (own.count[d]) atomicAdd(counts + d, own.count[d]);
}
#endif

#endif  // SOK_DIGITS_CUH_
