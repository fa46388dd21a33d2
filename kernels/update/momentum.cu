// Gradient descent with momentum, of Keras and of TF1. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// kLrInState: the state is a step that was already taken (Keras); else a sum of gradients (TF1).
template <bool kNesterov, bool kLrInState>
struct MomentumRule {
  f32 lr, decay, momentum;
};
template <bool kNesterov, bool kLrInState>
SOK_DEVICE f32 update_element(const MomentumRule<kNesterov, kLrInState>& rule, f32 w, f32 g,
                              f32& m) {
  w = decayed(w, rule.decay);
  if (kLrInState) {
    m = m * rule.momentum - g * rule.lr;
    return kNesterov ? w + (m * rule.momentum - g * rule.lr) : w + m;
  }
  m = m * rule.momentum + g;
  return kNesterov ? w - (g * rule.lr + m * rule.momentum * rule.lr) : w - m * rule.lr;
}

// Keras: m = momentum m - lr g; w += m, or with Nesterov w += momentum m - lr g.
// TF1:   m = momentum m + g; w -= lr m, or with Nesterov w -= lr g + lr momentum m.
#define SOK_UPDATE_MOMENTUM(T)                                                                 \
  SOK_ROW_KERNEL(update_momentum_##T)                                                          \
  (const SokShare share, const u64* values, const u64* momentums, i64 shift, i64 dim,          \
   const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step, \
   f32 lr, f32 decay, f32 momentum, i64 nesterov, i64 lr_in_state, i64 n) {                    \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};   \
    if (nesterov && lr_in_state)                                                               \
      update_rows<T>(MomentumRule<true, true>{lr, decay, momentum}, batch, momentums);         \
    else if (nesterov)                                                                         \
      update_rows<T>(MomentumRule<true, false>{lr, decay, momentum}, batch, momentums);        \
    else if (lr_in_state)                                                                      \
      update_rows<T>(MomentumRule<false, true>{lr, decay, momentum}, batch, momentums);        \
    else                                                                                       \
      update_rows<T>(MomentumRule<false, false>{lr, decay, momentum}, batch, momentums);       \
  }                                                                                            \
  SOK_EXPORT(update_momentum_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_MOMENTUM)
