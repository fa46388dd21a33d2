// Sums of rows: in ascending order of the items, whatever the number of threads, so that a run
// repeats bit for bit; and in pieces, since an f32 to which ones are added one by one stops at
// 2^24.
#ifndef SOK_POOLING_CUH_
#define SOK_POOLING_CUH_

#include "rows.cuh"

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
  SOK_AT_A_TIME(4)
  for (const i64 stop = piece_end(k, end); k < stop; ++k) sum += term(k);
  if (k == end) return sum;
  f32 lost = 0.0f;
  while (k < end) {
    f32 piece = 0.0f;
    SOK_AT_A_TIME(4)
    for (const i64 stop = piece_end(k, end); k < stop; ++k) piece += term(k);
    add_piece(piece, &sum, &lost);
  }
  return sum + lost;
}

// combiner: what a weighted sum is divided by.
#define COMBINE_SUM 0    // 1
#define COMBINE_MEAN 1   // the sum of the weights
#define COMBINE_SQRTN 2  // the root of the sum of their squares

SOK_DEVICE f32 sum_of_squares(const f32* weights, i64 begin, i64 end, f32 scale) {
  return sum_terms(begin, end, [=](i64 j) { return (weights[j] * scale) * (weights[j] * scale); });
}

// The divisor of one row; where it is 0 (no items, or weights that cancel out) the result is zeros.
SOK_DEVICE f32 combine_divisor(const f32* weights, i64 begin, i64 end, i64 combiner) {
  if (combiner == COMBINE_SUM) return 1.0f;
  if (!weights) return combiner == COMBINE_MEAN ? (f32)(end - begin) : sok_sqrt((f32)(end - begin));
  if (combiner == COMBINE_MEAN) return sum_terms(begin, end, [=](i64 j) { return weights[j]; });
  const f32 squares = sum_of_squares(weights, begin, end, 1.0f);
  if (squares > 1e-30f && squares < 1e38f) return sok_sqrt(squares);
  // Too small or too large for an f32 to hold the squares, though not their root.
  const f32 scale = squares < 1.0f ? 0x1p96f : 0x1p-96f;
  return sok_sqrt(sum_of_squares(weights, begin, end, scale)) / scale;
}

// Asks for the row that an item reads, up to 512 bytes of it.
template <class T>
SOK_DEVICE void prefetch_source(const T* row, i64 dim) {
  i64 bytes = dim * (i64)sizeof(T);
  if (bytes > 512) bytes = 512;
  for (i64 b = 0; b < bytes; b += 64) sok_prefetch((const u8*)row + b);
}

// How many pieces a sum has, as far as the compiler knows.
enum NumPieces { kOnePiece, kSeveralPieces, kAnyPieces };

// The items of a sum: item k reads source[index[k]] and has weight weights[k]. The compiler knows
// whether there are weights: to ask for each item would take as long as to add it.
template <class T, bool kWeighted>
struct Items {
  static constexpr bool kMayLack = false;  // whether item_row can be null, which counts as zeros
  static constexpr NumPieces kPieces = kAnyPieces;
  static constexpr i64 kBatch = 1;  // how many are loaded before the first is added
  const T* source;
  i64 dim;
  const i32* index;
  const f32* weights;
};
template <class T, bool kWeighted>
SOK_DEVICE const T* item_row(const Items<T, kWeighted>& items, i64 k) {
  return items.source + (i64)items.index[k] * items.dim;
}
template <class T, bool kWeighted>
SOK_DEVICE f32 item_weight(const Items<T, kWeighted>& items, i64 k) {
  return kWeighted ? items.weights[k] : 1.0f;
}

// Items that are rows of a row store, by number; SOK_NO_ROW is null, and counts as zeros.
template <class T, bool kWeighted>
struct StoredItems {
  static constexpr bool kMayLack = true;
  static constexpr NumPieces kPieces = kAnyPieces;
  static constexpr i64 kBatch = 1;
  const u64* chunks;
  i64 shift, dim;
  const u32* rows;
  const f32* weights;
};
template <class T, bool kWeighted>
SOK_DEVICE const T* item_row_of(const StoredItems<T, kWeighted>& items, u32 row) {
  return row == SOK_NO_ROW ? nullptr : sok_row<T>(items.chunks, items.shift, items.dim, row);
}
template <class T, bool kWeighted>
SOK_DEVICE const T* item_row(const StoredItems<T, kWeighted>& items, i64 k) {
  return item_row_of(items, items.rows[k]);
}
template <class T, bool kWeighted>
SOK_DEVICE f32 item_weight(const StoredItems<T, kWeighted>& items, i64 k) {
  return kWeighted ? items.weights[k] : 1.0f;
}

