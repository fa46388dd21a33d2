// Momentum with a sparse group lasso. frame.cuh says what the parameters are, group.cuh what it is.
#include "update/group.cuh"

// The penalties are multiplied by lr. The divisor is 1.
template <bool kNesterov>
struct GroupMomentumRule {
  f32 lr, decay, momentum, l1, l2, l21;
};
template <bool kNesterov>
SOK_DEVICE void learn(const GroupMomentumRule<kNesterov>& rule, f32 w, f32 g, f32& z, f32& m) {
  m = m * rule.momentum - g * rule.lr;
  const f32 step = kNesterov ? m * rule.momentum - g * rule.lr : m;
  z = descended(z, -step, w, rule.decay, 1.0f, 1.0f);
}
template <bool kNesterov>
SOK_DEVICE f32 value_of(const GroupMomentumRule<kNesterov>& rule, f32 left, f32, f32) {
  return left / (1.0f + 2.0f * rule.l2);
}

#define SOK_UPDATE_GROUP_MOMENTUM(T)                                                             \
  SOK_ROW_KERNEL(update_group_momentum_##T)                                                      \
  (const SokShare share, const u64* values, const u64* linears, const u64* momentums, i64 shift, \
   i64 dim, const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed,    \
   i64 step, f32 lr, f32 decay, f32 momentum, i64 nesterov, f32 l1, f32 l2, f32 l21, i64 n) {    \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};     \
    if (nesterov)                                                                                \
      update_group_rows<T>(GroupMomentumRule<true>{lr, decay, momentum, l1, l2, l21}, batch,     \
                           linears, momentums);                                                  \
    else                                                                                         \
      update_group_rows<T>(GroupMomentumRule<false>{lr, decay, momentum, l1, l2, l21}, batch,    \
                           linears, momentums);                                                  \
  }                                                                                              \
  SOK_EXPORT(update_group_momentum_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_GROUP_MOMENTUM)
