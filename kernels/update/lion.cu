// Lion. frame.cuh says what the parameters are.
#include "update/frame.cuh"

struct LionRule {
  f32 lr, decay, beta_1, one_minus_beta_1, beta_2, one_minus_beta_2;
};
SOK_DEVICE f32 update_element(const LionRule& rule, f32 w, f32 g, f32& m) {
  const f32 mixed = m * rule.beta_1 + g * rule.one_minus_beta_1;
  // What is left is 0 or a NaN, which stays one.
  const f32 sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;
  m = m * rule.beta_2 + g * rule.one_minus_beta_2;
  return decayed(w, rule.decay) - rule.lr * sign;
}

// Steps of one size, in the direction of a mean.
#define SOK_UPDATE_LION(T)                                                                       \
  SOK_ROW_KERNEL(update_lion_##T)                                                                \
  (const SokShare share, const u64* values, const u64* ms, i64 shift, i64 dim, const u32* rows,  \
   const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, \
   f32 beta_1, f32 one_minus_beta_1, f32 beta_2, f32 one_minus_beta_2, i64 n) {                  \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};     \
    LionRule rule{lr, decay, beta_1, one_minus_beta_1, beta_2, one_minus_beta_2};                \
    update_rows<T>(rule, batch, ms);                                                             \
  }                                                                                              \
  SOK_EXPORT(update_lion_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_LION)
