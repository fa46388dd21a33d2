// Update rules of optimizers, in place on row numbers: gradients go in, values and states change.
//
// Every kernel here has the same frame. The columns of a row store share `shift`, `dim` and row
// numbers:
//
// values     (num_chunks,)      addresses of the chunks of the `value` column, elements of T
// <state>    (num_chunks,)      the same of a state column, always f32; null where a rule is run
// without it rows       (n,)               distinct row numbers; an absent one is skipped, whatever
// its gradient grads      (n, dim) nonfinite  (n,)          out  1 for a row whose gradient has a
// NaN or an infinity; else left alone. May be null
//
// Arithmetic is f32 in TensorFlow's order of operations, so that a row ends where TensorFlow's
// dense optimizer puts it.
#include "rows.cuh"

// What a rule does to one element: `update_element(rule, value, gradient, states...)` returns the
// new value and changes the states. The loops over rows and columns are in update_rows.

// w - w * lr * weight_decay, before the step, as Keras 3 does. decay is lr * weight_decay.
SOK_DEVICE f32 decayed(f32 w, f32 decay) { return decay == 0.0f ? w : w - w * decay; }

struct SgdRule {
  static constexpr int kStates = 0;
  f32 lr, decay;
};
SOK_DEVICE f32 update_element(const SgdRule& rule, f32 w, f32 g) {
  return decayed(w, rule.decay) - g * rule.lr;
}

// kLrInState: the state is a step that was already taken (Keras); else a sum of gradients (TF1).
template <bool kNesterov, bool kLrInState>
struct MomentumRule {
  static constexpr int kStates = 1;
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

template <bool kEpsilonInsideRoot>
SOK_DEVICE f32 root_with_epsilon(f32 x, f32 epsilon) {
  return kEpsilonInsideRoot ? sok_sqrt(x + epsilon) : sok_sqrt(x) + epsilon;
}

template <bool kEpsilonInsideRoot>
struct AdagradRule {
  static constexpr int kStates = 1;
  f32 lr, decay, epsilon;
};
template <bool kEpsilonInsideRoot>
SOK_DEVICE f32 update_element(const AdagradRule<kEpsilonInsideRoot>& rule, f32 w, f32 g,
                              f32& accumulator) {
  accumulator += g * g;
  return decayed(w, rule.decay) -
         rule.lr * g / root_with_epsilon<kEpsilonInsideRoot>(accumulator, rule.epsilon);
}

// alpha is lr * sqrt(1 - beta_2^t) / (1 - beta_1^t).
struct AdamRule {
  static constexpr int kStates = 2;
  f32 alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon;
};
SOK_DEVICE f32 update_element(const AdamRule& rule, f32 w, f32 g, f32& m, f32& v) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  return decayed(w, rule.decay) - m * rule.alpha / (sok_sqrt(v) + rule.epsilon);
}

struct AmsgradRule {
  static constexpr int kStates = 3;
  AdamRule adam;
};
SOK_DEVICE f32 update_element(const AmsgradRule& rule, f32 w, f32 g, f32& m, f32& v, f32& vhat) {
  const AdamRule& adam = rule.adam;
  m += (g - m) * adam.one_minus_beta_1;
  v += (g * g - v) * adam.one_minus_beta_2;
  vhat = vhat > v ? vhat : v;
  return decayed(w, adam.decay) - m * adam.alpha / (sok_sqrt(vhat) + adam.epsilon);
}

