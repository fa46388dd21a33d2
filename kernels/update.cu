// Update rules of optimizers, in place on row numbers: gradients go in, values and states change.
//
// Every kernel here has the same frame; the columns of a row store share shift, dim and row
// numbers.
//
// values     (num_chunks,)  addresses of the chunks of the `value` column, elements of T
// <state>    (num_chunks,)  the same of a state column, always f32; null: the rule runs without it
// rows       (n,)           distinct row numbers; an absent one is skipped
// grads      (n, dim)
// nonfinite  (n,)      out  1 for a row whose gradient has a NaN or an infinity; may be null
// keys       (n,)           the key of each row, for random bits; null in the kernels that round to
//                           nearest
// seed, step                of the random bits; see random.cuh
//
// Kernels that end in _stochastic_<T> round values by random bits, the others to nearest even.
//
// Arithmetic is f32 in TensorFlow's order of operations, so that a row ends where TensorFlow's
// dense optimizer puts it.
#include "random.cuh"
#include "rows.cuh"

// What a rule does to one element: `update_element(rule, value, gradient, states...)` returns the
// new value and changes the states. The loops over rows and columns are in update_rows.

// w - w * lr * weight_decay, before the step, as Keras 3 does. decay is lr * weight_decay.
SOK_DEVICE f32 decayed(f32 w, f32 decay) { return decay == 0.0f ? w : w - w * decay; }

struct SgdRule {
  f32 lr, decay;
};
SOK_DEVICE f32 update_element(const SgdRule& rule, f32 w, f32 g) {
  return decayed(w, rule.decay) - g * rule.lr;
}

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

// One of the two is 0, which changes nothing: half as many kernels to compile as with a flag.
struct RootEpsilon {
  f32 inside, outside;
};
SOK_DEVICE RootEpsilon root_epsilon(f32 epsilon, i64 is_inside) {
  return is_inside ? RootEpsilon{epsilon, 0.0f} : RootEpsilon{0.0f, epsilon};
}
SOK_DEVICE f32 root_with_epsilon(f32 x, const RootEpsilon& epsilon) {
  return sok_sqrt(x + epsilon.inside) + epsilon.outside;
}

struct AdagradRule {
  f32 lr, decay;
  RootEpsilon epsilon;
};
SOK_DEVICE f32 update_element(const AdagradRule& rule, f32 w, f32 g, f32& accumulator) {
  accumulator += g * g;
  return decayed(w, rule.decay) - rule.lr * g / root_with_epsilon(accumulator, rule.epsilon);
}

// alpha is lr * sqrt(1 - beta_2^t) / (1 - beta_1^t).
struct AdamRule {
  f32 alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon;
};
SOK_DEVICE f32 update_element(const AdamRule& rule, f32 w, f32 g, f32& m, f32& v) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  return decayed(w, rule.decay) - m * rule.alpha / (sok_sqrt(v) + rule.epsilon);
}

struct AmsgradRule : AdamRule {};
SOK_DEVICE f32 update_element(const AmsgradRule& rule, f32 w, f32 g, f32& m, f32& v, f32& vhat) {
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  vhat = vhat > v ? vhat : v;
  return decayed(w, rule.decay) - m * rule.alpha / (sok_sqrt(vhat) + rule.epsilon);
}

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

