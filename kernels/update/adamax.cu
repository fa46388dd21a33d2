// Adamax. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// rate is lr / (1 - beta_1^t).
struct AdamaxRule {
  f32 rate, decay, one_minus_beta_1, beta_2, epsilon;
};
SOK_DEVICE f32 update_element(const AdamaxRule& rule, f32 w, f32 g, f32& m, f32& v) {
  m += (g - m) * rule.one_minus_beta_1;
  const f32 kept = rule.beta_2 * v, size = g < 0.0f ? -g : g;
  // A NaN of the gradient stays one.
  v = kept > size ? kept : size;
  return decayed(w, rule.decay) - rule.rate * (m / (v + rule.epsilon));
}

// Adam with the largest gradient, as it fades, in place of the root of a mean of squares.
#define SOK_UPDATE_ADAMAX(T)                                                                   \
  SOK_ROW_KERNEL(update_adamax_##T)                                                            \
  (const SokShare share, const u64* values, const u64* ms, const u64* vs, i64 shift, i64 dim,  \
   const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step, \
   f32 rate, f32 decay, f32 one_minus_beta_1, f32 beta_2, f32 epsilon, i64 n) {                \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};   \
    update_rows<T>(AdamaxRule{rate, decay, one_minus_beta_1, beta_2, epsilon}, batch, ms, vs); \
  }                                                                                            \
  SOK_EXPORT(update_adamax_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_ADAMAX)