struct RmspropHyper {
  f32 lr, decay, rho, one_minus_rho, epsilon, momentum;
};
template <bool kEpsilonInsideRoot>
struct RmspropRule {
  static constexpr int kStates = 1;
  RmspropHyper hyper;
};
template <bool kEpsilonInsideRoot>
struct MomentumRmspropRule {
  static constexpr int kStates = 2;
  RmspropHyper hyper;
};
template <bool kEpsilonInsideRoot>
struct CenteredRmspropRule {
  static constexpr int kStates = 2;
  RmspropHyper hyper;
};
template <bool kEpsilonInsideRoot>
struct CenteredMomentumRmspropRule {
  static constexpr int kStates = 3;
  RmspropHyper hyper;
};
SOK_DEVICE f32 rmsprop_mean(const RmspropHyper& hyper, f32 mean, f32 x) {
  return hyper.rho * mean + hyper.one_minus_rho * x;
}
// rms - mean_grad^2 is a variance. Rounding can make it negative, and its root, with TensorFlow, a
// NaN for ever.
SOK_DEVICE f32 rmsprop_variance(f32 rms, f32 mean_grad) {
  f32 variance = rms - mean_grad * mean_grad;
  return variance < 0.0f ? 0.0f : variance;
}
template <bool kEpsilonInsideRoot>
SOK_DEVICE f32 update_element(const RmspropRule<kEpsilonInsideRoot>& rule, f32 w, f32 g, f32& rms) {
  const RmspropHyper& hyper = rule.hyper;
  rms = rmsprop_mean(hyper, rms, g * g);
  return decayed(w, hyper.decay) -
         hyper.lr * g / root_with_epsilon<kEpsilonInsideRoot>(rms, hyper.epsilon);
}
template <bool kEpsilonInsideRoot>
SOK_DEVICE f32 update_element(const MomentumRmspropRule<kEpsilonInsideRoot>& rule, f32 w, f32 g,
                              f32& rms, f32& step) {
  const RmspropHyper& hyper = rule.hyper;
  rms = rmsprop_mean(hyper, rms, g * g);
  step = hyper.momentum * step +
         hyper.lr * g / root_with_epsilon<kEpsilonInsideRoot>(rms, hyper.epsilon);
  return decayed(w, hyper.decay) - step;
}
template <bool kEpsilonInsideRoot>
SOK_DEVICE f32 update_element(const CenteredRmspropRule<kEpsilonInsideRoot>& rule, f32 w, f32 g,
                              f32& rms, f32& mean_grad) {
  const RmspropHyper& hyper = rule.hyper;
  rms = rmsprop_mean(hyper, rms, g * g);
  mean_grad = rmsprop_mean(hyper, mean_grad, g);
  f32 variance = rmsprop_variance(rms, mean_grad);
  return decayed(w, hyper.decay) -
         hyper.lr * g / root_with_epsilon<kEpsilonInsideRoot>(variance, hyper.epsilon);
}
template <bool kEpsilonInsideRoot>
SOK_DEVICE f32 update_element(const CenteredMomentumRmspropRule<kEpsilonInsideRoot>& rule, f32 w,
                              f32 g, f32& rms, f32& mean_grad, f32& step) {
  const RmspropHyper& hyper = rule.hyper;
  rms = rmsprop_mean(hyper, rms, g * g);
  mean_grad = rmsprop_mean(hyper, mean_grad, g);
  f32 variance = rmsprop_variance(rms, mean_grad);
  step = hyper.momentum * step +
         hyper.lr * g / root_with_epsilon<kEpsilonInsideRoot>(variance, hyper.epsilon);
  return decayed(w, hyper.decay) - step;
}

// kSquareRoot: power is 0.5, the usual case, which needs no pow.
template <bool kSquareRoot>
struct FtrlRule {
  static constexpr int kStates = 2;
  // power is -learning_rate_power; l2 holds beta / (2 lr) too.
  f32 lr, decay, power, l1, l2, l2_shrinkage;
};
template <bool kSquareRoot>
SOK_DEVICE f32 update_element(const FtrlRule<kSquareRoot>& rule, f32 w, f32 g, f32& accumulator,
                              f32& linear) {
  w = decayed(w, rule.decay);
  f32 new_accumulator = accumulator + g * g;
  f32 old_root = kSquareRoot ? sok_sqrt(accumulator) : sok_pow(accumulator, rule.power);
  f32 new_root = kSquareRoot ? sok_sqrt(new_accumulator) : sok_pow(new_accumulator, rule.power);
  f32 shrunk = g + 2.0f * rule.l2_shrinkage * w;
  linear += shrunk - (new_root - old_root) / rule.lr * w;
  f32 quadratic = new_root / rule.lr + 2.0f * rule.l2;
  f32 clipped = linear > rule.l1 ? rule.l1 : (linear < -rule.l1 ? -rule.l1 : linear);
  accumulator = new_accumulator;
  return (clipped - linear) / quadratic;
}

