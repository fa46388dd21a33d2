// Sums of rows: lookups pooled over ragged rows, and their gradients.
//
// forward: out[b] sums weights[j] * source[inverse[j]] over the items j of row b, and is divided by
// what the combiner says. backward: the gradient of source[u] sums coefficients[j] * out_grads[row
// of j] over the items j with inverse[j] == u.
//
// A sum goes over its items in ascending order, whatever the number of workers: a run repeats bit
// for bit.
#include "platform.cuh"

// combiner: what a weighted sum is divided by.
#define COMBINE_SUM 0    // 1
#define COMBINE_MEAN 1   // the sum of the weights
#define COMBINE_SQRTN 2  // the root of the sum of their squares

// The divisor of one row; where it is 0 (no items, or weights that cancel out) the result is zeros.
SOK_DEVICE f32 combine_divisor(const f32* weights, i64 begin, i64 end, i64 combiner) {
  if (combiner == COMBINE_SUM) return 1.0f;
  if (!weights) return combiner == COMBINE_MEAN ? (f32)(end - begin) : sok_sqrt((f32)(end - begin));
  f32 sum = 0.0f;
  for (i64 j = begin; j < end; ++j)
    sum += combiner == COMBINE_MEAN ? weights[j] : weights[j] * weights[j];
  return combiner == COMBINE_MEAN ? sum : sok_sqrt(sum);
}

// Asks for the row that an item reads, up to 512 bytes of it.
template <class T>
SOK_DEVICE void prefetch_source(const T* row, i64 dim) {
  i64 bytes = dim * (i64)sizeof(T);
  if (bytes > 512) bytes = 512;
  for (i64 b = 0; b < bytes; b += 64) sok_prefetch((const u8*)row + b);
}

// The items of a sum: item k of a group is number order[k], reads source[index[number]] and has
// weight weights[number]. Each list may be null: then k itself, source[number], 1.
template <class T>
struct Items {
  const T* source;
  i64 dim;
  const i32* order;
  const i32* index;
  const f32* weights;
};
template <class T>
SOK_DEVICE const T* item_row(const Items<T>& items, i64 k) {
  i64 number = items.order ? items.order[k] : k;
  return items.source + (items.index ? (i64)items.index[number] : number) * items.dim;
}
template <class T>
SOK_DEVICE f32 item_weight(const Items<T>& items, i64 k) {
  return items.weights ? items.weights[items.order ? items.order[k] : k] : 1.0f;
}

// Columns of one row that a lane sums at a time. On the CPU as many as stay in registers: with 32,
// g++ 12 keeps the sums in memory and takes four times as long.
constexpr i64 kColumns = SOK_BLOCK < 16 ? SOK_BLOCK : 16;

// Sums `count` columns of the items from `first` on. With kWhole, count is kColumns, which the
// compiler then knows.
template <bool kWhole, class T>
SOK_DEVICE void sum_columns(const Items<T>& items, i64 begin, i64 end, f32 divisor, i64 first,
                            i64 count, f32* __restrict__ out) {
  const i64 width = kWhole ? kColumns : count;
  f32 sum[kColumns];
  for (i64 c = 0; c < width; ++c) sum[c] = 0.0f;
  for (i64 k = begin; k < end; ++k) {
    const T* __restrict__ from = item_row(items, k) + first;
    const f32 weight = item_weight(items, k);
    for (i64 c = 0; c < width; ++c) sum[c] += weight * to_f32(from[c]);
  }
  if (divisor == 1.0f) {
    for (i64 c = 0; c < width; ++c) out[first + c] = sum[c];
  } else {
    for (i64 c = 0; c < width; ++c) out[first + c] = sum[c] / divisor;
  }
}

// Sums the items of every group and divides as the combiner says.
//
// offsets  (num_groups + 1,)     group g has the items offsets[g] to offsets[g + 1]
// out      (num_groups, dim)  out
template <class T>
SOK_DEVICE void sum_rows(const Items<T> items, const i64* offsets, i64 combiner, f32* out,
                         i64 num_groups) {
  const i64 dim = items.dim, n = offsets[num_groups];
  SOK_FOR_EACH_ROW(g, num_groups) {
    const i64 begin = offsets[g], end = offsets[g + 1];
    f32* __restrict__ to = out + g * dim;
    if (SOK_AHEAD > 0) {
      // Items of one group follow those of the one before it, so this runs ahead of the sums below.
      for (i64 k = begin + SOK_AHEAD; k < end + SOK_AHEAD && k < n; ++k)
        prefetch_source(item_row(items, k), dim);
    }
    const f32 divisor = combine_divisor(items.weights, begin, end, combiner);
    if (divisor == 0.0f) {
      SOK_FOR_EACH_COLUMN(c, dim) { to[c] = 0.0f; }
    } else if (end - begin == 1) {
      const T* __restrict__ from = item_row(items, begin);
      const f32 weight = item_weight(items, begin);
      if (weight == divisor) {
        SOK_FOR_EACH_COLUMN(c, dim) { to[c] = to_f32(from[c]); }
      } else if (divisor == 1.0f) {
        SOK_FOR_EACH_COLUMN(c, dim) { to[c] = weight * to_f32(from[c]); }
      } else {
        SOK_FOR_EACH_COLUMN(c, dim) { to[c] = weight * to_f32(from[c]) / divisor; }
      }
    } else {
      SOK_FOR_EACH_COLUMN(block, dim / kColumns) {
        sum_columns<true>(items, begin, end, divisor, block * kColumns, kColumns, to);
      }
      const i64 rest = dim % kColumns;
      if (rest) sum_columns<false>(items, begin, end, divisor, dim - rest, rest, to);
    }
  }
}

