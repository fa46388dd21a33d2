// Nadam. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// of_m, of_g: what the mean and the gradient count in this step; correction_2 is 1 - beta_2^t.
struct NadamRule {
  f32 lr, decay, one_minus_beta_1, one_minus_beta_2, epsilon, of_m, of_g, correction_2;
};
SOK_DEVICE f32 update_element(const NadamRule& rule, f32 w, f32 g, f32& m, f32& v) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  const f32 ahead = rule.of_m * m + rule.of_g * g;
  return decayed(w, rule.decay) -
         ahead * rule.lr / (sok_sqrt(v / rule.correction_2) + rule.epsilon);
}

// Adam with Nesterov's momentum.
#define SOK_UPDATE_NADAM(T)                                                                        \
  SOK_ROW_KERNEL(update_nadam_##T)                                                                 \
  (const SokShare share, const u64* values, const u64* ms, const u64* vs, i64 shift, i64 dim,      \
   const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step,     \
   f32 lr, f32 decay, f32 one_minus_beta_1, f32 one_minus_beta_2, f32 epsilon, f32 of_m, f32 of_g, \
   f32 correction_2, i64 n) {                                                                      \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};       \
    NadamRule rule{lr,   decay, one_minus_beta_1, one_minus_beta_2, epsilon,                       \
                   of_m, of_g,  correction_2};                                                     \
    update_rows<T>(rule, batch, ms, vs);                                                           \
  }                                                                                                \
  SOK_EXPORT(update_nadam_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_NADAM)
