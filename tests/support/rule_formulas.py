"""What the kernels of update rules are called with, in Python's floats and NumPy's float32.

The oracle of kernels/update/scalars.h. Each function is named as its rule and takes the rule,
learning rate and step; float32 is where TensorFlow has it.
"""

import math

import numpy as np

ONE = np.float32(1)


def scalars(rule, learning_rate, step):
    """Returns the numbers of a step, in the kernel's order: ints where it takes i64."""
    return globals()[type(rule).__name__.lower()](rule, learning_rate, step)


def decay(rule, learning_rate):
    return learning_rate * rule.weight_decay


def power(beta, step):
    return np.float32(float(np.float32(beta)) ** step)


def product(beta, step):
    """A power as a product, which ends where it stays as it is, or is nothing beside 1."""
    factor = result = np.float32(beta)
    for _ in range(step - 1):
        before, result = result, result * factor
        if result == before or result < 1e-9:
            break
    return result


def corrections(rule, step):
    if getattr(rule, "has_products", False):
        return ONE - product(rule.beta_1, step), np.sqrt(ONE - product(rule.beta_2, step))
    return ONE - power(rule.beta_1, step), np.sqrt(ONE - power(rule.beta_2, step))


def penalties(rule, learning_rate):
    if learning_rate < 0 and (rule.l1 or rule.l2 or rule.l21):
        raise ValueError
    return learning_rate * rule.l1, learning_rate * rule.l2, learning_rate * rule.l21


def adadelta(rule, learning_rate, step):
    return learning_rate, decay(rule, learning_rate), rule.rho, 1 - rule.rho, rule.epsilon


def adagrad(rule, learning_rate, step):
    how = int(rule.epsilon_inside_root)
    return learning_rate, decay(rule, learning_rate), rule.epsilon, how


rowwiseadagrad = adagrad


def adagradda(rule, learning_rate, step):
    l1, l2 = rule.l1 * rule.global_step, rule.l2 * rule.global_step
    return learning_rate, decay(rule, learning_rate), l1, l2


def adam(rule, learning_rate, step):
    correction_1, correction_2 = corrections(rule, step)
    alpha = np.float32(learning_rate) * correction_2 / correction_1
    epsilon = rule.epsilon * float(correction_2) if rule.adaptive_epsilon else rule.epsilon
    betas = 1 - rule.beta_1, 1 - rule.beta_2
    return float(alpha), decay(rule, learning_rate), *betas, epsilon


adamw = adam


def adamax(rule, learning_rate, step):
    rate = float(np.float32(learning_rate) / (ONE - power(rule.beta_1, step)))
    return rate, decay(rule, learning_rate), 1 - rule.beta_1, rule.beta_2, rule.epsilon


def ftrl(rule, learning_rate, step):
    if learning_rate <= 0:
        raise ValueError
    l2 = rule.l2 + rule.beta / (2 * learning_rate)
    regularization = -rule.learning_rate_power, rule.l1, l2, rule.l2_shrinkage
    return learning_rate, decay(rule, learning_rate), *regularization


def sparsegroupftrl(rule, learning_rate, step):
    return *ftrl(rule, learning_rate, step), rule.l21


def groupadam(rule, learning_rate, step):
    correction_1, correction_2 = corrections(rule, step)
    return (
        float(learning_rate * np.float64(correction_2) / np.float64(correction_1)),
        decay(rule, learning_rate),
        1 - rule.beta_1,
        1 - rule.beta_2,
        rule.epsilon,
        *penalties(rule, learning_rate),
    )


groupamsgrad = groupadam


def grouplamb(rule, learning_rate, step):
    correction_1, correction_2 = corrections(rule, step)
    _, *rest = groupadam(rule, learning_rate, step)
    return learning_rate, float(np.float64(correction_2) / np.float64(correction_1)), *rest


def groupmomentum(rule, learning_rate, step):
    how = rule.momentum, int(rule.nesterov)
    return learning_rate, decay(rule, learning_rate), *how, *penalties(rule, learning_rate)


def lion(rule, learning_rate, step):
    betas = rule.beta_1, 1 - rule.beta_1, rule.beta_2, 1 - rule.beta_2
    return learning_rate, decay(rule, learning_rate), *betas


def momentum(rule, learning_rate, step):
    how = rule.momentum, int(rule.nesterov), int(rule.lr_in_state)
    return learning_rate, decay(rule, learning_rate), *how


def nadam(rule, learning_rate, step):
    def momentum(number):
        return rule.beta_1 * (1 - 0.5 * 0.96 ** (rule.schedule_decay * number))

    product = 1.0
    for number in range(1, step + 1):
        product *= momentum(number)
        if product < 1e-20:  # 1 - product is 1
            break
    coming, beta_2 = momentum(step + 1), float(np.float32(rule.beta_2))
    return (
        learning_rate,
        decay(rule, learning_rate),
        1 - rule.beta_1,
        1 - beta_2,
        rule.epsilon,
        coming / (1 - product * coming),
        (1 - momentum(step)) / (1 - product),
        float(ONE - power(rule.beta_2, step)),
    )


def proximaladagrad(rule, learning_rate, step):
    return learning_rate, decay(rule, learning_rate), rule.l1, rule.l2


proximalsgd = proximaladagrad


def rectifiedadam(rule, learning_rate, step):
    power = rule.beta_2**step
    correction_1, correction_2 = 1 - rule.beta_1**step, math.sqrt(1 - power)
    longest = 2 / (1 - rule.beta_2) - 1
    length = longest - 2 * step * power / (1 - power)
    factor, of_root, divisor = 1.0, 0.0, 1.0
    if length >= rule.sma_threshold:
        known = (length - 4) * (length - 2) * longest
        rectifier = math.sqrt(known / ((longest - 4) * (longest - 2) * length))
        factor, of_root, divisor = rectifier * correction_2, 1.0, rule.epsilon * correction_2
    return (
        learning_rate * factor / correction_1,
        decay(rule, learning_rate),
        1 - rule.beta_1,
        1 - rule.beta_2,
        *((rule.beta_1, 1 - rule.beta_1) if rule.nesterov else (1.0, 0.0)),
        of_root,
        divisor,
    )


def rmsprop(rule, learning_rate, step):
    how = rule.epsilon, rule.momentum, int(rule.epsilon_inside_root)
    return learning_rate, decay(rule, learning_rate), rule.rho, 1 - rule.rho, *how


def schedulefreeadamw(rule, learning_rate, step):
    warm = min(step / rule.warmup_steps, 1.0) if rule.warmup_steps else 1.0
    return (
        learning_rate * warm,
        decay(rule, learning_rate),
        rule.beta_1,
        float(ONE - np.float32(rule.beta_2)),
        rule.epsilon,
        float(ONE - power(rule.beta_2, step)),
        1 / step,
    )


def sgd(rule, learning_rate, step):
    return learning_rate, decay(rule, learning_rate)
