// FTRL-proximal. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// kSquareRoot: power is 0.5, the usual case, which needs no pow.
template <bool kSquareRoot>
struct FtrlRule {
  // power is -learning_rate_power; l2 holds beta / (2 lr) too.
  f32 lr, decay, power, l1, l2, l2_shrinkage;
};
template <bool kSquareRoot>
SOK_DEVICE f32 update_element(const FtrlRule<kSquareRoot>& rule, f32 w, f32 g, f32& accumulator,
                              f32& linear) {
  w = decayed(w, rule.decay);
  f32 new_accumulator = accumulator + g * g;
  f32 old_root = kSquareRoot ? sok_sqrt(accumulator) : sok_pow(accumulator, rule.power);
  f32 new_root = kSquareRoot ? sok_sqrt(new_accumulator) : sok_pow(new_accumulator, rule.power);
  f32 shrunk = g + 2.0f * rule.l2_shrinkage * w;
  linear += shrunk - (new_root - old_root) / rule.lr * w;
  f32 quadratic = new_root / rule.lr + 2.0f * rule.l2;
  f32 clipped = linear > rule.l1 ? rule.l1 : (linear < -rule.l1 ? -rule.l1 : linear);
  accumulator = new_accumulator;
  return (clipped - linear) / quadratic;
}

// FTRL-proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013).
#define SOK_UPDATE_FTRL(T)                                                                         \
  SOK_ROW_KERNEL(update_ftrl_##T)                                                                  \
  (const SokShare share, const u64* values, const u64* accumulators, const u64* linears,           \
   i64 shift, i64 dim, const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys,     \
   i64 seed, i64 step, f32 lr, f32 decay, f32 power, f32 l1, f32 l2, f32 l2_shrinkage, i64 n) {    \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};       \
    if (power == 0.5f)                                                                             \
      update_rows<T>(FtrlRule<true>{lr, decay, power, l1, l2, l2_shrinkage}, batch, accumulators,  \
                     linears);                                                                     \
    else                                                                                           \
      update_rows<T>(FtrlRule<false>{lr, decay, power, l1, l2, l2_shrinkage}, batch, accumulators, \
                     linears);                                                                     \
  }                                                                                                \
  SOK_EXPORT(update_ftrl_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_FTRL)
