// Sums of rows: lookups pooled over ragged rows, and their gradients.
//
// forward: out[b] sums weights[j] * source[inverse[j]] over the items j of row b, and is divided by
// what the combiner says. backward: the gradient of source[u] sums coefficients[j] * out_grads[row
// of j] over the items j with inverse[j] == u.
//
// A sum goes over its items in ascending order, whatever the number of workers: a run repeats bit
// for bit. It goes in pieces: an f32 to which ones are added one by one stops at 2^24.
#include "platform.cuh"

// Items that are summed one by one.
constexpr i64 kPiece = 32;

// Where the piece ends that begins at item k.
SOK_DEVICE i64 piece_end(i64 k, i64 end) { return end - k < kPiece ? end : k + kPiece; }

// Adds a piece to a sum. What rounding takes from the sum is exact, and goes into the next piece:
// so the error does not grow with the number of pieces. Of an infinite sum it is a NaN, and
// forgotten.
template <class T>
SOK_DEVICE void add_piece(const T& piece, T* sum, T* lost) {
  const T old = *sum, next = piece + *lost, now = old + next, added = now - old;
  const T error = (old - (now - added)) + (next - added);
  *sum = now;
  *lost = sok_unless_nan(error);
}

// Sums term(k) over the items k of a row.
template <class Term>
SOK_DEVICE f32 sum_terms(i64 begin, i64 end, Term term) {
  if (end - begin == 1) return 0.0f + term(begin);  // most rows, and no loop to set up
  i64 k = begin;
  f32 sum = 0.0f;
  for (const i64 stop = piece_end(k, end); k < stop; ++k) sum += term(k);
  if (k == end) return sum;
  f32 lost = 0.0f;
  while (k < end) {
    f32 piece = 0.0f;
    for (const i64 stop = piece_end(k, end); k < stop; ++k) piece += term(k);
    add_piece(piece, &sum, &lost);
  }
  return sum + lost;
}

// combiner: what a weighted sum is divided by.
#define COMBINE_SUM 0    // 1
#define COMBINE_MEAN 1   // the sum of the weights
#define COMBINE_SQRTN 2  // the root of the sum of their squares

// The divisor of one row; where it is 0 (no items, or weights that cancel out) the result is zeros.
SOK_DEVICE f32 combine_divisor(const f32* weights, i64 begin, i64 end, i64 combiner) {
  if (combiner == COMBINE_SUM) return 1.0f;
  if (!weights) return combiner == COMBINE_MEAN ? (f32)(end - begin) : sok_sqrt((f32)(end - begin));
  if (combiner == COMBINE_MEAN) return sum_terms(begin, end, [=](i64 j) { return weights[j]; });
  return sok_sqrt(sum_terms(begin, end, [=](i64 j) { return weights[j] * weights[j]; }));
}

// Asks for the row that an item reads, up to 512 bytes of it.
template <class T>
SOK_DEVICE void prefetch_source(const T* row, i64 dim) {
  i64 bytes = dim * (i64)sizeof(T);
  if (bytes > 512) bytes = 512;
  for (i64 b = 0; b < bytes; b += 64) sok_prefetch((const u8*)row + b);
}

// The items of a sum: item k of a group is number order[k], reads source[index[number]] and has
// weight weights[number]. A list that is not there stands for k itself, source[number], 1. The
// compiler knows which are there: to ask for each item would take as long as to add it.
template <class T, bool kOrdered, bool kIndexed, bool kWeighted>
struct Items {
  const T* source;
  i64 dim;
  const i32* order;
  const i32* index;
  const f32* weights;
};
template <class T, bool kOrdered, bool kIndexed, bool kWeighted>
SOK_DEVICE const T* item_row(const Items<T, kOrdered, kIndexed, kWeighted>& items, i64 k) {
  const i64 number = kOrdered ? items.order[k] : k;
  return items.source + (kIndexed ? (i64)items.index[number] : number) * items.dim;
}
template <class T, bool kOrdered, bool kIndexed, bool kWeighted>
SOK_DEVICE f32 item_weight(const Items<T, kOrdered, kIndexed, kWeighted>& items, i64 k) {
  return kWeighted ? items.weights[kOrdered ? items.order[k] : k] : 1.0f;
}

// Sums columns of the items of a piece, kCount vectors from column `first` on.
template <class Vector, i64 kCount, class Items>
SOK_DEVICE void sum_piece(const Items& items, i64 begin, i64 end, i64 first, Vector* out) {
  constexpr i64 kWidth = sizeof(Vector) / sizeof(f32);
  Vector sum[kCount] = {};
  for (i64 k = begin; k < end; ++k) {
    const auto* __restrict__ from = item_row(items, k) + first;
    const f32 weight = item_weight(items, k);
    for (i64 i = 0; i < kCount; ++i) {
      Vector columns;
      sok_load_columns(from + i * kWidth, &columns);
      sum[i] = sum[i] + weight * columns;
    }
  }
  for (i64 i = 0; i < kCount; ++i) out[i] = sum[i];
}

