// Adagrad with one accumulator for a row. frame.cuh says what the parameters are; the column of
// accumulators has one element for each row.
#include "update/frame.cuh"
#include "update/row_sums.cuh"

struct RowwiseAdagradRule {
  f32 lr, decay;
  RootEpsilon epsilon;
};

template <class T>
SOK_DEVICE void update_rows_by_mean(const RowwiseAdagradRule rule, const Batch batch,
                                    const u64* accumulators) {
  typedef typename Format<T>::Element Element;
  const SokShare share = batch.share;
  const i64 shift = batch.shift, dim = batch.dim, n = batch.n;
  const auto& gradients = gradients_of(T(), batch);
  i64 nonfinite = 0;
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim) {
    if (SOK_AHEAD > 0 && r + SOK_AHEAD < n) {
      const u32 ahead = batch.rows[r + SOK_AHEAD];
      sok_prefetch_row<Element>(batch.values, shift, dim, ahead);
      sok_prefetch_row<f32>(accumulators, shift, 1, ahead);
    }
    const u32 row = batch.rows[r];
    if (row == SOK_NO_ROW) continue;
    const auto gradient = gradient_of(gradients, r);
    // One lane reads and writes it; the others are told the sum.
    f32* accumulator = sok_row<f32>(accumulators, shift, 1, row);
    const f64 old = sok_sum_of_row(r_lanes, SOK_IS_FIRST_WORD(r) ? (f64)*accumulator : 0.0);
    const f64 squares = sum_of_squares(r_lanes, dim, [&](i64 c) { return (f64)gradient[c]; });
    const f32 sum = (f32)old + (f32)(squares / (f64)dim);
    if (SOK_IS_FIRST_WORD(r)) *accumulator = sum;

    const f32 root = root_with_epsilon(sum, rule.epsilon);
    const auto rounding = rounding_of_row(T(), batch, r);
    Element* w = sok_row<Element>(batch.values, shift, dim, row);
    u32 largest = 0;
    SOK_FOR_EACH_WORD(c, r_lanes, dim) {
      const f32 g = gradient[c];
      const u32 bits = sok_f32_bits(g) & 0x7FFFFFFFu;
      largest = bits > largest ? bits : largest;
      store_rounded(rounding, (u32)c, decayed(to_f32(w[c]), rule.decay) - rule.lr * g / root,
                    w + c);
    }
    nonfinite += sok_is_of_row(r_lanes, largest >= 0x7F800000u);
  }
  sok_count(batch.num_nonfinite, nonfinite);
}

// accumulator += mean(g^2); w -= lr g / sqrt(accumulator + epsilon), or / (sqrt(accumulator) +
// epsilon).
#define SOK_UPDATE_ROWWISE_ADAGRAD(T)                                                          \
  SOK_ROW_KERNEL(update_rowwise_adagrad_##T)                                                   \
  (const SokShare share, const u64* values, const u64* accumulators, i64 shift, i64 dim,       \
   const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step, \
   f32 lr, f32 decay, f32 epsilon, i64 epsilon_inside_root, i64 n) {                           \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};   \
    RowwiseAdagradRule rule{lr, decay, root_epsilon(epsilon, epsilon_inside_root)};            \
    update_rows_by_mean<T>(rule, batch, accumulators);                                         \
  }                                                                                            \
  SOK_EXPORT(update_rowwise_adagrad_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_ROWWISE_ADAGRAD)
