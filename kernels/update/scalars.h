// The numbers that the kernel of an update rule takes in a step, beside rows and states. They
// follow from the rule's settings, the learning rate and the number of the step, 1 for the first.
//
// A struct is the class of its name in sok_lite/engine/optimizers, where its settings are
// explained: with the same base and the same fields, in the same order. Its `at` gives the numbers
// in the order of its kernel's parameters. A test compares both with the sources of Python and of
// the kernels.
//
// What TensorFlow has in float32 is so here: 1 - 0.999 has 5 digits there, and those reach the
// rows.
#ifndef SOK_UPDATE_SCALARS_H_
#define SOK_UPDATE_SCALARS_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

namespace sok::rules {

// A setting that is True or False: a kernel takes it as an integer.
struct Flag {
  double value;
  explicit operator bool() const { return value != 0; }
};

struct Scalar {
  Scalar(double value) : value(value), is_integer(false) {}
  Scalar(Flag flag) : value(flag ? 1 : 0), is_integer(true) {}
  double value;
  bool is_integer;
};

constexpr int64_t kMostScalars = 9;

// The numbers of a step. None: the rule has no step with this learning rate.
struct Scalars {
  int64_t count = 0;
  int64_t integers = 0;  // bit i: the kernel takes values[i] as an i64, not as an f32
  double values[kMostScalars];

  Scalars(std::initializer_list<Scalar> all) {
    for (const Scalar& each : all) add(each);
  }
  void add(const Scalar& scalar) {
    integers |= int64_t{scalar.is_integer} << count;
    values[count++] = scalar.value;
  }
};

// 1 - beta^step. Only the power is taken in float64, where 1 ulp of it does not show in 1 - power.
inline float correction(double beta, int64_t step) {
  const double rounded = static_cast<float>(beta);
  return 1.0f - static_cast<float>(std::pow(rounded, static_cast<double>(step)));
}

// The same where the power is a product in float32, which gets a factor in each step, as in TF1.
//
// kBeta  which of a rule's betas it is
template <int kBeta>
float correction_by_product(double beta, int64_t step) {
  constexpr float kVanishes = 0x1p-25f;  // 1 - power is 1 from here on
  // Of the last step in this thread: the next one has a factor more.
  thread_local float factor = 0, power = 1;
  thread_local int64_t num_factors = 0;
  if (factor != static_cast<float>(beta) || num_factors > step) {
    factor = static_cast<float>(beta);
    power = 1;
    num_factors = 0;
  }
  for (; num_factors < step && power > kVanishes; ++num_factors) {
    const float next = power * factor;
    if (next == power) break;  // and stays so: it is rounded to what it was
    power = next;
  }
  return 1.0f - power;
}

struct UpdateRule {
  double weight_decay;

  // The part of a row that decays in a step.
  double decay(double rate) const { return rate * weight_decay; }
};

// Sparse group lasso (Yue et al., 2021): the learning rate is in the penalties too.
struct GroupRule : UpdateRule {
  double l1, l2, l21;

  bool has_step(double rate) const {
    const bool has_penalties = l1 != 0 || l2 != 0 || l21 != 0;
    return rate >= 0 || !has_penalties;
  }
};

// Zeiler, 2012, with the learning rate of Keras and TF1.
struct Adadelta : UpdateRule {
  double rho, epsilon;

  Scalars at(double rate, int64_t) const { return {rate, decay(rate), rho, 1 - rho, epsilon}; }
};

// Duchi, Hazan and Singer, 2011.
struct Adagrad : UpdateRule {
  double epsilon;
  Flag epsilon_inside_root;
  double initial_accumulator;

  Scalars at(double rate, int64_t) const {
    return {rate, decay(rate), epsilon, epsilon_inside_root};
  }
};

// One accumulator for a row (Mudigere et al., 2022), with the same numbers.
struct RowWiseAdagrad : Adagrad {};

// Dual averaging of the same paper, as TF1 has it: it counts the steps of l1 and l2.
struct AdagradDA : UpdateRule {
  double l1, l2, initial_accumulator, global_step;

  Scalars at(double rate, int64_t) const {
    return {rate, decay(rate), l1 * global_step, l2 * global_step};
  }
};

// Kingma and Ba, 2014, the efficient form of section 2, which Keras and TF1 have; Reddi et al.,
// 2018.
struct Adam : UpdateRule {
  double beta_1, beta_2, epsilon;
  Flag amsgrad, adaptive_epsilon, has_products, has_m;

  Scalars at(double rate, int64_t step) const {
    const float first =
        has_products ? correction_by_product<1>(beta_1, step) : correction(beta_1, step);
    const float second =
        has_products ? correction_by_product<2>(beta_2, step) : correction(beta_2, step);
    const float root = std::sqrt(second);
    const float alpha = static_cast<float>(rate) * root / first;
    const double added = adaptive_epsilon ? epsilon * root : epsilon;
    return {alpha, decay(rate), 1 - beta_1, 1 - beta_2, added};
  }
};

// Kingma and Ba, 2014, section 7.1.
struct Adamax : UpdateRule {
  double beta_1, beta_2, epsilon;

