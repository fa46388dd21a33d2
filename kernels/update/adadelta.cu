// Adadelta. frame.cuh says what the parameters are.
#include "update/frame.cuh"

struct AdadeltaRule {
  f32 lr, decay, rho, one_minus_rho, epsilon;
};
SOK_DEVICE f32 update_element(const AdadeltaRule& rule, f32 w, f32 g, f32& accumulator,
                              f32& delta_accumulator) {
  accumulator = rule.rho * accumulator + rule.one_minus_rho * (g * g);
  const f32 delta =
      g * (sok_sqrt(delta_accumulator + rule.epsilon) / sok_sqrt(accumulator + rule.epsilon));
  delta_accumulator = rule.rho * delta_accumulator + rule.one_minus_rho * (delta * delta);
  return decayed(w, rule.decay) - rule.lr * delta;
}

// Steps of the size that steps had, over gradients of the size that gradients had.
#define SOK_UPDATE_ADADELTA(T)                                                                \
  SOK_ROW_KERNEL(update_adadelta_##T)                                                         \
  (const SokShare share, const u64* values, const u64* accumulators,                          \
   const u64* delta_accumulators, i64 shift, i64 dim, const u32* rows, const f32* grads,      \
   i64* num_nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, f32 rho,       \
   f32 one_minus_rho, f32 epsilon, i64 n) {                                                   \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};  \
    update_rows<T>(AdadeltaRule{lr, decay, rho, one_minus_rho, epsilon}, batch, accumulators, \
                   delta_accumulators);                                                       \
  }                                                                                           \
  SOK_EXPORT(update_adadelta_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_ADADELTA)
