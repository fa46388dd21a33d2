// Adagrad with dual averaging. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// l1, l2 are multiplied with the number of the step.
struct AdagradDaRule {
  f32 lr, decay, l1, l2;
};
SOK_DEVICE f32 update_element(const AdagradDaRule& rule, f32, f32 g, f32& gradient_accumulator,
                              f32& gradient_squared_accumulator) {
  gradient_accumulator += g;
  gradient_squared_accumulator += g * g;
  const f32 sum = gradient_accumulator;
  const f32 size = (sum < 0.0f ? -sum : sum) - rule.l1;
  // A NaN stays one.
  const f32 left = size < 0.0f ? 0.0f : size;
  const f32 divisor = rule.l2 * rule.lr + sok_sqrt(gradient_squared_accumulator);
  return rule.lr * (sum < 0.0f ? left : -left) / divisor;
}

// A row follows from the sums of its gradients alone, whatever it was before.
#define SOK_UPDATE_ADAGRAD_DA(T)                                                                 \
  SOK_ROW_KERNEL(update_adagrad_da_##T)                                                          \
  (const SokShare share, const u64* values, const u64* gradient_accumulators,                    \
   const u64* gradient_squared_accumulators, i64 shift, i64 dim, const u32* rows,                \
   const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, \
   f32 l1, f32 l2, i64 n) {                                                                      \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};     \
    update_rows<T>(AdagradDaRule{lr, decay, l1, l2}, batch, gradient_accumulators,               \
                   gradient_squared_accumulators);                                               \
  }                                                                                              \
  SOK_EXPORT(update_adagrad_da_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_ADAGRAD_DA)
