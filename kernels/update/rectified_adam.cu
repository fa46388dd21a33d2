// Rectified Adam. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// alpha carries learning rate, bias corrections and rectification; of_m and of_g are what the mean
// and the gradient count in the step. Where it leaves v out, of_root is 0 and epsilon 1.
struct RectifiedAdamRule {
  f32 alpha, decay, one_minus_beta_1, one_minus_beta_2, of_m, of_g, of_root, epsilon;
};
SOK_DEVICE f32 learned(const RectifiedAdamRule& rule, f32 w, f32 g, f32 m, f32 v) {
  const f32 step = (rule.of_m * m + rule.of_g * g) * rule.alpha;
  return decayed(w, rule.decay) - step / (rule.of_root * sok_sqrt(v) + rule.epsilon);
}
SOK_DEVICE f32 update_element(const RectifiedAdamRule& rule, f32 w, f32 g, f32& m, f32& v) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  return learned(rule, w, g, m, v);
}

struct RectifiedAmsgradRule : RectifiedAdamRule {};
SOK_DEVICE f32 update_element(const RectifiedAmsgradRule& rule, f32 w, f32 g, f32& m, f32& v,
                              f32& vhat) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  vhat = vhat > v ? vhat : v;
  return learned(rule, w, g, m, vhat);
}

// With a column vhats, its AMSGrad.
#define SOK_UPDATE_RECTIFIED_ADAM(T)                                                               \
  SOK_ROW_KERNEL(update_rectified_adam_##T)                                                        \
  (const SokShare share, const u64* values, const u64* ms, const u64* vs, const u64* vhats,        \
   i64 shift, i64 dim, const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys,     \
   i64 seed, i64 step, f32 alpha, f32 decay, f32 one_minus_beta_1, f32 one_minus_beta_2, f32 of_m, \
   f32 of_g, f32 of_root, f32 epsilon, i64 n) {                                                    \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};       \
    RectifiedAdamRule rule{alpha, decay, one_minus_beta_1, one_minus_beta_2,                       \
                           of_m,  of_g,  of_root,          epsilon};                               \
    if (vhats)                                                                                     \
      update_rows<T>(RectifiedAmsgradRule{rule}, batch, ms, vs, vhats);                            \
    else                                                                                           \
      update_rows<T>(rule, batch, ms, vs);                                                         \
  }                                                                                                \
  SOK_EXPORT(update_rectified_adam_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_RECTIFIED_ADAM)
