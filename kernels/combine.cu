// Lookups pooled over ragged rows, and what their gradients need.
//
// forward: out[b] sums weights[j] * source[inverse[j]] over the items j of row b, and is divided by
// what the combiner says. backward: the gradient of source[u] sums coefficients[j] * out_grads[row
// of j] over the items j with inverse[j] == u (segments.cu).
//
// A sum goes over its items in ascending order, whatever the number of workers: a run repeats bit
// for bit. It goes in pieces: an f32 to which ones are added one by one stops at 2^24.
#include "pooling.cuh"

// Sums the items of every group and divides as the combiner says.
//
// offsets  (num_groups + 1,)     group g has the items offsets[g] to offsets[g + 1]
// out      (num_groups, dim)  out
template <class Items>
SOK_DEVICE void sum_rows(const SokShare share, const Items items, const i64* offsets, i64 combiner,
                         f32* out, i64 num_groups) {
  const i64 dim = items.dim, n = offsets[num_groups];
  const bool in_quads = sums_quads(dim, items.source, out);
  SOK_FOR_EACH_ROW_OF_WORDS(g, num_groups, in_quads ? dim / 4 : dim) {
    const i64 begin = offsets[g], end = offsets[g + 1];
    if (SOK_AHEAD > 0) {
      // Items of one group follow those of the one before it, so this runs ahead of the sums below.
      for (i64 k = begin + SOK_AHEAD; k < end + SOK_AHEAD && k < n; ++k)
        prefetch_source(item_row(items, k), dim);
    }
    sum_group(items, begin, end, combiner, in_quads, g_lanes, out + g * dim);
  }
}

// The same, with and without weights.
template <class T>
SOK_DEVICE void sum_rows(const SokShare share, const T* source, i64 dim, const i32* index,
                         const f32* weights, const i64* offsets, i64 combiner, f32* out,
                         i64 num_groups) {
  if (weights)
    sum_rows(share, Items<T, true>{source, dim, index, weights}, offsets, combiner, out,
             num_groups);
  else
    sum_rows(share, Items<T, false>{source, dim, index, nullptr}, offsets, combiner, out,
             num_groups);
}

// Pools rows over ragged rows.
//
// source      (u, dim)           f32 or f64; u16 bits of f16 or bf16
// inverse     (n,)               item j reads source[inverse[j] - first]
// row_splits  (batch + 1,)
// weights     (n,)               may be null
// out         (batch, dim)  out
SOK_ROW_KERNEL(combine_f32)
(const SokShare share, const f32* source, i64 dim, const i32* inverse, i64 first,
 const i64* row_splits, const f32* weights, i64 combiner, f32* out, i64 batch) {
  sum_rows(share, row_zero(source, first, dim), dim, inverse, weights, row_splits, combiner, out,
           batch);
}
SOK_EXPORT(combine_f32)
SOK_ROW_KERNEL(combine_f16)
(const SokShare share, const u16* source, i64 dim, const i32* inverse, i64 first,
 const i64* row_splits, const f32* weights, i64 combiner, f32* out, i64 batch) {
  sum_rows(share, row_zero((const f16*)source, first, dim), dim, inverse, weights, row_splits,
           combiner, out, batch);
}
SOK_EXPORT(combine_f16)
SOK_ROW_KERNEL(combine_bf16)
(const SokShare share, const u16* source, i64 dim, const i32* inverse, i64 first,
 const i64* row_splits, const f32* weights, i64 combiner, f32* out, i64 batch) {
  sum_rows(share, row_zero((const bf16*)source, first, dim), dim, inverse, weights, row_splits,
           combiner, out, batch);
}
SOK_EXPORT(combine_bf16)
SOK_ROW_KERNEL(combine_f64)
(const SokShare share, const f64* source, i64 dim, const i32* inverse, i64 first,
 const i64* row_splits, const f32* weights, i64 combiner, f32* out, i64 batch) {
  sum_rows(share, row_zero(source, first, dim), dim, inverse, weights, row_splits, combiner, out,
           batch);
}
SOK_EXPORT(combine_f64)

// Row splits; of rows that are all equally long there is no array.
struct RowSplits {
  const i64* at;
  i64 length;
  SOK_DEVICE_MEMBER i64 operator[](i64 b) const { return at ? at[b] : b * length; }
};