// Sums columns of all items and divides: those of one piece as `sum_piece` does.
template <class Vector, i64 kCount, class Items>
SOK_DEVICE void sum_columns(const Items& items, i64 begin, i64 end, f32 divisor, i64 first,
                            f32* out) {
  Vector sum[kCount] = {};
  if (end - begin <= kPiece) {
    sum_piece<Vector, kCount>(items, begin, end, first, sum);
  } else {
    Vector lost[kCount] = {}, piece[kCount];
    for (i64 k = begin, stop; k < end; k = stop) {
      stop = piece_end(k, end);
      sum_piece<Vector, kCount>(items, k, stop, first, piece);
      for (i64 i = 0; i < kCount; ++i) add_piece(piece[i], sum + i, lost + i);
    }
    for (i64 i = 0; i < kCount; ++i) sum[i] = sum[i] + lost[i];
  }
  if (divisor != 1.0f) {
    for (i64 i = 0; i < kCount; ++i) sum[i] = sum[i] / divisor;
  }
  constexpr i64 kWidth = sizeof(Vector) / sizeof(f32);
  for (i64 i = 0; i < kCount; ++i) sok_store_columns(sum[i], out + first + i * kWidth);
}

// What an item alone contributes: itself, or weighted, or divided as well.
enum Scale { kAsItIs, kWeighted, kDivided };
template <Scale kScale, class X>
SOK_DEVICE X scaled(const X& x, f32 weight, f32 divisor) {
  if (kScale == kAsItIs) return x;
  return kScale == kWeighted ? weight * x : weight * x / divisor;
}
// The same of column c or, in quads, of four columns from 4 c on.
template <Scale kScale, class T>
SOK_DEVICE void scale_columns(const T* from, i64 c, bool in_quads, f32 weight, f32 divisor,
                              f32* to) {
  if (in_quads) {
    SokVector columns;
    sok_load_columns(from + 4 * c, &columns);
    sok_store_columns(scaled<kScale>(columns, weight, divisor), to + 4 * c);
  } else {
    to[c] = scaled<kScale>(to_f32(from[c]), weight, divisor);
  }
}

// Sums the items of every group and divides as the combiner says.
//
// offsets  (num_groups + 1,)     group g has the items offsets[g] to offsets[g + 1]
// out      (num_groups, dim)  out
template <class Items>
SOK_DEVICE void sum_rows(const SokShare share, const Items items, const i64* offsets, i64 combiner,
                         f32* out, i64 num_groups) {
  const i64 dim = items.dim, n = offsets[num_groups];
  const bool in_quads = sok_moves_quads(dim, items.source) && sok_moves_quads(dim, out);
  const i64 words = in_quads ? dim / 4 : dim;
  SOK_FOR_EACH_ROW_OF_WORDS(g, num_groups, words) {
    const i64 begin = offsets[g], end = offsets[g + 1];
    f32* __restrict__ to = out + g * dim;
    if (SOK_AHEAD > 0) {
      // Items of one group follow those of the one before it, so this runs ahead of the sums below.
      for (i64 k = begin + SOK_AHEAD; k < end + SOK_AHEAD && k < n; ++k)
        prefetch_source(item_row(items, k), dim);
    }
    const f32 divisor = combine_divisor(items.weights, begin, end, combiner);
    if (divisor == 0.0f) {
      SOK_FOR_EACH_WORD_OF_ROW(c, g, dim) { to[c] = 0.0f; }
    } else if (end - begin == 1) {
      const auto* __restrict__ from = item_row(items, begin);
      const f32 weight = item_weight(items, begin);
      if (weight == divisor) {
        SOK_FOR_EACH_WORD_OF_ROW(c, g, words) {
          scale_columns<kAsItIs>(from, c, in_quads, weight, divisor, to);
        }
      } else if (divisor == 1.0f) {
        SOK_FOR_EACH_WORD_OF_ROW(c, g, words) {
          scale_columns<kWeighted>(from, c, in_quads, weight, divisor, to);
        }
      } else {
        SOK_FOR_EACH_WORD_OF_ROW(c, g, words) {
          scale_columns<kDivided>(from, c, in_quads, weight, divisor, to);
        }
      }
    } else {
      constexpr i64 kSmall = sizeof(SokSmallVector) / sizeof(f32);
      constexpr i64 kLarge = SOK_VECTORS * sizeof(SokVector) / sizeof(f32);
      const i64 in_vectors = SOK_VECTORS_LIE_ANYWHERE || in_quads ? dim : 0;
      const i64 small = in_vectors / kLarge * kLarge, single = in_vectors / kSmall * kSmall;
      SOK_FOR_EACH_WORD_OF_ROW(i, g, small / kLarge) {
        sum_columns<SokVector, SOK_VECTORS>(items, begin, end, divisor, i * kLarge, to);
      }
      SOK_FOR_EACH_WORD_OF_ROW(i, g, (single - small) / kSmall) {
        sum_columns<SokSmallVector, 1>(items, begin, end, divisor, small + i * kSmall, to);
      }
      SOK_FOR_EACH_WORD_OF_ROW(i, g, dim - single) {
        sum_columns<f32, 1>(items, begin, end, divisor, single + i, to);
      }
    }
  }
}