// Sums columns of the items of a piece, kCount vectors from column `first` on.
template <class Vector, i64 kCount, class Items>
SOK_DEVICE void sum_piece(const Items& items, i64 begin, i64 end, i64 first, Vector* out) {
  constexpr i64 kWidth = sizeof(Vector) / sizeof(f32), kBatch = Items::kBatch;
  Vector sum[kCount] = {};
  i64 k = begin;
  if constexpr (kBatch > 1) {
    SOK_ONE_BY_ONE
    for (; k + kBatch <= end; k += kBatch) {
      decltype(item_row(items, k)) from[kBatch];
      f32 weights[kBatch];
      Vector columns[kBatch][kCount];
      for (i64 j = 0; j < kBatch; ++j) from[j] = item_row(items, k + j);
      for (i64 j = 0; j < kBatch; ++j) weights[j] = item_weight(items, k + j);
      for (i64 j = 0; j < kBatch; ++j)
        for (i64 i = 0; i < kCount; ++i)
          sok_load_columns(from[j] + first + i * kWidth, &columns[j][i]);
      for (i64 j = 0; j < kBatch; ++j)
        for (i64 i = 0; i < kCount; ++i) sum[i] = sum[i] + weights[j] * columns[j][i];
    }
  }
  SOK_ONE_BY_ONE
  for (; k < end; ++k) {
    const auto* __restrict__ from = item_row(items, k);
    const f32 weight = item_weight(items, k);
    for (i64 i = 0; i < kCount; ++i) {
      Vector columns = {};
      if (!Items::kMayLack || from) sok_load_columns(from + first + i * kWidth, &columns);
      sum[i] = sum[i] + weight * columns;
    }
  }
  for (i64 i = 0; i < kCount; ++i) out[i] = sum[i];
}

// Sums columns of the items of all pieces.
template <class Vector, i64 kCount, class Items>
SOK_DEVICE void sum_all_pieces(const Items& items, i64 begin, i64 end, i64 first, Vector* sum) {
  Vector lost[kCount] = {}, piece[kCount];
  for (i64 k = begin, stop; k < end; k = stop) {
    stop = piece_end(k, end);
    sum_piece<Vector, kCount>(items, k, stop, first, piece);
    for (i64 i = 0; i < kCount; ++i) add_piece(piece[i], sum + i, lost + i);
  }
  for (i64 i = 0; i < kCount; ++i) sum[i] = sum[i] + lost[i];
}