  Scalars at(double rate, int64_t step) const {
    const float corrected = static_cast<float>(rate) / correction(beta_1, step);
    return {corrected, decay(rate), 1 - beta_1, beta_2, epsilon};
  }
};

// McMahan et al., 2013; `beta` is of the paper, and adds to l2 as in Keras and TF1.
struct Ftrl : UpdateRule {
  double learning_rate_power, initial_accumulator, l1, l2, l2_shrinkage, beta;

  Scalars at(double rate, int64_t) const {
    if (!(rate > 0)) return {};  // it divides by it
    return {rate, decay(rate), -learning_rate_power, l1, l2 + beta / (2 * rate), l2_shrinkage};
  }
};

// Ftrl with a sparse group lasso, TFPlus' "Group Adagrad".
struct SparseGroupFtrl : Ftrl {
  double l21;

  Scalars at(double rate, int64_t step) const {
    Scalars scalars = Ftrl::at(rate, step);
    if (scalars.count > 0) scalars.add(l21);
    return scalars;
  }
};

// Adam with a sparse group lasso, TFPlus' GroupAdam of version 4; GroupAMSGrad has the same
// numbers.
struct GroupAdam : GroupRule {
  double beta_1, beta_2, epsilon;

  // As of Adam, but for the rate: TFPlus has its products in float64.
  Scalars at(double rate, int64_t step) const {
    if (!has_step(rate)) return {};
    const double root = std::sqrt(correction(beta_2, step));
    const double alpha = rate * root / correction(beta_1, step);
    return {alpha, decay(rate), 1 - beta_1, 1 - beta_2, epsilon, rate * l1, rate * l2, rate * l21};
  }
};

struct GroupAMSGrad : GroupAdam {};

// You et al., 2019, of each row by itself: the kernel multiplies the rate by a ratio of norms.
struct GroupLamb : GroupAdam {
  Scalars at(double rate, int64_t step) const {
    if (!has_step(rate)) return {};
    const double root = std::sqrt(correction(beta_2, step));
    const double corrected = root / correction(beta_1, step);
    return {rate,    corrected, decay(rate), 1 - beta_1, 1 - beta_2,
            epsilon, rate * l1, rate * l2,   rate * l21};
  }
};

// SGD with momentum and a sparse group lasso.
struct GroupMomentum : GroupRule {
  double momentum;
  Flag nesterov;

  Scalars at(double rate, int64_t) const {
    if (!has_step(rate)) return {};
    return {rate, decay(rate), momentum, nesterov, rate * l1, rate * l2, rate * l21};
  }
};

// Chen et al., 2023.
struct Lion : UpdateRule {
  double beta_1, beta_2;

  Scalars at(double rate, int64_t) const {
    return {rate, decay(rate), beta_1, 1 - beta_1, beta_2, 1 - beta_2};
  }
};

// SGD with momentum of Keras and of TF1, which `lr_in_state` tells apart.
struct Momentum : UpdateRule {
  double momentum;
  Flag nesterov, lr_in_state;

  Scalars at(double rate, int64_t) const {
    return {rate, decay(rate), momentum, nesterov, lr_in_state};
  }
};

// Dozat, 2016, with the schedule of the momentum that Keras has.
struct Nadam : UpdateRule {
  double beta_1, beta_2, epsilon, schedule_decay;

  Scalars at(double rate, int64_t step) const {
    const double now = momentum(step), coming = momentum(step + 1), product = product_to(step);
    // In float32 as TensorFlow has it. 1 - beta_2 is so too: the errors of the two, each 1e-5 of
    // it, cancel.
    const double one_minus_beta_2 = 1 - static_cast<double>(static_cast<float>(beta_2));
    return {rate,
            decay(rate),
            1 - beta_1,
            one_minus_beta_2,
            epsilon,
            coming / (1 - product * coming),
            (1 - now) / (1 - product),
            correction(beta_2, step)};
  }

  double momentum(int64_t step) const {
    return beta_1 * (1 - 0.5 * std::pow(0.96, schedule_decay * static_cast<double>(step)));
  }

  // The product of the momenta of all steps up to this one. It goes on from the last step of this
  // thread that is known of these settings.
  double product_to(int64_t step) const {
    struct Product {
      double beta_1, schedule_decay, value;
      int64_t step;
    };
    constexpr int kMostKnown = 8;
    static thread_local Product known[kMostKnown];  // of step 0: of no settings
    static thread_local int next = 0;
    Product* own = nullptr;
    for (Product& each : known)
      if (each.step > 0 && each.beta_1 == beta_1 && each.schedule_decay == schedule_decay)
        own = &each;
    if (own == nullptr) {
      own = &known[next];
      next = (next + 1) % kMostKnown;
      own->step = 0;
    }
    if (own->step == 0 || own->step > step) *own = {beta_1, schedule_decay, 1.0, 0};
    for (int64_t number = own->step + 1; number <= step; ++number) {
      own->value *= momentum(number);
      if (own->value < 1e-20) break;  // 1 - product is 1
    }
    own->step = step;
    return own->value;
  }
};

// Duchi, Hazan and Singer, 2011.
struct ProximalAdagrad : UpdateRule {
  double l1, l2, initial_accumulator;

