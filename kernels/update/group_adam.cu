// Adam with a sparse group lasso. frame.cuh says what the parameters are, group.cuh what it is.
#include "update/group.cuh"

// alpha is lr * sqrt(1 - beta_2^t) / (1 - beta_1^t); the penalties are multiplied by lr.
struct GroupAdamRule {
  f32 alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon, l1, l2, l21;
};
SOK_DEVICE void learn(const GroupAdamRule& rule, f32 w, f32 g, f32& z, f32& m, f32& v) {
  const f32 old_divisor = sok_sqrt(v) + rule.epsilon;
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  z = descended(z, m * rule.alpha, w, rule.decay, sok_sqrt(v) + rule.epsilon, old_divisor);
}
SOK_DEVICE f32 value_of(const GroupAdamRule& rule, f32 left, f32, f32, f32 v) {
  return left / (sok_sqrt(v) + rule.epsilon + 2.0f * rule.l2);
}

#define SOK_UPDATE_GROUP_ADAM(T)                                                                \
  SOK_ROW_KERNEL(update_group_adam_##T)                                                         \
  (const SokShare share, const u64* values, const u64* linears, const u64* ms, const u64* vs,   \
   i64 shift, i64 dim, const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys,  \
   i64 seed, i64 step, f32 alpha, f32 decay, f32 one_minus_beta_1, f32 one_minus_beta_2,        \
   f32 epsilon, f32 l1, f32 l2, f32 l21, i64 n) {                                               \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};    \
    GroupAdamRule rule{alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon, l1, l2, l21}; \
    update_group_rows<T>(rule, batch, linears, ms, vs);                                         \
  }                                                                                             \
  SOK_EXPORT(update_group_adam_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_GROUP_ADAM)
