// Where a row lives: a column of the row store is a list of equally long chunks.
//
// chunks  (num_chunks,)  address of each chunk
// shift                  a chunk holds 2^shift rows
// dim                    elements of a row
#ifndef SOK_ROWS_CUH_
#define SOK_ROWS_CUH_

#include "platform.cuh"

// The format of a row's elements, by which a kernel chooses among its forms.
#define SOK_F32 0
#define SOK_F16 1
#define SOK_BF16 2
#define SOK_F64 3

// The accesses of a row that nobody holds; engine/rows/tiers.py.
#define SOK_NOT_HELD 255

// Counts an access of a row, up to SOK_NOT_HELD - 1.
SOK_DEVICE void sok_count_access(u8* accesses, u32 row) {
  const u8 old = sok_load(accesses + row);
  if (old < SOK_NOT_HELD - 1) sok_store(accesses + row, (u8)(old + 1));
}

template <class T>
SOK_DEVICE T* sok_row(const u64* chunks, i64 shift, i64 dim, u32 row) {
  T* chunk = (T*)chunks[row >> shift];
  return chunk + (i64)(row & ((1u << shift) - 1u)) * dim;
}

// Where row 0 would be, if row `first` is the first there is.
template <class T>
SOK_DEVICE const T* row_zero(const T* source, i64 first, i64 dim) {
  return (const T*)((u64)source - (u64)(first * dim) * sizeof(T));
}

// The rows of keys that were missing in a lookup. New keys are numbered over all tables: the
// first one of a table is number `first`.
//
// number    (n,)  which new key an item has; -1: its key was not missing
// new_rows        from `first` on the row numbers of new keys, or SOK_NO_ROW; null: no key has one
// values          from `first` on what new keys give without a row; null: zeros
template <class T>
struct NewRows {
  const i32* number;
  const u32* new_rows;
  const T* values;
};
template <class T>
SOK_DEVICE NewRows<T> new_rows_from(const i32* number, i64 first, const u32* new_rows,
                                    const T* values, i64 dim) {
  return NewRows<T>{number, new_rows ? row_zero(new_rows, first, 1) : nullptr,
                    values ? row_zero(values, first, dim) : nullptr};
}
template <class T>
SOK_DEVICE u32 new_row(const NewRows<T>& got, i64 number) {
  return got.new_rows ? got.new_rows[number] : SOK_NO_ROW;
}

// Rows that are chosen for new keys: freed near ones, the last one first, then new ones, then freed
// far ones (engine/rows/allocator.py).
//
// near, far  (take_near,), (take_far,)  those that were freed last
// first_new  the first of take_new new ones
struct ClaimedRows {
  const u32* near;
  i64 take_near, first_new, take_new;
  const u32* far;
  i64 take_far;
};
// The i-th of them, or SOK_NO_ROW.
SOK_DEVICE u32 sok_claimed_row(const ClaimedRows& claimed, i64 i) {
  if (i < claimed.take_near) return claimed.near[claimed.take_near - 1 - i];
  i -= claimed.take_near;
  if (i < claimed.take_new) return (u32)(claimed.first_new + i);
  i -= claimed.take_new;
  return i < claimed.take_far ? claimed.far[claimed.take_far - 1 - i] : SOK_NO_ROW;
}

// A row as pieces of kWidth columns: 1 or, where sok_moves_quads says so, 4.
template <int kWidth, class T>
SOK_DEVICE SokColumns<T, kWidth>* sok_columns(T* row) {
  return (SokColumns<T, kWidth>*)row;
}
template <int kWidth, class T>
SOK_DEVICE const SokColumns<T, kWidth>* sok_columns(const T* row) {
  return (const SokColumns<T, kWidth>*)row;
}

// Asks for the cache lines of a row, up to 512 bytes of it: a row that is longer streams by itself.
// Where dim is 0 there need not be any chunks.
template <class T>
SOK_DEVICE void sok_prefetch_row(const u64* chunks, i64 shift, i64 dim, u32 row) {
  if (SOK_AHEAD == 0 || dim == 0 || row == SOK_NO_ROW) return;
  const u8* p = (const u8*)sok_row<T>(chunks, shift, dim, row);
  i64 bytes = dim * (i64)sizeof(T);
  if (bytes > 512) bytes = 512;
  for (i64 b = 0; b < bytes; b += 64) sok_prefetch(p + b);
}

// The lanes of a tile copy a row together, in words of W.
template <class W>
SOK_DEVICE void sok_copy_row(const u8* from, u8* to, i64 bytes) {
  sok_copy_words((const W*)from, (W*)to, bytes / (i64)sizeof(W));
}

// The lanes of a tile write zeros into a row together.
template <class W>
SOK_DEVICE void sok_zero_row(u8* to, i64 bytes) {
  SOK_FOR_EACH_OF_TILE(w, bytes / (i64)sizeof(W)) { ((W*)to)[w] = W{}; }
}

#endif  // SOK_ROWS_CUH_