  Scalars at(double rate, int64_t) const { return {rate, decay(rate), l1, l2}; }
};

// Duchi and Singer, 2009.
struct ProximalSGD : UpdateRule {
  double l1, l2;

  Scalars at(double rate, int64_t) const { return {rate, decay(rate), l1, l2}; }
};

// Keras and TF1.
struct RMSprop : UpdateRule {
  double rho, momentum, epsilon;
  Flag centered, epsilon_inside_root;
  double initial_rms;

  Scalars at(double rate, int64_t) const {
    return {rate, decay(rate), rho, 1 - rho, epsilon, momentum, epsilon_inside_root};
  }
};

// Liu et al., 2020.
struct RectifiedAdam : UpdateRule {
  double beta_1, beta_2, epsilon, sma_threshold;
  Flag amsgrad, nesterov;

  Scalars at(double rate, int64_t step) const {
    const double t = static_cast<double>(step);
    const double power = std::pow(beta_2, t);
    const double correction_1 = 1 - std::pow(beta_1, t), correction_2 = std::sqrt(1 - power);
    // How many gradients v is the mean of, and how many at most: rho of the paper.
    const double longest = 2 / (1 - beta_2) - 1;
    const double length = longest - 2 * t * power / (1 - power);
    double factor = 1, of_root = 0, divisor = 1;  // too little is known of v
    if (length >= sma_threshold) {
      const double known = (length - 4) * (length - 2) * longest;
      const double rectifier = std::sqrt(known / ((longest - 4) * (longest - 2) * length));
      factor = rectifier * correction_2;
      of_root = 1;
      divisor = epsilon * correction_2;
    }
    const double of_m = nesterov ? beta_1 : 1, of_gradient = nesterov ? 1 - beta_1 : 0;
    return {rate * factor / correction_1,
            decay(rate),
            1 - beta_1,
            1 - beta_2,
            of_m,
            of_gradient,
            of_root,
            divisor};
  }
};

// Defazio et al., 2024, as Keras has it.
struct ScheduleFreeAdamW : UpdateRule {
  double beta_1, beta_2, epsilon, warmup_steps;

  Scalars at(double rate, int64_t step) const {
    const double t = static_cast<double>(step);
    const double warm = warmup_steps != 0 && t / warmup_steps < 1 ? t / warmup_steps : 1;
    const float one_minus_beta_2 = 1.0f - static_cast<float>(beta_2);
    return {rate * warm, decay(rate), beta_1, one_minus_beta_2, epsilon, correction(beta_2, step),
            1 / t};
  }
};

struct SGD : UpdateRule {
  Scalars at(double rate, int64_t) const { return {rate, decay(rate)}; }
};

// A rule as whoever calls knows it: by the kernel that takes its steps.
struct Entry {
  const char* kernel;
  int64_t num_fields;
  Scalars (*at)(const double* fields, double rate, int64_t step);
};

template <class Rule>
Scalars scalars_of(const double* fields, double rate, int64_t step) {
  static_assert(std::is_trivially_copyable_v<Rule>);
  Rule rule;
  std::memcpy(&rule, fields, sizeof rule);
  return rule.at(rate, step);
}

template <class Rule>
constexpr Entry entry(const char* kernel) {
  return {kernel, sizeof(Rule) / sizeof(double), scalars_of<Rule>};
}

// The number of a rule is its place here: no file keeps it.
inline constexpr Entry kRules[] = {
    entry<Adadelta>("update_adadelta"),
    entry<Adagrad>("update_adagrad"),
    entry<AdagradDA>("update_adagrad_da"),
    entry<Adam>("update_adam"),
    entry<Adamax>("update_adamax"),
    entry<Ftrl>("update_ftrl"),
    entry<GroupAdam>("update_group_adam"),
    entry<GroupAMSGrad>("update_group_amsgrad"),
    entry<GroupLamb>("update_group_lamb"),
    entry<GroupMomentum>("update_group_momentum"),
    entry<Lion>("update_lion"),
    entry<Momentum>("update_momentum"),
    entry<Nadam>("update_nadam"),
    entry<ProximalAdagrad>("update_proximal_adagrad"),
    entry<ProximalSGD>("update_proximal_sgd"),
    entry<RMSprop>("update_rmsprop"),
    entry<RectifiedAdam>("update_rectified_adam"),
    entry<RowWiseAdagrad>("update_rowwise_adagrad"),
    entry<ScheduleFreeAdamW>("update_schedule_free_adamw"),
    entry<SGD>("update_sgd"),
    entry<SparseGroupFtrl>("update_sparse_group_ftrl"),
};
constexpr int64_t kNumRules = sizeof(kRules) / sizeof(kRules[0]);

}  // namespace sok::rules

#endif  // SOK_UPDATE_SCALARS_H_