// The loop over rows and columns, the same for every rule.
template <class T, class Rule>
SOK_DEVICE void update_rows(const Rule& rule, const u64* values, const u64* state0,
                            const u64* state1, const u64* state2, i64 shift, i64 dim,
                            const u32* rows, const f32* grads, i32* nonfinite, i64 n) {
  // A copy that is nobody's address: the compiler keeps it in registers while rows are written.
  const Rule hyper = rule;
  SOK_FOR_EACH_ROW(r, n) {
    if (SOK_AHEAD > 0 && r + SOK_AHEAD < n) {
      u32 ahead = rows[r + SOK_AHEAD];
      sok_prefetch_row<T>(values, shift, dim, ahead);
      if (Rule::kStates > 0) sok_prefetch_row<f32>(state0, shift, dim, ahead);
      if (Rule::kStates > 1) sok_prefetch_row<f32>(state1, shift, dim, ahead);
      if (Rule::kStates > 2) sok_prefetch_row<f32>(state2, shift, dim, ahead);
    }
    u32 row = rows[r];
    if (row == SOK_ABSENT) continue;
    const f32* __restrict__ g = grads + r * dim;
    T* __restrict__ w = sok_row<T>(values, shift, dim, row);
    u32 largest = 0;  // exponent and fraction bits of the gradient; an unsigned maximum is a vector
                      // instruction
    if constexpr (Rule::kStates == 0) {
      SOK_FOR_EACH_COLUMN(c, dim) {
        u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
        from_f32(update_element(hyper, to_f32(w[c]), g[c]), w + c);
      }
    } else if constexpr (Rule::kStates == 1) {
      f32* __restrict__ a = sok_row<f32>(state0, shift, dim, row);
      SOK_FOR_EACH_COLUMN(c, dim) {
        u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
        from_f32(update_element(hyper, to_f32(w[c]), g[c], a[c]), w + c);
      }
    } else if constexpr (Rule::kStates == 2) {
      f32* __restrict__ a = sok_row<f32>(state0, shift, dim, row);
      f32* __restrict__ b = sok_row<f32>(state1, shift, dim, row);
      SOK_FOR_EACH_COLUMN(c, dim) {
        u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
        from_f32(update_element(hyper, to_f32(w[c]), g[c], a[c], b[c]), w + c);
      }
    } else {
      f32* __restrict__ a = sok_row<f32>(state0, shift, dim, row);
      f32* __restrict__ b = sok_row<f32>(state1, shift, dim, row);
      f32* __restrict__ d = sok_row<f32>(state2, shift, dim, row);
      SOK_FOR_EACH_COLUMN(c, dim) {
        u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
        from_f32(update_element(hyper, to_f32(w[c]), g[c], a[c], b[c], d[c]), w + c);
      }
    }
    if (nonfinite && largest >= 0x7F800000u) sok_store(nonfinite + r, (i32)1);
  }
}

