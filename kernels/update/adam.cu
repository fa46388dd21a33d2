// Adam and AMSGrad. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// alpha is lr * sqrt(1 - beta_2^t) / (1 - beta_1^t).
struct AdamRule {
  f32 alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon;
};
SOK_DEVICE f32 update_element(const AdamRule& rule, f32 w, f32 g, f32& m, f32& v) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  return decayed(w, rule.decay) - m * rule.alpha / (sok_sqrt(v) + rule.epsilon);
}

// Of beta_1 = 0: m is the gradient, and no row has it.
struct NoMomentumRule : AdamRule {};
SOK_DEVICE f32 update_element(const NoMomentumRule& rule, f32 w, f32 g, f32& v) {
  v += (g * g - v) * rule.one_minus_beta_2;
  return decayed(w, rule.decay) - g * rule.alpha / (sok_sqrt(v) + rule.epsilon);
}

struct AmsgradRule : AdamRule {};
SOK_DEVICE f32 update_element(const AmsgradRule& rule, f32 w, f32 g, f32& m, f32& v, f32& vhat) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  vhat = vhat > v ? vhat : v;
  return decayed(w, rule.decay) - m * rule.alpha / (sok_sqrt(vhat) + rule.epsilon);
}

// Adam; without a column ms, of beta_1 = 0; with a column vhats, AMSGrad. `alpha` carries the
// learning rate and the bias correction.
#define SOK_UPDATE_ADAM(T)                                                                     \
  SOK_ROW_KERNEL(update_adam_##T)                                                              \
  (const SokShare share, const u64* values, const u64* ms, const u64* vs, const u64* vhats,    \
   i64 shift, i64 dim, const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, \
   i64 seed, i64 step, f32 alpha, f32 decay, f32 one_minus_beta_1, f32 one_minus_beta_2,       \
   f32 epsilon, i64 n) {                                                                       \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};   \
    AdamRule adam{alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon};                  \
    if (!ms)                                                                                   \
      update_rows<T>(NoMomentumRule{adam}, batch, vs);                                         \
    else if (vhats)                                                                            \
      update_rows<T>(AmsgradRule{adam}, batch, ms, vs, vhats);                                 \
    else                                                                                       \
      update_rows<T>(adam, batch, ms, vs);                                                     \
  }                                                                                            \
  SOK_EXPORT(update_adam_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_ADAM)