// kSquareRoot: power is 0.5, the usual case, which needs no pow.
template <bool kSquareRoot>
struct FtrlRule {
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

// What every kernel gets; see the top of the file.
struct Batch {
  const u64* values;
  i64 shift, dim;
  const u32* rows;
  const f32* grads;
  i32* nonfinite;
  const i64* keys;
  i64 seed, step, n;
};

// How the values of a row are rounded: to nearest where a kernel is made for the type of an
// element, by random bits where it is made for one of these.
template <class T>
struct Stochastic {};
typedef Stochastic<f16> stochastic_f16;
typedef Stochastic<bf16> stochastic_bf16;

struct Nearest {};
template <class T>
struct Format {
  typedef T Element;
};
template <class T>
struct Format<Stochastic<T>> {
  typedef T Element;
};
template <class T>
SOK_DEVICE Nearest rounding_of_row(T, const Batch&, i64) {
  return {};
}
template <class T>
SOK_DEVICE RowWords rounding_of_row(Stochastic<T>, const Batch& batch, i64 r) {
  return draw_row_words((u64)batch.seed, batch.keys[r], (u32)batch.step);
}

// Updates one row and returns the largest bits of its gradient without the sign: those of a NaN or
// an infinity are at least 0x7F800000, and an unsigned maximum is one vector instruction.
template <class T, class Rule, class... State>
SOK_DEVICE u32 update_row(const Rule rule, const Nearest, i64 dim, T* __restrict__ w,
                          const f32* __restrict__ g, State* __restrict__... states) {
  u32 largest = 0;
  SOK_FOR_EACH_COLUMN(c, dim) {
    u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
    from_f32(update_element(rule, to_f32(w[c]), g[c], states[c]...), w + c);
  }
  return largest;
}

// The same, rounding by random bits. What decay does is taken out of the rule, which asks whether
// there is any: a branch that a compiler moves out of the loop above, but not out of this longer
// one, and then does not vectorize it. Adam on bfloat16 rows of 64 columns took twice as long.
template <class T, class Rule, class... State>
SOK_DEVICE u32 update_row(Rule rule, const RowWords words, i64 dim, T* __restrict__ w,
                          const f32* __restrict__ g, State* __restrict__... states) {
  const f32 decay = rule.decay;
  const u32 kept = decay == 0.0f ? ~0u : 0u;
  rule.decay = 0.0f;
  u32 largest = 0;
  SOK_FOR_EACH_COLUMN(c, dim) {
    u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
    f32 x = to_f32(w[c]);
    x = sok_bits_f32((sok_f32_bits(x) & kept) | (sok_f32_bits(x - x * decay) & ~kept));
    x = update_element(rule, x, g[c], states[c]...);
    round_by(column_word(words, (u32)c), x, w + c);
  }
  return largest;
}

// The loop over rows, the same for every rule. `states` are chunk addresses of its state columns.
template <class T, class Rule, class... Chunks>
SOK_DEVICE void update_rows(const Rule rule, const Batch batch, Chunks... states) {
  typedef typename Format<T>::Element Element;
  const i64 shift = batch.shift, dim = batch.dim, n = batch.n;
  // Rows of several columns are more lines at a time than a processor keeps under way: Adam on
  // scattered rows of 64 columns took 2.3 ms with 8 rows ahead, 2.7 ms with 16.
  constexpr i64 kAhead = sizeof...(states) > 0 ? SOK_AHEAD / 2 : SOK_AHEAD;
  SOK_FOR_EACH_ROW(r, n) {
    if (SOK_AHEAD > 0 && r + kAhead < n) {
      u32 ahead = batch.rows[r + kAhead];
      sok_prefetch_row<Element>(batch.values, shift, dim, ahead);
      (sok_prefetch_row<f32>(states, shift, dim, ahead), ...);
    }
    u32 row = batch.rows[r];
    if (row == SOK_ABSENT) continue;
    u32 largest = update_row(rule, rounding_of_row(T(), batch, r), dim,
                             sok_row<Element>(batch.values, shift, dim, row), batch.grads + r * dim,
                             sok_row<f32>(states, shift, dim, row)...);
    if (batch.nonfinite && largest >= 0x7F800000u) sok_store(batch.nonfinite + r, (i32)1);
  }
}

// w -= lr * g
#define SOK_UPDATE_SGD(T)                                                                    \
  SOK_ROW_KERNEL(update_sgd_##T)                                                             \
  (const u64* values, i64 shift, i64 dim, const u32* rows, const f32* grads, i32* nonfinite, \
   const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, i64 n) {                          \
    Batch batch{values, shift, dim, rows, grads, nonfinite, keys, seed, step, n};            \
    update_rows<T>(SgdRule{lr, decay}, batch);                                               \
  }                                                                                          \
  SOK_EXPORT(update_sgd_##T)

// Keras: m = momentum m - lr g; w += m, or with Nesterov w += momentum m - lr g.
// TF1:   m = momentum m + g; w -= lr m, or with Nesterov w -= lr g + lr momentum m.
#define SOK_UPDATE_MOMENTUM(T)                                                                     \
  SOK_ROW_KERNEL(update_momentum_##T)                                                              \
  (const u64* values, const u64* momentums, i64 shift, i64 dim, const u32* rows, const f32* grads, \
   i32* nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, f32 momentum,           \
   i64 nesterov, i64 lr_in_state, i64 n) {                                                         \
    Batch batch{values, shift, dim, rows, grads, nonfinite, keys, seed, step, n};                  \
    if (nesterov && lr_in_state)                                                                   \
      update_rows<T>(MomentumRule<true, true>{lr, decay, momentum}, batch, momentums);             \
    else if (nesterov)                                                                             \
      update_rows<T>(MomentumRule<true, false>{lr, decay, momentum}, batch, momentums);            \
    else if (lr_in_state)                                                                          \
      update_rows<T>(MomentumRule<false, true>{lr, decay, momentum}, batch, momentums);            \
    else                                                                                           \
      update_rows<T>(MomentumRule<false, false>{lr, decay, momentum}, batch, momentums);           \
  }                                                                                                \
  SOK_EXPORT(update_momentum_##T)

// accumulator += g^2; w -= lr g / sqrt(accumulator + epsilon), or / (sqrt(accumulator) + epsilon).
#define SOK_UPDATE_ADAGRAD(T)                                                                \
  SOK_ROW_KERNEL(update_adagrad_##T)                                                         \
  (const u64* values, const u64* accumulators, i64 shift, i64 dim, const u32* rows,          \
   const f32* grads, i32* nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, f32 decay, \
   f32 epsilon, i64 epsilon_inside_root, i64 n) {                                            \
    Batch batch{values, shift, dim, rows, grads, nonfinite, keys, seed, step, n};            \
    AdagradRule rule{lr, decay, root_epsilon(epsilon, epsilon_inside_root)};                 \
    update_rows<T>(rule, batch, accumulators);                                               \
  }                                                                                          \
  SOK_EXPORT(update_adagrad_##T)

// Adam; with a column vhats, AMSGrad. `alpha` carries the learning rate and the bias correction.
#define SOK_UPDATE_ADAM(T)                                                                 \
  SOK_ROW_KERNEL(update_adam_##T)                                                          \
  (const u64* values, const u64* ms, const u64* vs, const u64* vhats, i64 shift, i64 dim,  \
   const u32* rows, const f32* grads, i32* nonfinite, const i64* keys, i64 seed, i64 step, \
   f32 alpha, f32 decay, f32 one_minus_beta_1, f32 one_minus_beta_2, f32 epsilon, i64 n) { \
    Batch batch{values, shift, dim, rows, grads, nonfinite, keys, seed, step, n};          \
    AdamRule adam{alpha, decay, one_minus_beta_1, one_minus_beta_2, epsilon};              \
    if (vhats)                                                                             \
      update_rows<T>(AmsgradRule{adam}, batch, ms, vs, vhats);                             \
    else                                                                                   \
      update_rows<T>(adam, batch, ms, vs);                                                 \
  }                                                                                        \
  SOK_EXPORT(update_adam_##T)

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
  (const u64* values, const u64* rms, const u64* mean_grads, const u64* momentums, i64 shift, \
   i64 dim, const u32* rows, const f32* grads, i32* nonfinite, const i64* keys, i64 seed,     \
   i64 step, f32 lr, f32 decay, f32 rho, f32 one_minus_rho, f32 epsilon, f32 momentum,        \
   i64 epsilon_inside_root, i64 n) {                                                          \
    Batch batch{values, shift, dim, rows, grads, nonfinite, keys, seed, step, n};             \
    RmspropHyper hyper{                                                                       \
        lr, decay, rho, one_minus_rho, momentum, root_epsilon(epsilon, epsilon_inside_root)}; \
    update_rmsprop<T>(hyper, batch, rms, mean_grads, momentums);                              \
  }                                                                                           \
  SOK_EXPORT(update_rmsprop_##T)

// FTRL-proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013).
#define SOK_UPDATE_FTRL(T)                                                                         \
  SOK_ROW_KERNEL(update_ftrl_##T)                                                                  \
  (const u64* values, const u64* accumulators, const u64* linears, i64 shift, i64 dim,             \
   const u32* rows, const f32* grads, i32* nonfinite, const i64* keys, i64 seed, i64 step, f32 lr, \
   f32 decay, f32 power, f32 l1, f32 l2, f32 l2_shrinkage, i64 n) {                                \
    Batch batch{values, shift, dim, rows, grads, nonfinite, keys, seed, step, n};                  \
    if (power == 0.5f)                                                                             \
      update_rows<T>(FtrlRule<true>{lr, decay, power, l1, l2, l2_shrinkage}, batch, accumulators,  \
                     linears);                                                                     \
    else                                                                                           \
      update_rows<T>(FtrlRule<false>{lr, decay, power, l1, l2, l2_shrinkage}, batch, accumulators, \
                     linears);                                                                     \
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
SOK_UPDATE_KERNELS(stochastic_f16)
SOK_UPDATE_KERNELS(stochastic_bf16)

// Marks the rows whose gradient has a NaN or an infinity, and changes nothing else.
//
// rows       (n,)           an absent row is skipped; null: none is absent
// grads      (n, dim)
// nonfinite  (n,)      out  1 for such a row; else left alone
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
