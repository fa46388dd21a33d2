// RMSprop: plain, centered, with momentum, and both. frame.cuh says what the parameters are.
#include "update/frame.cuh"

struct RmspropHyper {
  f32 lr, decay, rho, one_minus_rho, momentum;
  RootEpsilon epsilon;
};
struct RmspropRule : RmspropHyper {};
struct MomentumRmspropRule : RmspropHyper {};
struct CenteredRmspropRule : RmspropHyper {};
struct CenteredMomentumRmspropRule : RmspropHyper {};
SOK_DEVICE f32 rmsprop_mean(const RmspropHyper& hyper, f32 mean, f32 x) {
  return hyper.rho * mean + hyper.one_minus_rho * x;
}
// rms - mean_grad^2 is a variance. Rounding can make it negative, and its root, with TensorFlow, a
// NaN for ever.
SOK_DEVICE f32 rmsprop_variance(f32 rms, f32 mean_grad) {
  f32 variance = rms - mean_grad * mean_grad;
  return variance < 0.0f ? 0.0f : variance;
}
SOK_DEVICE f32 update_element(const RmspropRule& rule, f32 w, f32 g, f32& rms) {
  rms = rmsprop_mean(rule, rms, g * g);
  return decayed(w, rule.decay) - rule.lr * g / root_with_epsilon(rms, rule.epsilon);
}
SOK_DEVICE f32 update_element(const MomentumRmspropRule& rule, f32 w, f32 g, f32& rms, f32& step) {
  rms = rmsprop_mean(rule, rms, g * g);
  step = rule.momentum * step + rule.lr * g / root_with_epsilon(rms, rule.epsilon);
  return decayed(w, rule.decay) - step;
}
SOK_DEVICE f32 update_element(const CenteredRmspropRule& rule, f32 w, f32 g, f32& rms,
                              f32& mean_grad) {
  rms = rmsprop_mean(rule, rms, g * g);
  mean_grad = rmsprop_mean(rule, mean_grad, g);
  f32 variance = rmsprop_variance(rms, mean_grad);
  return decayed(w, rule.decay) - rule.lr * g / root_with_epsilon(variance, rule.epsilon);
}
SOK_DEVICE f32 update_element(const CenteredMomentumRmspropRule& rule, f32 w, f32 g, f32& rms,
                              f32& mean_grad, f32& step) {
  rms = rmsprop_mean(rule, rms, g * g);
  mean_grad = rmsprop_mean(rule, mean_grad, g);
  f32 variance = rmsprop_variance(rms, mean_grad);
  step = rule.momentum * step + rule.lr * g / root_with_epsilon(variance, rule.epsilon);
  return decayed(w, rule.decay) - step;
}

// RMSprop; with a column mean_grads, centered; with a column momentums, with momentum.
template <class T>
SOK_DEVICE void update_rmsprop(const RmspropHyper& hyper, const Batch& batch, const u64* rms,
                               const u64* mean_grads, const u64* momentums) {
  if (mean_grads && momentums)
    update_rows<T>(CenteredMomentumRmspropRule{hyper}, batch, rms, mean_grads, momentums);
  else if (mean_grads)
    update_rows<T>(CenteredRmspropRule{hyper}, batch, rms, mean_grads);
  else if (momentums)
    update_rows<T>(MomentumRmspropRule{hyper}, batch, rms, momentums);
  else
    update_rows<T>(RmspropRule{hyper}, batch, rms);
}
#define SOK_UPDATE_RMSPROP(T)                                                                 \
  SOK_ROW_KERNEL(update_rmsprop_##T)                                                          \
  (const SokShare share, const u64* values, const u64* rms, const u64* mean_grads,            \
   const u64* momentums, i64 shift, i64 dim, const u32* rows, const f32* grads,               \
   i64* num_nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, f32 rho,       \
   f32 one_minus_rho, f32 epsilon, f32 momentum, i64 epsilon_inside_root, i64 n) {            \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};  \
    RmspropHyper hyper{                                                                       \
        lr, decay, rho, one_minus_rho, momentum, root_epsilon(epsilon, epsilon_inside_root)}; \
    update_rmsprop<T>(hyper, batch, rms, mean_grads, momentums);                              \
  }                                                                                           \
  SOK_EXPORT(update_rmsprop_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_RMSPROP)