// Pools rows over ragged rows.
//
// source      (u, dim)           f32; u16 bits of f16 or bf16
// inverse     (n,)               item j reads source[inverse[j]]
// row_splits  (batch + 1,)
// weights     (n,)               may be null
// out         (batch, dim)  out
SOK_ROW_KERNEL(combine_f32)
(const f32* source, i64 dim, const i32* inverse, const i64* row_splits, const f32* weights,
 i64 combiner, f32* out, i64 batch) {
  sum_rows(Items<f32>{source, dim, nullptr, inverse, weights}, row_splits, combiner, out, batch);
}
SOK_EXPORT(combine_f32)
SOK_ROW_KERNEL(combine_f16)
(const u16* source, i64 dim, const i32* inverse, const i64* row_splits, const f32* weights,
 i64 combiner, f32* out, i64 batch) {
  sum_rows(Items<f16>{(const f16*)source, dim, nullptr, inverse, weights}, row_splits, combiner,
           out, batch);
}
SOK_EXPORT(combine_f16)
SOK_ROW_KERNEL(combine_bf16)
(const u16* source, i64 dim, const i32* inverse, const i64* row_splits, const f32* weights,
 i64 combiner, f32* out, i64 batch) {
  sum_rows(Items<bf16>{(const bf16*)source, dim, nullptr, inverse, weights}, row_splits, combiner,
           out, batch);
}
SOK_EXPORT(combine_bf16)

// The row of every item, and what the gradient of its row is multiplied by for it.
//
// item_rows     (n,)  out
// coefficients  (n,)  out  weight / divisor; null: not wanted
SOK_KERNEL(combine_items)
(const i64* row_splits, const f32* weights, i64 combiner, i32* item_rows, f32* coefficients,
 i64 batch) {
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

// Sums rows that belong to the same label, weighted or not.
//
// source   (m, dim)
// offsets  (num_groups + 1,)
// order    (n,)                    items of each label, ascending
// index    (n,)                    item j reads source[index[j]]; null: source[j]
// weights  (n,)                    may be null
// out      (num_groups, dim)  out
SOK_ROW_KERNEL(segment_sum)
(const f32* source, i64 dim, const i64* offsets, const i32* order, const i32* index,
 const f32* weights, f32* out, i64 num_groups) {
  sum_rows(Items<f32>{source, dim, order, index, weights}, offsets, COMBINE_SUM, out, num_groups);
}
SOK_EXPORT(segment_sum)

// Dot product in 8 interleaved parts, added in a fixed order: one vector instruction per 8 columns
// on the CPU.
template <class T>
SOK_DEVICE f32 dot_product(const f32* a, const T* b, i64 dim) {
  f32 part[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  i64 c = 0;
  for (; c + 8 <= dim; c += 8) {
    for (i64 i = 0; i < 8; ++i) part[i] += a[c + i] * to_f32(b[c + i]);
  }
  for (; c < dim; ++c) part[c & 7] += a[c] * to_f32(b[c]);
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

// The gradient by the weights: with d_j = out_grads[b] . source[inverse[j]] and the divisor D of
// row b, d_j for sum, (d_j - sum_k w_k d_k / D) / D for mean, d_j / D - w_j sum_k w_k d_k / D^3 for
// sqrtn.
//
// out_grads     (batch, dim)
// weight_grads  (n,)  out
template <class T>
SOK_DEVICE void weight_grads_of_rows(const f32* out_grads, const T* source, i64 dim,
                                     const i32* inverse, const i64* row_splits, const f32* weights,
                                     i64 combiner, f32* weight_grads, i64 batch) {
  SOK_FOR_EACH(b, batch) {
    const i64 begin = row_splits[b], end = row_splits[b + 1];
    const f32 divisor = combine_divisor(weights, begin, end, combiner);
    f32 sum = 0.0f;
    for (i64 j = begin; j < end; ++j) {
      weight_grads[j] =
          divisor == 0.0f
              ? 0.0f
              : dot_product(out_grads + b * dim, source + (i64)inverse[j] * dim, dim) / divisor;
      sum += weights[j] * weight_grads[j];
    }
    if (divisor == 0.0f || combiner == COMBINE_SUM) continue;
    for (i64 j = begin; j < end; ++j) {
      weight_grads[j] -=
          combiner == COMBINE_MEAN ? sum / divisor : weights[j] * (sum / (divisor * divisor));
    }
  }
}

SOK_KERNEL(combine_weight_grad_f32)
(const f32* out_grads, const f32* source, i64 dim, const i32* inverse, const i64* row_splits,
 const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(out_grads, source, dim, inverse, row_splits, weights, combiner, weight_grads,
                       batch);
}
SOK_EXPORT(combine_weight_grad_f32)
SOK_KERNEL(combine_weight_grad_f16)
(const f32* out_grads, const u16* source, i64 dim, const i32* inverse, const i64* row_splits,
 const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(out_grads, (const f16*)source, dim, inverse, row_splits, weights, combiner,
                       weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_f16)
SOK_KERNEL(combine_weight_grad_bf16)
(const f32* out_grads, const u16* source, i64 dim, const i32* inverse, const i64* row_splits,
 const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(out_grads, (const bf16*)source, dim, inverse, row_splits, weights, combiner,
                       weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_bf16)