// Sums columns of all items and divides: those of one piece as `sum_piece` does.
template <class Vector, i64 kCount, class Items>
SOK_DEVICE void sum_columns(const Items& items, i64 begin, i64 end, f32 divisor, i64 first,
                            f32* out) {
  Vector sum[kCount] = {};
  if constexpr (Items::kPieces == kOnePiece) {
    sum_piece<Vector, kCount>(items, begin, end, first, sum);
  } else if constexpr (Items::kPieces == kSeveralPieces) {
    sum_all_pieces<Vector, kCount>(items, begin, end, first, sum);
  } else {
    if (end - begin <= kPiece)
      sum_piece<Vector, kCount>(items, begin, end, first, sum);
    else
      sum_all_pieces<Vector, kCount>(items, begin, end, first, sum);
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
template <Scale kScale, bool kMayLack, class T>
SOK_DEVICE void scale_columns(const T* from, i64 c, bool in_quads, f32 weight, f32 divisor,
                              f32* to) {
  if (in_quads) {
    SokVector columns = {};
    if (!kMayLack || from) sok_load_columns(from + 4 * c, &columns);
    sok_store_columns(scaled<kScale>(columns, weight, divisor), to + 4 * c);
  } else {
    to[c] = scaled<kScale>(!kMayLack || from ? to_f32(from[c]) : 0.0f, weight, divisor);
  }
}

// The same, where the keys of some items were missing: what they have got is known, and `rows` does
// not say it yet.
template <class T, bool kWeighted>
struct GivenItems {
  static constexpr bool kMayLack = true;
  static constexpr NumPieces kPieces = kAnyPieces;
  static constexpr i64 kBatch = 1;
  StoredItems<T, kWeighted> stored;
  NewRows<T> got;
  i64 dim;
  const f32* weights;
};
template <class T, bool kWeighted>
SOK_DEVICE const T* item_row(const GivenItems<T, kWeighted>& items, i64 k) {
  const i64 number = items.got.number[k];
  const u32 row = number < 0 ? items.stored.rows[k] : new_row(items.got, number);
  if (row != SOK_NO_ROW || number < 0 || !items.got.values) return item_row_of(items.stored, row);
  return items.got.values + number * items.dim;
}
template <class T, bool kWeighted>
SOK_DEVICE f32 item_weight(const GivenItems<T, kWeighted>& items, i64 k) {
  return item_weight(items.stored, k);
}

// Whether row splits of a row fit n items.
SOK_DEVICE bool splits_fit(i64 begin, i64 end, i64 b, i64 num_rows, i64 n) {
  return 0 <= begin && begin <= end && end <= n && (b > 0 || begin == 0) &&
         (b < num_rows - 1 || end == n);
}

// Whether the lanes of a row take four columns at a time.
template <class T>
SOK_DEVICE bool sums_quads(i64 dim, const T* source, const f32* out) {
  return sok_moves_quads(dim, source) && sok_moves_quads(dim, out);
}

// Sums all columns of all items and divides; see sum_group.
template <class Items>
SOK_DEVICE void sum_group_columns(const Items& items, i64 begin, i64 end, f32 divisor,
                                  bool in_quads, const SokLanes& lanes, f32* __restrict__ to) {
  (void)lanes;
  const i64 dim = items.dim;
  constexpr i64 kSmall = sizeof(SokSmallVector) / sizeof(f32);
  constexpr i64 kLarge = SOK_VECTORS * sizeof(SokVector) / sizeof(f32);
  const i64 in_vectors = SOK_VECTORS_LIE_ANYWHERE || in_quads ? dim : 0;
  const i64 small = in_vectors / kLarge * kLarge, single = in_vectors / kSmall * kSmall;
  SOK_FOR_EACH_WORD(i, lanes, small / kLarge) {
    sum_columns<SokVector, SOK_VECTORS>(items, begin, end, divisor, i * kLarge, to);
  }
  SOK_FOR_EACH_WORD(i, lanes, (single - small) / kSmall) {
    sum_columns<SokSmallVector, 1>(items, begin, end, divisor, small + i * kSmall, to);
  }
  SOK_FOR_EACH_WORD(i, lanes, dim - single) {
    sum_columns<f32, 1>(items, begin, end, divisor, single + i, to);
  }
}

// Sums the items of one group and divides as the combiner says.
//
// lanes     that do it together
// in_quads  see sums_quads
// to        (dim,)  out
template <class Items>
SOK_DEVICE void sum_group(const Items& items, i64 begin, i64 end, i64 combiner, bool in_quads,
                          const SokLanes& lanes, f32* __restrict__ to) {
  (void)lanes;
  const i64 dim = items.dim, words = in_quads ? dim / 4 : dim;
  const f32 divisor = combine_divisor(items.weights, begin, end, combiner);
  if (divisor == 0.0f) {
    SOK_FOR_EACH_WORD(c, lanes, dim) { to[c] = 0.0f; }
  } else if (end - begin == 1) {
    const auto* __restrict__ from = item_row(items, begin);
    const f32 weight = item_weight(items, begin);
    if (weight == divisor) {
      SOK_FOR_EACH_WORD(c, lanes, words) {
        scale_columns<kAsItIs, Items::kMayLack>(from, c, in_quads, weight, divisor, to);
      }
    } else if (divisor == 1.0f) {
      SOK_FOR_EACH_WORD(c, lanes, words) {
        scale_columns<kWeighted, Items::kMayLack>(from, c, in_quads, weight, divisor, to);
      }
    } else {
      SOK_FOR_EACH_WORD(c, lanes, words) {
        scale_columns<kDivided, Items::kMayLack>(from, c, in_quads, weight, divisor, to);
      }
    }
  } else {
    sum_group_columns(items, begin, end, divisor, in_quads, lanes, to);
  }
}

#endif  // SOK_POOLING_CUH_