// The same, with and without an index and weights, which come with an index.
template <bool kOrdered, class T>
SOK_DEVICE void sum_rows(const SokShare share, const T* source, i64 dim, const i32* order,
                         const i32* index, const f32* weights, const i64* offsets, i64 combiner,
                         f32* out, i64 num_groups) {
  if (index && weights)
    sum_rows(share, Items<T, kOrdered, true, true>{source, dim, order, index, weights}, offsets,
             combiner, out, num_groups);
  else if (index)
    sum_rows(share, Items<T, kOrdered, true, false>{source, dim, order, index, nullptr}, offsets,
             combiner, out, num_groups);
  else
    sum_rows(share, Items<T, kOrdered, false, false>{source, dim, order, nullptr, nullptr}, offsets,
             combiner, out, num_groups);
}

// Pools rows over ragged rows.
//
// source      (u, dim)           f32; u16 bits of f16 or bf16
// inverse     (n,)               item j reads source[inverse[j]]
// row_splits  (batch + 1,)
// weights     (n,)               may be null
// out         (batch, dim)  out
SOK_ROW_KERNEL(combine_f32)
(const SokShare share, const f32* source, i64 dim, const i32* inverse, const i64* row_splits,
 const f32* weights, i64 combiner, f32* out, i64 batch) {
  sum_rows<false>(share, source, dim, nullptr, inverse, weights, row_splits, combiner, out, batch);
}
SOK_EXPORT(combine_f32)
SOK_ROW_KERNEL(combine_f16)
(const SokShare share, const u16* source, i64 dim, const i32* inverse, const i64* row_splits,
 const f32* weights, i64 combiner, f32* out, i64 batch) {
  sum_rows<false>(share, (const f16*)source, dim, nullptr, inverse, weights, row_splits, combiner,
                  out, batch);
}
SOK_EXPORT(combine_f16)
SOK_ROW_KERNEL(combine_bf16)
(const SokShare share, const u16* source, i64 dim, const i32* inverse, const i64* row_splits,
 const f32* weights, i64 combiner, f32* out, i64 batch) {
  sum_rows<false>(share, (const bf16*)source, dim, nullptr, inverse, weights, row_splits, combiner,
                  out, batch);
}
SOK_EXPORT(combine_bf16)

// The row of every item, and what the gradient of its row is multiplied by for it.
//
// item_rows     (n,)  out
// coefficients  (n,)  out  weight / divisor; null: not wanted
SOK_KERNEL(combine_items)
(const SokShare share, const i64* row_splits, const f32* weights, i64 combiner, i32* item_rows,
 f32* coefficients, i64 batch) {
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
(const SokShare share, const f32* source, i64 dim, const i64* offsets, const i32* order,
 const i32* index, const f32* weights, f32* out, i64 num_groups) {
  sum_rows<true>(share, source, dim, order, index, weights, offsets, COMBINE_SUM, out, num_groups);
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
      weight_grads[j] =
          divisor == 0.0f
              ? 0.0f
              : dot_product(out_grads + b * dim, source + (i64)inverse[j] * dim, dim) / divisor;
    }
    if (divisor == 0.0f || combiner == COMBINE_SUM) continue;
    const f32 sum = sum_terms(begin, end, [=](i64 j) { return weights[j] * weight_grads[j]; });
    for (i64 j = begin; j < end; ++j) {
      weight_grads[j] -=
          combiner == COMBINE_MEAN ? sum / divisor : weights[j] * (sum / (divisor * divisor));
    }
  }
}

SOK_KERNEL(combine_weight_grad_f32)
(const SokShare share, const f32* out_grads, const f32* source, i64 dim, const i32* inverse,
 const i64* row_splits, const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(share, out_grads, source, dim, inverse, row_splits, weights, combiner,
                       weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_f32)
SOK_KERNEL(combine_weight_grad_f16)
(const SokShare share, const f32* out_grads, const u16* source, i64 dim, const i32* inverse,
 const i64* row_splits, const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(share, out_grads, (const f16*)source, dim, inverse, row_splits, weights,
                       combiner, weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_f16)
SOK_KERNEL(combine_weight_grad_bf16)
(const SokShare share, const f32* out_grads, const u16* source, i64 dim, const i32* inverse,
 const i64* row_splits, const f32* weights, i64 combiner, f32* weight_grads, i64 batch) {
  weight_grads_of_rows(share, out_grads, (const bf16*)source, dim, inverse, row_splits, weights,
                       combiner, weight_grads, batch);
}
SOK_EXPORT(combine_weight_grad_bf16)
