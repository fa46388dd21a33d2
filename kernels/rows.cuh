// Where a row lives: a column of the row store is a list of equally long chunks.
//
// chunks  (num_chunks,)  address of each chunk
// shift                  a chunk holds 2^shift rows
// dim                    elements of a row
#ifndef SOK_ROWS_CUH_
#define SOK_ROWS_CUH_

#include "platform.cuh"

template <class T>
SOK_DEVICE T* sok_row(const u64* chunks, i64 shift, i64 dim, u32 row) {
  T* chunk = (T*)chunks[row >> shift];
  return chunk + (i64)(row & ((1u << shift) - 1u)) * dim;
}

// Asks for the cache lines of a row, up to 512 bytes of it: a row that is longer streams by itself.
template <class T>
SOK_DEVICE void sok_prefetch_row(const u64* chunks, i64 shift, i64 dim, u32 row) {
  if (SOK_AHEAD == 0 || row == SOK_ABSENT) return;
  const u8* p = (const u8*)sok_row<T>(chunks, shift, dim, row);
  i64 bytes = dim * (i64)sizeof(T);
  if (bytes > 512) bytes = 512;
  for (i64 b = 0; b < bytes; b += 64) sok_prefetch(p + b);
}

#endif  // SOK_ROWS_CUH_
