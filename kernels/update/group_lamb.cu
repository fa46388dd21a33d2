// LAMB by rows, with a sparse group lasso. frame.cuh says what the parameters are, group.cuh what
// it is.
#include "update/group.cuh"

// correction is sqrt(1 - beta_2^t) / (1 - beta_1^t); the penalties are multiplied by lr.
struct GroupLambRule {
  f32 lr, correction, decay, one_minus_beta_1, one_minus_beta_2, epsilon, l1, l2, l21;
  f32 ratio;  // of a row: its norm to that of its step
};
SOK_DEVICE f32 next_m(const GroupLambRule& rule, f32 g, f32 m) {
  return m + (g - m) * rule.one_minus_beta_1;
}
SOK_DEVICE f32 next_v(const GroupLambRule& rule, f32 g, f32 v) {
  return v + (g * g - v) * rule.one_minus_beta_2;
}
template <class T, class Gradient>
SOK_DEVICE GroupLambRule rule_of_row(const GroupLambRule& rule, const SokLanes& lanes, i64 dim,
                                     const T* w, const Gradient& gradient, const f32* m,
                                     const f32* v) {
  const f64 size =
      norm_of_row(lanes, dim, [&](i64 c) { return (f64)decayed(to_f32(w[c]), rule.decay); });
  const f64 step = norm_of_row(lanes, dim, [&](i64 c) {
    const f32 g = gradient[c], divisor = sok_sqrt(next_v(rule, g, v[c])) + rule.epsilon;
    return (f64)(next_m(rule, g, m[c]) * rule.correction / divisor);
  });
  GroupLambRule own = rule;
  own.ratio = size == 0.0 || step == 0.0 ? 1.0f : (f32)(size / (step + 1e-8));
  return own;
}
SOK_DEVICE void learn(const GroupLambRule& rule, f32 w, f32 g, f32& z, f32& m, f32& v) {
  const f32 old_divisor = sok_sqrt(v) + rule.epsilon;
  m = next_m(rule, g, m);
  v = next_v(rule, g, v);
  const f32 step = m * rule.correction * rule.ratio * rule.lr;
  z = descended(z, step, w, rule.decay, sok_sqrt(v) + rule.epsilon, old_divisor);
}
SOK_DEVICE f32 value_of(const GroupLambRule& rule, f32 left, f32, f32, f32 v) {
  return left / (sok_sqrt(v) + rule.epsilon + 2.0f * rule.l2);
}

#define SOK_UPDATE_GROUP_LAMB(T)                                                               \
  SOK_ROW_KERNEL(update_group_lamb_##T)                                                        \
  (const SokShare share, const u64* values, const u64* linears, const u64* ms, const u64* vs,  \
   i64 shift, i64 dim, const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys, \
   i64 seed, i64 step, f32 lr, f32 correction, f32 decay, f32 one_minus_beta_1,                \
   f32 one_minus_beta_2, f32 epsilon, f32 l1, f32 l2, f32 l21, i64 n) {                        \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};   \
    GroupLambRule rule{lr, correction, decay, one_minus_beta_1, one_minus_beta_2, epsilon, l1, \
                       l2, l21,        1.0f};                                                  \
    update_group_rows<T>(rule, batch, linears, ms, vs);                                        \
  }                                                                                            \
  SOK_EXPORT(update_group_lamb_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_GROUP_LAMB)
