// Proximal Adagrad. frame.cuh says what the parameters are.
#include "update/frame.cuh"
#include "update/shrink.cuh"

struct ProximalAdagradRule {
  f32 lr, decay, l1, l2;
};
SOK_DEVICE f32 update_element(const ProximalAdagradRule& rule, f32 w, f32 g, f32& accumulator) {
  accumulator += g * g;
  const f32 lr = rule.lr / sok_sqrt(accumulator);
  return shrunk(decayed(w, rule.decay) - lr * g, lr, rule.l1, rule.l2);
}

// Adagrad's step, and one towards 0 of the same learning rate.
#define SOK_UPDATE_PROXIMAL_ADAGRAD(T)                                                         \
  SOK_ROW_KERNEL(update_proximal_adagrad_##T)                                                  \
  (const SokShare share, const u64* values, const u64* accumulators, i64 shift, i64 dim,       \
   const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step, \
   f32 lr, f32 decay, f32 l1, f32 l2, i64 n) {                                                 \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};   \
    update_rows<T>(ProximalAdagradRule{lr, decay, l1, l2}, batch, accumulators);               \
  }                                                                                            \
  SOK_EXPORT(update_proximal_adagrad_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_PROXIMAL_ADAGRAD)
