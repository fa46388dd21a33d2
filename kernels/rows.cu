// Rows between the row store and dense arrays. Nothing here knows a key.
#include "rows.cuh"

// A copy does not look at what it copies: `words` of a row stand for its elements, or, on a GPU,
// for pieces of 16 bytes where the rows consist of them and the dense array lies on them.
#define SOK_COPY(T, dim, dense, function, ...)                                          \
  if (sok_moves_words(dim, dense))                                                      \
    function<SokWord>(share, dim * (i64)sizeof(T) / (i64)sizeof(SokWord), __VA_ARGS__); \
  else                                                                                  \
    function<T>(share, dim, __VA_ARGS__)

// Copies rows out of a column; SOK_NO_ROW gives zeros.
//
// rows  (n,)
// out   (n, words)  out
template <class W>
SOK_DEVICE void rows_read(const SokShare share, i64 words, const u64* chunks, i64 shift,
                          const u32* rows, void* out, i64 n) {
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, words) {
    if (SOK_AHEAD > 0 && r + SOK_AHEAD < n)
      sok_prefetch_row<W>(chunks, shift, words, rows[r + SOK_AHEAD]);
    W* to = (W*)out + r * words;
    if (rows[r] == SOK_NO_ROW) {
      SOK_FOR_EACH_WORD_OF_ROW(w, r, words) { to[w] = W{}; }
    } else {
      const W* from = sok_row<W>(chunks, shift, words, rows[r]);
      SOK_FOR_EACH_WORD_OF_ROW(w, r, words) { to[w] = from[w]; }
    }
  }
}

// Writes row numbers and rows of items whose keys were missing: a copy of the row or, without a
// row, of the key's value in `values`.
//
// number, first, new_rows, values  see NewRows
// rows        (n,)         out  row number of such an item, or SOK_NO_ROW
// out         (n, words)   out  its row; null: not written
// num_without_row  (1,)         grows by such items without a row
template <class W>
SOK_DEVICE void rows_deliver(const SokShare share, i64 words, const u64* chunks, i64 shift,
                             const i32* number, i64 first, const u32* new_rows, const void* values,
                             u32* rows, void* out, i64* num_without_row, i64 n) {
  const NewRows<W> got = new_rows_from(number, first, new_rows, (const W*)values, words);
  i64 missing = 0;
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, words) {
    if (SOK_AHEAD > 0 && out && r + SOK_AHEAD < n && number[r + SOK_AHEAD] >= 0)
      sok_prefetch_row<W>(chunks, shift, words, new_row(got, number[r + SOK_AHEAD]));
    if (number[r] < 0) continue;
    const u32 row = new_row(got, number[r]);
    if (SOK_IS_FIRST_WORD(r)) {
      // `new_rows` may be `rows`, which others read meanwhile: it has the row then.
      if (rows[r] != row) rows[r] = row;
      missing += row == SOK_NO_ROW;
    }
    if (!out) continue;
    const W* from = row != SOK_NO_ROW ? sok_row<W>(chunks, shift, words, row)
                    : got.values      ? got.values + number[r] * words
                                      : nullptr;
    W* to = (W*)out + r * words;
    SOK_FOR_EACH_WORD_OF_ROW(w, r, words) { to[w] = from ? from[w] : W{}; }
  }
  sok_count(num_without_row, missing);
}

// Copies rows into a column; SOK_NO_ROW is skipped. The rows are distinct.
//
// rows    (n,)
// values  (m, words)
// source  (n,)      row r takes values[source[r]]; null: values[r]
template <class W>
SOK_DEVICE void rows_write(const SokShare share, i64 words, const u64* chunks, i64 shift,
                           const u32* rows, const void* values, const i32* source, i64 n) {
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, words) {
    if (rows[r] == SOK_NO_ROW) continue;
    const W* from = (const W*)values + (source ? (i64)source[r] : r) * words;
    W* to = sok_row<W>(chunks, shift, words, rows[r]);
    SOK_FOR_EACH_WORD_OF_ROW(w, r, words) { to[w] = from[w]; }
  }
}

// Exchanges rows[r] and others[r]. All of them are distinct and none is SOK_NO_ROW.
//
// rows    (n,)
// others  (n,)
template <class W>
SOK_DEVICE void rows_swap(const SokShare share, i64 words, const u64* chunks, i64 shift,
                          const u32* rows, const u32* others, i64 n) {
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, words) {
    if (SOK_AHEAD > 0 && r + SOK_AHEAD < n) {
      sok_prefetch_row<W>(chunks, shift, words, rows[r + SOK_AHEAD]);
      sok_prefetch_row<W>(chunks, shift, words, others[r + SOK_AHEAD]);
    }
    W* a = sok_row<W>(chunks, shift, words, rows[r]);
    W* b = sok_row<W>(chunks, shift, words, others[r]);
    SOK_FOR_EACH_WORD_OF_ROW(w, r, words) {
      W x = a[w];
      a[w] = b[w];
      b[w] = x;
    }
  }
}

