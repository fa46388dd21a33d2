// Adagrad. frame.cuh says what the parameters are.
#include "update/frame.cuh"

struct AdagradRule {
  f32 lr, decay;
  RootEpsilon epsilon;
};
SOK_DEVICE f32 update_element(const AdagradRule& rule, f32 w, f32 g, f32& accumulator) {
  accumulator += g * g;
  return decayed(w, rule.decay) - rule.lr * g / root_with_epsilon(accumulator, rule.epsilon);
}

// accumulator += g^2; w -= lr g / sqrt(accumulator + epsilon), or / (sqrt(accumulator) + epsilon).
#define SOK_UPDATE_ADAGRAD(T)                                                                  \
  SOK_ROW_KERNEL(update_adagrad_##T)                                                           \
  (const SokShare share, const u64* values, const u64* accumulators, i64 shift, i64 dim,       \
   const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step, \
   f32 lr, f32 decay, f32 epsilon, i64 epsilon_inside_root, i64 n) {                           \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};   \
    AdagradRule rule{lr, decay, root_epsilon(epsilon, epsilon_inside_root)};                   \
    update_rows<T>(rule, batch, accumulators);                                                 \
  }                                                                                            \
  SOK_EXPORT(update_adagrad_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_ADAGRAD)