// Pools rows of a store by their numbers.
template <class T, bool kWeighted>
SOK_DEVICE void pool_rows(const SokShare share, const StoredItems<T, kWeighted> items,
                          const RowSplits row_splits, i64 combiner, f32* out, i64* counts, i64 n,
                          i64 num_rows) {
  const i64 dim = items.dim;
  const bool in_quads = sums_quads(dim, (const T*)nullptr, out);
  i64 wrong = 0;
  SOK_FOR_EACH(b, num_rows) {
    wrong += !splits_fit(row_splits[b], row_splits[b + 1], b, num_rows, n);
  }
  sok_count(counts + 2, wrong);
  SOK_FOR_EACH_ROW_OF_WORDS(b, num_rows, in_quads ? dim / 4 : dim) {
    // Within the items, whatever the splits say: what comes of wrong ones nobody sees.
    const i64 from = row_splits[b], to = row_splits[b + 1];
    const i64 begin = from < 0 ? 0 : from, end = to > n ? n : to;
    sum_group(items, begin, end, combiner, in_quads, b_lanes, out + b * dim);
  }
}
// pool_<T>: pools rows of a store by their numbers; SOK_NO_ROW counts as zeros.
//
// rows        (n,)
// row_splits  (num_rows + 1,)  from 0 to n, ascending; rows whose splits do not fit are counted;
//                              null: all rows have `length` items
// weights     (n,)             null: all 1
// combiner    see pooling.cuh
// out         (num_rows, dim)  out
// counts      (3,)             the last grows by the row splits that do not fit
#define SOK_POOL(T)                                                                                \
  SOK_ROW_KERNEL(pool_##T)                                                                         \
  (const SokShare share, const u64* chunks, i64 shift, i64 dim, const u32* rows,                   \
   const i64* row_splits, const f32* weights, i64 combiner, f32* out, i64* counts, i64 n,          \
   i64 num_rows, i64 length) {                                                                     \
    const RowSplits splits{row_splits, length};                                                    \
    if (weights)                                                                                   \
      pool_rows(share, StoredItems<T, true>{chunks, shift, dim, rows, weights}, splits, combiner,  \
                out, counts, n, num_rows);                                                         \
    else                                                                                           \
      pool_rows(share, StoredItems<T, false>{chunks, shift, dim, rows, nullptr}, splits, combiner, \
                out, counts, n, num_rows);                                                         \
  }                                                                                                \
  SOK_EXPORT(pool_##T)

SOK_POOL(f32)
SOK_POOL(f16)
SOK_POOL(bf16)
SOK_POOL(f64)

// Pools the rows anew that have an item whose key was missing.
template <class T, bool kWeighted>
SOK_DEVICE void pool_rows_again(const SokShare share, const GivenItems<T, kWeighted>& items,
                                const RowSplits row_splits, i64 combiner, u32* rows, f32* out,
                                i64* num_without_row, i64 num_rows) {
  const i64 dim = items.dim;
  const bool in_quads = sums_quads(dim, items.got.values, out);
  i64 missing = 0;
  SOK_FOR_EACH_ROW_OF_WORDS(b, num_rows, in_quads ? dim / 4 : dim) {
    const i64 begin = row_splits[b], end = row_splits[b + 1];
    bool is_new = false;
    for (i64 k = begin; k < end; ++k) {
      if (items.got.number[k] < 0) continue;
      is_new = true;
      if (!SOK_IS_FIRST_WORD(b)) break;
      // Nobody reads it meanwhile: the sum below takes it from where this does. That may be `rows`
      // itself, which has the row then.
      const u32 row = new_row(items.got, items.got.number[k]);
      if (rows[k] != row) rows[k] = row;
      missing += row == SOK_NO_ROW;
    }
    if (is_new) sum_group(items, begin, end, combiner, in_quads, b_lanes, out + b * dim);
  }
  sok_count(num_without_row, missing);
}
// pool_again_<T>: writes the row numbers of items whose keys were missing, and pools, as pool_<T>
// does, the rows that have such an item.
//
// number, first, new_rows  see NewRows
// values      (k, dim) elements of T: the result of a missing key that has no row; null: zeros
// row_splits  (num_rows + 1,)  null: all rows have `length` items
// rows        (n,)  in: of the items whose keys were not missing; out
// num_without_row  (1,)  grows by the items whose keys were missing and have no row
#define SOK_POOL_AGAIN(T)                                                                          \
  SOK_ROW_KERNEL(pool_again_##T)                                                                   \
  (const SokShare share, const u64* chunks, i64 shift, i64 dim, const i32* number, i64 first,      \
   const u32* new_rows, const u8* values, const i64* row_splits, const f32* weights, i64 combiner, \
   u32* rows, f32* out, i64* num_without_row, i64 num_rows, i64 length) {                          \
    const NewRows<T> got = new_rows_from(number, first, new_rows, (const T*)values, dim);          \
    const RowSplits splits{row_splits, length};                                                    \
    if (weights)                                                                                   \
      pool_rows_again(share,                                                                       \
                      GivenItems<T, true>{{chunks, shift, dim, rows, weights}, got, dim, weights}, \
                      splits, combiner, rows, out, num_without_row, num_rows);                     \
    else                                                                                           \
      pool_rows_again(                                                                             \
          share, GivenItems<T, false>{{chunks, shift, dim, rows, nullptr}, got, dim, nullptr},     \
          splits, combiner, rows, out, num_without_row, num_rows);                                 \
  }                                                                                                \
  SOK_EXPORT(pool_again_##T)

SOK_POOL_AGAIN(f32)
SOK_POOL_AGAIN(f16)
SOK_POOL_AGAIN(bf16)
SOK_POOL_AGAIN(f64)

// Counts row splits that do not rise from 0 to the number of items.
//
// row_splits  (num_rows + 1,)
// count       (1,)             grows
// num_splits                   num_rows + 1
SOK_KERNEL(splits_count_wrong)
(const SokShare share, const i64* row_splits, i64* count, i64 n, i64 num_splits) {
  i64 wrong = 0;
  SOK_FOR_EACH(b, num_splits) {
    const i64 split = row_splits[b];
    wrong += b == num_splits - 1 ? split != n : split > row_splits[b + 1];
    if (b == 0) wrong += split != 0;
  }
  sok_count(count, wrong);
}
SOK_EXPORT(splits_count_wrong)

// The row of every item, and the factor of the gradient of that row for the item.
//
// splits        (batch + 1,)  row splits; null: all rows have `length` items
// item_rows     (n,)  out
// coefficients  (n,)  out  weight / divisor; null: not wanted
SOK_KERNEL(combine_items)
(const SokShare share, const i64* splits, const f32* weights, i64 combiner, i32* item_rows,
 f32* coefficients, i64 length, i64 batch) {
  const RowSplits row_splits{splits, length};
  SOK_FOR_EACH(b, batch) {
    const i64 begin = row_splits[b], end = row_splits[b + 1];
    for (i64 j = begin; j < end; ++j) item_rows[j] = (i32)b;
    if (!coefficients) continue;
    const f32 divisor = combine_divisor(weights, begin, end, combiner);
    for (i64 j = begin; j < end; ++j)
      coefficients[j] = divisor == 0.0f ? 0.0f : (weights ? weights[j] : 1.0f) / divisor;
  }
}
SOK_EXPORT(combine_items)

// Dot product in 8 interleaved parts, added in a fixed order: one vector instruction per 8 columns
// on the CPU.
template <class T>
SOK_DEVICE f32 dot_product(const f32* a, const T* b, i64 dim) {
  f32 part[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  i64 c = 0;
  for (; c + 8 <= dim; c += 8) {
    for (i64 i = 0; i < 8; ++i) part[i] += a[c + i] * to_f32(b[c + i]);
  }
  // Part by part, as above: a GPU's registers have no number that is known at run time only.
  for (i64 i = 0; i < 8; ++i) {
    if (c + i < dim) part[i] += a[c + i] * to_f32(b[c + i]);
  }
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

// The gradient by the weights: with d_j = out_grads[b] . source[inverse[j]] and the divisor D of
// row b, d_j for sum, (d_j - sum_k w_k d_k / D) / D for mean, d_j / D - w_j sum_k w_k d_k / D^3 for
// sqrtn.
//
// out_grads     (batch, dim)
// inverse       (n,)          numbered from `first` on; null: item j reads source[j], first is 0
// weight_grads  (n,)  out
template <class T>
SOK_DEVICE void weight_grads_of_rows(const SokShare share, const f32* out_grads, const T* source,
                                     i64 dim, const i32* inverse, const i64* row_splits,
                                     const f32* weights, i64 combiner, f32* weight_grads,
                                     i64 batch) {
  SOK_FOR_EACH(b, batch) {
    const i64 begin = row_splits[b], end = row_splits[b + 1];
    const f32 divisor = combine_divisor(weights, begin, end, combiner);
    for (i64 j = begin; j < end; ++j) {
      weight_grads[j] = divisor == 0.0f
                            ? 0.0f
                            : dot_product(out_grads + b * dim,
                                          source + (inverse ? (i64)inverse[j] : j) * dim, dim) /
                                  divisor;
    }
    if (divisor == 0.0f || combiner == COMBINE_SUM) continue;
    const f32 sum = sum_terms(begin, end, [=](i64 j) { return weights[j] * weight_grads[j]; });
    for (i64 j = begin; j < end; ++j) {
      weight_grads[j] -=
          combiner == COMBINE_MEAN ? sum / divisor : (weights[j] / divisor) * (sum / divisor);
    }
  }
}

SOK_KERNEL(combine_weight_grad_f32)
(const SokShare share, const f32* out_grads, const f32* source, i64 dim, const i32* inverse,
 i64 first, const i64* row_splits, const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(share, out_grads, row_zero(source, first, dim), dim, inverse, row_splits,
                       weights, combiner, weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_f32)
SOK_KERNEL(combine_weight_grad_f16)
(const SokShare share, const f32* out_grads, const u16* source, i64 dim, const i32* inverse,
 i64 first, const i64* row_splits, const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(share, out_grads, row_zero((const f16*)source, first, dim), dim, inverse,
                       row_splits, weights, combiner, weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_f16)
SOK_KERNEL(combine_weight_grad_bf16)
(const SokShare share, const f32* out_grads, const u16* source, i64 dim, const i32* inverse,
 i64 first, const i64* row_splits, const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(share, out_grads, row_zero((const bf16*)source, first, dim), dim, inverse,
                       row_splits, weights, combiner, weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_bf16)
SOK_KERNEL(combine_weight_grad_f64)
(const SokShare share, const f32* out_grads, const f64* source, i64 dim, const i32* inverse,
 i64 first, const i64* row_splits, const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(share, out_grads, row_zero(source, first, dim), dim, inverse, row_splits,
                       weights, combiner, weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_f64)
