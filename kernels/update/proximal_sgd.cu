// Proximal gradient descent. frame.cuh says what the parameters are.
#include "update/frame.cuh"
#include "update/shrink.cuh"

struct ProximalSgdRule {
  f32 lr, decay, l1, l2;
};
SOK_DEVICE f32 update_element(const ProximalSgdRule& rule, f32 w, f32 g) {
  return shrunk(decayed(w, rule.decay) - rule.lr * g, rule.lr, rule.l1, rule.l2);
}

// w -= lr g, and a step towards 0.
#define SOK_UPDATE_PROXIMAL_SGD(T)                                                                 \
  SOK_ROW_KERNEL(update_proximal_sgd_##T)                                                          \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, const f32* grads, \
   i64* num_nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, f32 l1, f32 l2,     \
   i64 n) {                                                                                        \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};       \
    update_rows<T>(ProximalSgdRule{lr, decay, l1, l2}, batch);                                     \
  }                                                                                                \
  SOK_EXPORT(update_proximal_sgd_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_PROXIMAL_SGD)
