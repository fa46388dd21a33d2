// The step of rules that set whole rows to exactly 0: the sparse group lasso, a row being a group.
//
// Such a rule keeps z in a state `linear`, and a row is a function of z and of the rule's divisor:
//
//   s   = clip(z, -l1, l1) - z
//   row = s * max(1 - l21 * sqrt(dim) / ||s||, 0) / divisor
//
// It is the x that makes z x + divisor x^2 / 2 + l1 |x| + l21 sqrt(dim) ||x|| least (Yue et al.,
// "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction", ECML PKDD
// 2021, Algorithm 1); l2 is in the divisor. A row at 0 keeps its states, and comes back when the
// gradients have made z large enough.
//
// A row has no more than one of these kernels' lanes for each column, and a lane the same columns
// in every pass over the row: it reads what it has written itself.
#pragma once
#include "update/frame.cuh"
#include "update/row_sums.cuh"

// A rule has members decay, l1 and l21, and these functions; `states` are those but for z:
//
//   learn(rule, w, g, z, states...)       changes z and the states; w is the row after its decay
//   value_of(rule, left, w, states...)    the new value; left is what the penalties leave of s
//   rule_of_row(rule, lanes, dim, w, gradient, states...)
//                                         the rule for a row, where something of all columns is in
//                                         it; else this one:
template <class T, class Rule, class Gradient, class... State>
SOK_DEVICE const Rule& rule_of_row(const Rule& rule, const SokLanes&, i64, const T*,
                                   const Gradient&, const State*...) {
  return rule;
}

// z where a row without penalties is -z / divisor: it loses step / divisor, exactly.
//
// Before a row's first update z is 0 and the row is any, so the row counts with the whole divisor:
// z = step - divisor * w. Else z is 0 only where the row is 0 too, and then it does not matter
// with how much it counts; so that z is 0 tells a first update, whatever the step.
SOK_DEVICE f32 descended(f32 z, f32 step, f32 w, f32 decay, f32 divisor, f32 old_divisor) {
  // Without branches, also for the decay: a compiler would not vectorize a loop as long as this.
  const f32 old = old_divisor * (z == 0.0f ? 0.0f : 1.0f);
  const f32 decayed_w = w - w * decay;
  return z + (step - (divisor - old) * decayed_w + old * (w - decayed_w));
}

// s of a column.
SOK_DEVICE f32 above_l1(f32 z, f32 l1) {
  const f32 below = l1 < z ? l1 : z;  // in this order a minimum of one instruction; a NaN stays one
  const f32 clipped = -l1 > below ? -l1 : below;
  return clipped - z;
}

// The Euclidean norm of a row, of what each column is.
template <class Column>
SOK_DEVICE f64 norm_of_row(const SokLanes& lanes, i64 dim, const Column& column) {
  return sok_sqrt(sum_of_squares(lanes, dim, column));
}

// max(1 - l21 * sqrt(dim) / ||s||, 0). Without l21 it is 1, where ||s|| is 0 as well.
SOK_DEVICE f32 left_of_group(const SokLanes& lanes, i64 dim, f32 l1, f32 l21, const f32* z) {
  if (l21 == 0.0f) return 1.0f;
  const f64 norm = norm_of_row(lanes, dim, [&](i64 c) { return (f64)above_l1(z[c], l1); });
  const f64 least = (f64)l21 * sok_sqrt((f64)dim);
  return norm <= least ? 0.0f : (f32)(1.0 - least / norm);  // a NaN stays one
}

template <class T, class Rule, class Rounding, class Gradient, class... State>
SOK_DEVICE u32 update_group_row(const Rule& rule_of_all, const Rounding rounding,
                                const SokLanes& lanes, i64 dim, T* __restrict__ w,
                                const Gradient gradient, f32* __restrict__ z,
                                State* __restrict__... states) {
  const Rule rule = rule_of_row(rule_of_all, lanes, dim, w, gradient, states...);
  u32 largest = 0;
  SOK_FOR_EACH_WORD(c, lanes, dim) {
    const f32 g = gradient[c];
    const u32 bits = sok_f32_bits(g) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
    learn(rule, to_f32(w[c]), g, z[c], states[c]...);
  }
  const f32 kept = left_of_group(lanes, dim, rule.l1, rule.l21, z);
  SOK_FOR_EACH_WORD(c, lanes, dim) {
    const f32 left = kept == 0.0f ? 0.0f : kept * above_l1(z[c], rule.l1);
    store_rounded(rounding, (u32)c, value_of(rule, left, to_f32(w[c]), states[c]...), w + c);
  }
  return largest;
}

// The loop over rows; frame.cuh says what is in a batch. `zs` and `states` are chunk addresses.
template <class T, class Rule, class... Chunks>
SOK_DEVICE void update_group_rows(const Rule rule, const Batch batch, const u64* zs,
                                  Chunks... states) {
  typedef typename Format<T>::Element Element;
  const SokShare share = batch.share;
  const i64 shift = batch.shift, dim = batch.dim, n = batch.n;
  constexpr i64 kAhead = SOK_AHEAD / 2;
  const auto& gradients = gradients_of(T(), batch);
  i64 nonfinite = 0;
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim) {
    if (SOK_AHEAD > 0 && r + kAhead < n) {
      const u32 ahead = batch.rows[r + kAhead];
      sok_prefetch_row<Element>(batch.values, shift, dim, ahead);
      sok_prefetch_row<f32>(zs, shift, dim, ahead);
      (sok_prefetch_row<f32>(states, shift, dim, ahead), ...);
    }
    const u32 row = batch.rows[r];
    if (row == SOK_NO_ROW) continue;
    const u32 largest = update_group_row(
        rule, rounding_of_row(T(), batch, r), r_lanes, dim,
        sok_row<Element>(batch.values, shift, dim, row), gradient_of(gradients, r),
        sok_row<f32>(zs, shift, dim, row), sok_row<f32>(states, shift, dim, row)...);
    nonfinite += sok_is_of_row(r_lanes, largest >= 0x7F800000u);
  }
  sok_count(batch.num_nonfinite, nonfinite);
}
