// Stochastic gradient descent. frame.cuh says what the parameters are.
#include "update/frame.cuh"

struct SgdRule {
  f32 lr, decay;
};
SOK_DEVICE f32 update_element(const SgdRule& rule, f32 w, f32 g) {
  return decayed(w, rule.decay) - g * rule.lr;
}

// w -= lr * g
#define SOK_UPDATE_SGD(T)                                                                          \
  SOK_ROW_KERNEL(update_sgd_##T)                                                                   \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, const f32* grads, \
   i64* num_nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, i64 n) {            \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};       \
    update_rows<T>(SgdRule{lr, decay}, batch);                                                     \
  }                                                                                                \
  SOK_EXPORT(update_sgd_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_SGD)
