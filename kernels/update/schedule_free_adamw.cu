// Schedule-free AdamW. frame.cuh says what the parameters are.
#include "update/frame.cuh"

// correction_2 is 1 - beta_2^t, weight 1 / t. The decay is own_decay: z needs the value before it,
// so that what frame.cuh may take out of a rule, `decay`, is 0.
struct ScheduleFreeAdamWRule {
  f32 lr, own_decay, beta_1, one_minus_beta_2, epsilon, correction_2, weight;
  f32 decay = 0.0f;
};
SOK_DEVICE f32 update_element(const ScheduleFreeAdamWRule& rule, f32 w, f32 g, f32& ahead, f32& v) {
  const f32 z = w + ahead;
  w = decayed(w, rule.own_decay);
  v += (g * g - v) * rule.one_minus_beta_2;
  const f32 new_z = z - rule.lr * g / (sok_sqrt(v / rule.correction_2) + rule.epsilon);
  const f32 x = (w - (1.0f - rule.beta_1) * new_z) / rule.beta_1;
  const f32 new_x = (1.0f - rule.weight) * x + rule.weight * new_z;
  const f32 new_w = (1.0f - rule.beta_1) * new_z + rule.beta_1 * new_x;
  ahead = new_z - new_w;
  return new_w;
}

// AdamW on averages in place of a schedule (Defazio et al., "The Road Less Scheduled", 2024).
#define SOK_UPDATE_SCHEDULE_FREE_ADAMW(T)                                                          \
  SOK_ROW_KERNEL(update_schedule_free_adamw_##T)                                                   \
  (const SokShare share, const u64* values, const u64* aheads, const u64* vs, i64 shift, i64 dim,  \
   const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, i64 seed, i64 step,     \
   f32 lr, f32 decay, f32 beta_1, f32 one_minus_beta_2, f32 epsilon, f32 correction_2, f32 weight, \
   i64 n) {                                                                                        \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};       \
    ScheduleFreeAdamWRule rule{                                                                    \
        lr, decay, beta_1, one_minus_beta_2, epsilon, correction_2, weight};                       \
    update_rows<T>(rule, batch, aheads, vs);                                                       \
  }                                                                                                \
  SOK_EXPORT(update_schedule_free_adamw_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_SCHEDULE_FREE_ADAMW)