// out[i] = x[index[i]] for dense rows.
template <class W>
SOK_DEVICE void dense_gather(const SokShare share, i64 words, const void* x, const i32* index,
                             void* out, i64 n) {
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, words) {
    if (SOK_AHEAD > 0 && r + SOK_AHEAD < n)
      sok_prefetch((const W*)x + index[r + SOK_AHEAD] * words);
    const W* from = (const W*)x + index[r] * words;
    W* to = (W*)out + r * words;
    SOK_FOR_EACH_WORD_OF_ROW(w, r, words) { to[w] = from[w]; }
  }
}

#define SOK_COPY_KERNELS(suffix, type)                                                           \
  SOK_ROW_KERNEL(rows_read_##suffix)                                                             \
  (const SokShare share, const u64* chunks, i64 shift, i64 dim, const u32* rows, type* out,      \
   i64 n) {                                                                                      \
    SOK_COPY(type, dim, out, rows_read, chunks, shift, rows, out, n);                            \
  }                                                                                              \
  SOK_EXPORT(rows_read_##suffix)                                                                 \
  SOK_ROW_KERNEL(rows_deliver_##suffix)                                                          \
  (const SokShare share, const u64* chunks, i64 shift, i64 dim, const i32* number, i64 first,    \
   const u32* new_rows, const type* values, u32* rows, type* out, i64* num_without_row, i64 n) { \
    SOK_COPY(type, dim, (const type*)((u64)values | (u64)out), rows_deliver, chunks, shift,      \
             number, first, new_rows, values, rows, out, num_without_row, n);                    \
  }                                                                                              \
  SOK_EXPORT(rows_deliver_##suffix)                                                              \
  SOK_ROW_KERNEL(rows_write_##suffix)                                                            \
  (const SokShare share, const u64* chunks, i64 shift, i64 dim, const u32* rows,                 \
   const type* values, const i32* source, i64 n) {                                               \
    SOK_COPY(type, dim, values, rows_write, chunks, shift, rows, values, source, n);             \
  }                                                                                              \
  SOK_EXPORT(rows_write_##suffix)                                                                \
  SOK_ROW_KERNEL(rows_swap_##suffix)                                                             \
  (const SokShare share, const u64* chunks, i64 shift, i64 dim, const u32* rows,                 \
   const u32* others, i64 n) {                                                                   \
    SOK_COPY(type, dim, (type*)nullptr, rows_swap, chunks, shift, rows, others, n);              \
  }                                                                                              \
  SOK_EXPORT(rows_swap_##suffix)                                                                 \
  SOK_ROW_KERNEL(dense_gather_##suffix)                                                          \
  (const SokShare share, const type* x, i64 dim, const i32* index, type* out, i64 n) {           \
    SOK_COPY(type, dim, (const type*)((u64)x | (u64)out), dense_gather, x, index, out, n);       \
  }                                                                                              \
  SOK_EXPORT(dense_gather_##suffix)

// By width: rows of 8, 4, 2 or 1 bytes an element.
SOK_COPY_KERNELS(u64, u64)
SOK_COPY_KERNELS(u32, u32)
SOK_COPY_KERNELS(u16, u16)
SOK_COPY_KERNELS(u8, u8)

// Adds scale * deltas to distinct rows; SOK_NO_ROW is skipped.
//
// deltas  (n, dim)
template <class T, int kWidth>
SOK_DEVICE void rows_add(const SokShare share, const u64* chunks, i64 shift, i64 dim,
                         const u32* rows, const f32* deltas, f32 scale, i64 n) {
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim / kWidth) {
    if (rows[r] == SOK_NO_ROW) continue;
    const auto* from = sok_columns<kWidth>(deltas + r * dim);
    auto* to = sok_columns<kWidth>(sok_row<T>(chunks, shift, dim, rows[r]));
    SOK_FOR_EACH_WORD_OF_ROW(c, r, dim / kWidth) {
      const SokColumns<f32, kWidth> delta = from[c];
      SokColumns<T, kWidth> x = to[c];
      for (int k = 0; k < kWidth; ++k)
        from_f32(to_f32(x.column[k]) + scale * delta.column[k], x.column + k);
      to[c] = x;
    }
  }
}

template <int kWidth>
SOK_DEVICE void rows_fill_columns(const SokShare share, const u64* chunks, i64 shift, i64 dim,
                                  const u32* rows, f32 value, i64 n) {
  SokColumns<f32, kWidth> x;
  for (int k = 0; k < kWidth; ++k) x.column[k] = value;
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim / kWidth) {
    if (rows[r] == SOK_NO_ROW) continue;
    auto* to = sok_columns<kWidth>(sok_row<f32>(chunks, shift, dim, rows[r]));
    SOK_FOR_EACH_WORD_OF_ROW(c, r, dim / kWidth) { to[c] = x; }
  }
}

// Sets every element of some rows of a state column; SOK_NO_ROW is skipped.
SOK_ROW_KERNEL(rows_fill)
(const SokShare share, const u64* chunks, i64 shift, i64 dim, const u32* rows, f32 value, i64 n) {
  if (sok_moves_quads(dim, (const f32*)nullptr))
    rows_fill_columns<4>(share, chunks, shift, dim, rows, value, n);
  else
    rows_fill_columns<1>(share, chunks, shift, dim, rows, value, n);
}
SOK_EXPORT(rows_fill)

// Assigns rows to keys, with no accesses yet; SOK_NO_ROW is skipped.
//
// accesses  (num_rows,)
// held_for  (num_rows,)  the key of each row
// rows      (n,)         distinct
// keys      (n,)         null: to nobody
SOK_KERNEL(rows_assign)(const SokShare share, u8* accesses, i64* held_for, const u32* rows,
                        const i64* keys, i64 n) {
  SOK_FOR_EACH(i, n) {
    if (rows[i] == SOK_NO_ROW) continue;
    accesses[rows[i]] = keys ? 0 : SOK_NOT_HELD;
    if (keys) held_for[rows[i]] = keys[i];
  }
}
SOK_EXPORT(rows_assign)

// Exchanges what is known of rows[r] and others[r]. All are distinct and none is SOK_NO_ROW.
SOK_KERNEL(rows_swap_accesses)(const SokShare share, u8* accesses, i64* held_for, const u32* rows,
                               const u32* others, i64 n) {
  SOK_FOR_EACH(r, n) {
    u8 x = accesses[rows[r]];
    accesses[rows[r]] = accesses[others[r]];
    accesses[others[r]] = x;
    i64 key = held_for[rows[r]];
    held_for[rows[r]] = held_for[others[r]];
    held_for[others[r]] = key;
  }
}
SOK_EXPORT(rows_swap_accesses)

// Adds up flags.
//
// flags  (n,)
// count  (1,)  grows by their sum
SOK_KERNEL(count_flags)(const SokShare share, const i32* flags, i64* count, i64 n) {
  i64 sum = 0;
  SOK_FOR_EACH(i, n) { sum += flags[i]; }
  sok_count(count, sum);
}
SOK_EXPORT(count_flags)

// Adds 1 to the accesses of rows, up to SOK_NOT_HELD - 1; SOK_NO_ROW is skipped. Of a row that
// comes twice, one or both are counted.
//
// accesses  (num_rows,)
// rows      (n,)
SOK_KERNEL(rows_count_access)(const SokShare share, u8* accesses, const u32* rows, i64 n) {
  SOK_FOR_EACH_BLOCK(first, count, n) {
    for (i64 i = first; i < first + count; ++i)
      if (rows[i] != SOK_NO_ROW) sok_prefetch(accesses + rows[i]);
    for (i64 i = first; i < first + count; ++i) {
      if (rows[i] != SOK_NO_ROW) sok_count_access(accesses, rows[i]);
    }
  }
}
SOK_EXPORT(rows_count_access)

// Halves the accesses of all rows that are held.
//
// accesses  (n,)
SOK_KERNEL(rows_halve_accesses)(const SokShare share, u8* accesses, i64 n) {
  // Always written: without a branch the CPU does many at a time.
  SOK_FOR_EACH(i, n) {
    const u8 x = accesses[i];
    accesses[i] = x == SOK_NOT_HELD ? x : (u8)(x >> 1);
  }
}
SOK_EXPORT(rows_halve_accesses)

#define SOK_ADD_KERNEL(type)                                                     \
  SOK_ROW_KERNEL(rows_add_##type)                                                \
  (const SokShare share, const u64* chunks, i64 shift, i64 dim, const u32* rows, \
   const f32* deltas, f32 scale, i64 n) {                                        \
    if (sok_moves_quads(dim, deltas))                                            \
      rows_add<type, 4>(share, chunks, shift, dim, rows, deltas, scale, n);      \
    else                                                                         \
      rows_add<type, 1>(share, chunks, shift, dim, rows, deltas, scale, n);      \
  }                                                                              \
  SOK_EXPORT(rows_add_##type)

SOK_ADD_KERNEL(f32)
SOK_ADD_KERNEL(f16)
SOK_ADD_KERNEL(bf16)