// w -= lr * g
#define SOK_UPDATE_SGD(T)                                                                          \
  SOK_ROW_KERNEL(update_sgd_##T)                                                                   \
  (const u64* values, i64 shift, i64 dim, const u32* rows, const f32* grads, i32* nonfinite,       \
   f32 lr, f32 decay, i64 n) {                                                                     \
    update_rows<T>(SgdRule{lr, decay}, values, nullptr, nullptr, nullptr, shift, dim, rows, grads, \
                   nonfinite, n);                                                                  \
  }                                                                                                \
  SOK_EXPORT(update_sgd_##T)

// Keras: m = momentum m - lr g; w += m, or with Nesterov w += momentum m - lr g.
// TF1:   m = momentum m + g; w -= lr m, or with Nesterov w -= lr g + lr momentum m.
#define SOK_UPDATE_MOMENTUM(T)                                                                     \
  SOK_ROW_KERNEL(update_momentum_##T)                                                              \
  (const u64* values, const u64* momentums, i64 shift, i64 dim, const u32* rows, const f32* grads, \
   i32* nonfinite, f32 lr, f32 decay, f32 momentum, i64 nesterov, i64 lr_in_state, i64 n) {        \
    if (nesterov && lr_in_state)                                                                   \
      update_rows<T>(MomentumRule<true, true>{lr, decay, momentum}, values, momentums, nullptr,    \
                     nullptr, shift, dim, rows, grads, nonfinite, n);                              \
    else if (nesterov)                                                                             \
      update_rows<T>(MomentumRule<true, false>{lr, decay, momentum}, values, momentums, nullptr,   \
                     nullptr, shift, dim, rows, grads, nonfinite, n);                              \
    else if (lr_in_state)                                                                          \
      update_rows<T>(MomentumRule<false, true>{lr, decay, momentum}, values, momentums, nullptr,   \
                     nullptr, shift, dim, rows, grads, nonfinite, n);                              \
    else                                                                                           \
      update_rows<T>(MomentumRule<false, false>{lr, decay, momentum}, values, momentums, nullptr,  \
                     nullptr, shift, dim, rows, grads, nonfinite, n);                              \
  }                                                                                                \
  SOK_EXPORT(update_momentum_##T)

// accumulator += g^2; w -= lr g / sqrt(accumulator + epsilon), or / (sqrt(accumulator) + epsilon).
#define SOK_UPDATE_ADAGRAD(T)                                                                 \
  SOK_ROW_KERNEL(update_adagrad_##T)                                                          \
  (const u64* values, const u64* accumulators, i64 shift, i64 dim, const u32* rows,           \
   const f32* grads, i32* nonfinite, f32 lr, f32 decay, f32 epsilon, i64 epsilon_inside_root, \
   i64 n) {                                                                                   \
    if (epsilon_inside_root)                                                                  \
      update_rows<T>(AdagradRule<true>{lr, decay, epsilon}, values, accumulators, nullptr,    \
                     nullptr, shift, dim, rows, grads, nonfinite, n);                         \
    else                                                                                      \
      update_rows<T>(AdagradRule<false>{lr, decay, epsilon}, values, accumulators, nullptr,   \
                     nullptr, shift, dim, rows, grads, nonfinite, n);                         \
  }                                                                                           \
  SOK_EXPORT(update_adagrad_##T)

// Adam; with a column vhats, AMSGrad. `alpha` carries the learning rate and the bias correction.
#define SOK_UPDATE_ADAM(T)                                                                         \
  SOK_ROW_KERNEL(update_adam_##T)                                                                  \
  (const u64* values, const u64* ms, const u64* vs, const u64* vhats, i64 shift, i64 dim,          \
   const u32* rows, const f32* grads, i32* nonfinite, f32 alpha, f32 decay, f32 one_minus_beta_1,  \
   f32 one_minus_beta_2, f32 epsilon, i64 n) {                                                     \
    AdamRule adam{alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon};                      \
    if (vhats)                                                                                     \
      update_rows<T>(AmsgradRule{adam}, values, ms, vs, vhats, shift, dim, rows, grads, nonfinite, \
                     n);                                                                           \
    else                                                                                           \
      update_rows<T>(adam, values, ms, vs, nullptr, shift, dim, rows, grads, nonfinite, n);        \
  }                                                                                                \
  SOK_EXPORT(update_adam_##T)

// RMSprop; with a column mean_grads, centered; with a column momentums, with momentum.
template <class T, bool kEpsilonInsideRoot>
SOK_DEVICE void update_rmsprop(const RmspropHyper& hyper, const u64* values, const u64* rms,
                               const u64* mean_grads, const u64* momentums, i64 shift, i64 dim,
                               const u32* rows, const f32* grads, i32* nonfinite, i64 n) {
  if (mean_grads && momentums)
    update_rows<T>(CenteredMomentumRmspropRule<kEpsilonInsideRoot>{hyper}, values, rms, mean_grads,
                   momentums, shift, dim, rows, grads, nonfinite, n);
  else if (mean_grads)
    update_rows<T>(CenteredRmspropRule<kEpsilonInsideRoot>{hyper}, values, rms, mean_grads, nullptr,
                   shift, dim, rows, grads, nonfinite, n);
  else if (momentums)
    update_rows<T>(MomentumRmspropRule<kEpsilonInsideRoot>{hyper}, values, rms, momentums, nullptr,
                   shift, dim, rows, grads, nonfinite, n);
  else
    update_rows<T>(RmspropRule<kEpsilonInsideRoot>{hyper}, values, rms, nullptr, nullptr, shift,
                   dim, rows, grads, nonfinite, n);
}
#define SOK_UPDATE_RMSPROP(T)                                                                      \
  SOK_ROW_KERNEL(update_rmsprop_##T)                                                               \
  (const u64* values, const u64* rms, const u64* mean_grads, const u64* momentums, i64 shift,      \
   i64 dim, const u32* rows, const f32* grads, i32* nonfinite, f32 lr, f32 decay, f32 rho,         \
   f32 one_minus_rho, f32 epsilon, f32 momentum, i64 epsilon_inside_root, i64 n) {                 \
    RmspropHyper hyper{lr, decay, rho, one_minus_rho, epsilon, momentum};                          \
    if (epsilon_inside_root)                                                                       \
      update_rmsprop<T, true>(hyper, values, rms, mean_grads, momentums, shift, dim, rows, grads,  \
                              nonfinite, n);                                                       \
    else                                                                                           \
      update_rmsprop<T, false>(hyper, values, rms, mean_grads, momentums, shift, dim, rows, grads, \
                               nonfinite, n);                                                      \
  }                                                                                                \
  SOK_EXPORT(update_rmsprop_##T)

// FTRL-proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013).
#define SOK_UPDATE_FTRL(T)                                                                         \
  SOK_ROW_KERNEL(update_ftrl_##T)                                                                  \
  (const u64* values, const u64* accumulators, const u64* linears, i64 shift, i64 dim,             \
   const u32* rows, const f32* grads, i32* nonfinite, f32 lr, f32 decay, f32 power, f32 l1,        \
   f32 l2, f32 l2_shrinkage, i64 n) {                                                              \
    if (power == 0.5f)                                                                             \
      update_rows<T>(FtrlRule<true>{lr, decay, power, l1, l2, l2_shrinkage}, values, accumulators, \
                     linears, nullptr, shift, dim, rows, grads, nonfinite, n);                     \
    else                                                                                           \
      update_rows<T>(FtrlRule<false>{lr, decay, power, l1, l2, l2_shrinkage}, values,              \
                     accumulators, linears, nullptr, shift, dim, rows, grads, nonfinite, n);       \
  }                                                                                                \
  SOK_EXPORT(update_ftrl_##T)

#define SOK_UPDATE_KERNELS(T) \
  SOK_UPDATE_SGD(T)           \
  SOK_UPDATE_MOMENTUM(T)      \
  SOK_UPDATE_ADAGRAD(T)       \
  SOK_UPDATE_ADAM(T)          \
  SOK_UPDATE_RMSPROP(T)       \
  SOK_UPDATE_FTRL(T)

SOK_UPDATE_KERNELS(f32)
SOK_UPDATE_KERNELS(f16)
SOK_UPDATE_KERNELS(bf16)

// Marks the rows whose gradient has a NaN or an infinity, and changes nothing else.
//
// rows       (n,)               an absent row is skipped; null: none is absent
// grads      (n, dim)
// nonfinite  (n,)          out  1 for such a row; else left alone
SOK_ROW_KERNEL(count_nonfinite)(const u32* rows, const f32* grads, i64 dim, i32* nonfinite, i64 n) {
  SOK_FOR_EACH_ROW(r, n) {
    if (rows && rows[r] == SOK_ABSENT) continue;
    const f32* g = grads + r * dim;
    u32 largest = 0;
    SOK_FOR_EACH_COLUMN(c, dim) {
      u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
      largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7F800000u) sok_store(nonfinite + r, (i32)1);
  }
}
SOK_EXPORT(count_nonfinite)
