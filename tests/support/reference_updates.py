"""Every update rule once more, in plain NumPy float64 and in the words of the papers.

The oracle of the update kernels; shares no code with sok_lite. A rule is a function of
(w, states, g, lr, step, **hyper_parameters): `w` (u, dim) and the arrays in `states` are float64
and changed in place; `step` is 1 for the first update.
"""

import functools

import numpy as np


def decayed(rule):
    """Has a rule begin with a decoupled weight decay."""

    @functools.wraps(rule)
    def begun(w, states, g, lr, step, weight_decay=0.0, **hyper):
        w -= w * (weight_decay * lr)
        rule(w, states, g, lr, step, **hyper)

    return begun


@decayed
def sgd(w, states, g, lr, step):
    w -= lr * g


@decayed
def momentum(w, states, g, lr, step, momentum=0.9, nesterov=False, lr_in_state=True):
    velocity = states["momentum"]
    if lr_in_state:  # Keras: the velocity is a step that was already taken
        velocity[:] = momentum * velocity - lr * g
        w += momentum * velocity - lr * g if nesterov else velocity
    else:  # tf.compat.v1 MomentumOptimizer: the velocity is a gradient
        velocity[:] = momentum * velocity + g
        w -= lr * g + lr * momentum * velocity if nesterov else lr * velocity


@decayed
def adagrad(
    w, states, g, lr, step, epsilon=1e-7, epsilon_inside_root=True, initial_accumulator=0.1
):
    accumulator = states["accumulator"]
    accumulator += g**2
    if epsilon_inside_root:
        w -= lr * g / np.sqrt(accumulator + epsilon)
    else:
        w -= lr * g / (np.sqrt(accumulator) + epsilon)


@decayed
def rowwiseadagrad(
    w, states, g, lr, step, epsilon=1e-7, epsilon_inside_root=True, initial_accumulator=0.1
):
    accumulator = states["accumulator"]  # (u, 1)
    for row in range(len(w)):
        accumulator[row, 0] += sum(x * x for x in g[row]) / len(g[row])
        of_row = accumulator[row, 0]
        inside, outside = (epsilon, 0) if epsilon_inside_root else (0, epsilon)
        w[row] -= lr * g[row] / (np.sqrt(of_row + inside) + outside)


@decayed
def adam(
    w,
    states,
    g,
    lr,
    step,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    amsgrad=False,
    adaptive_epsilon=False,
    has_products=False,  # of what is computed in float64 here the powers are too
    has_m=True,
):
    m, v = states["m"] if has_m else np.zeros_like(w), states["v"]
    m[:] = beta_1 * m + (1 - beta_1) * g
    v[:] = beta_2 * v + (1 - beta_2) * g**2
    if amsgrad:
        states["vhat"][:] = np.maximum(states["vhat"], v)
        v = states["vhat"]
    alpha = lr * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    epsilon_hat = epsilon * np.sqrt(1 - beta_2**step) if adaptive_epsilon else epsilon
    w -= alpha * m / (np.sqrt(v) + epsilon_hat)


@decayed
def rectifiedadam(
    w,
    states,
    g,
    lr,
    step,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    sma_threshold=5.0,
    amsgrad=False,
    nesterov=False,
):
    m, v = states["m"], states["v"]
    m[:] = beta_1 * m + (1 - beta_1) * g
    v[:] = beta_2 * v + (1 - beta_2) * g**2
    if amsgrad:
        states["vhat"][:] = np.maximum(states["vhat"], v)
        v = states["vhat"]
    mean = (beta_1 * m + (1 - beta_1) * g if nesterov else m) / (1 - beta_1**step)
    rho_inf = 2 / (1 - beta_2) - 1
    rho = rho_inf - 2 * step * beta_2**step / (1 - beta_2**step)
    if rho < sma_threshold:
        w -= lr * mean
        return
    r = np.sqrt((rho - 4) / (rho_inf - 4) * ((rho - 2) / (rho_inf - 2)) * (rho_inf / rho))
    w -= lr * r * mean / (np.sqrt(v / (1 - beta_2**step)) + epsilon)


def adamw(w, states, g, lr, step, weight_decay=0.004, **hyper):
    adam(w, states, g, lr, step, weight_decay=weight_decay, **hyper)


@decayed
def rmsprop(
    w,
    states,
    g,
    lr,
    step,
    rho=0.9,
    momentum=0.0,
    epsilon=1e-7,
    centered=False,
    epsilon_inside_root=True,
    initial_rms=0.0,
):
    rms = states["rms"]
    rms[:] = rho * rms + (1 - rho) * g**2
    variance = rms
    if centered:
        mean_grad = states["mean_grad"]
        mean_grad[:] = rho * mean_grad + (1 - rho) * g
        variance = rms - mean_grad**2
    if epsilon_inside_root:
        increment = lr * g / np.sqrt(variance + epsilon)
    else:
        increment = lr * g / (np.sqrt(variance) + epsilon)
    if momentum > 0:
        states["momentum"][:] = momentum * states["momentum"] + increment
        increment = states["momentum"]
    w -= increment


@decayed
def ftrl(
    w,
    states,
    g,
    lr,
    step,
    learning_rate_power=-0.5,
    initial_accumulator=0.1,
    l1=0.0,
    l2=0.0,
    l2_shrinkage=0.0,
    beta=0.0,
):
    accumulator, linear = states["accumulator"], states["linear"]
    new_accumulator = accumulator + g**2
    sigma = (new_accumulator**-learning_rate_power - accumulator**-learning_rate_power) / lr
    linear += g + 2 * l2_shrinkage * w - sigma * w
    quadratic = new_accumulator**-learning_rate_power / lr + 2 * (l2 + beta / (2 * lr))
    w[:] = np.where(np.abs(linear) > l1, (np.sign(linear) * l1 - linear) / quadratic, 0.0)
    accumulator[:] = new_accumulator


@decayed
def adamax(w, states, g, lr, step, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    m, v = states["m"], states["v"]
    m[:] = beta_1 * m + (1 - beta_1) * g
    v[:] = np.maximum(beta_2 * v, np.abs(g))
    w -= lr * m / ((1 - beta_1**step) * (v + epsilon))


@decayed
def adadelta(w, states, g, lr, step, rho=0.95, epsilon=1e-7):
    squares, steps = states["accumulator"], states["delta_accumulator"]
    squares[:] = rho * squares + (1 - rho) * g**2
    delta = np.sqrt((steps + epsilon) / (squares + epsilon)) * g
    steps[:] = rho * steps + (1 - rho) * delta**2
    w -= lr * delta


@decayed
def nadam(w, states, g, lr, step, beta_1=0.9, beta_2=0.999, epsilon=1e-7, schedule_decay=1.0):
    m, v = states["m"], states["v"]
    momenta = beta_1 * (1 - 0.5 * 0.96 ** (schedule_decay * np.arange(1, step + 2)))
    so_far, with_next = momenta[:-1].prod(), momenta.prod()
    m[:] = beta_1 * m + (1 - beta_1) * g
    v[:] = beta_2 * v + (1 - beta_2) * g**2
    ahead = momenta[-1] * m / (1 - with_next) + (1 - momenta[-2]) * g / (1 - so_far)
    w -= lr * ahead / (np.sqrt(v / (1 - beta_2**step)) + epsilon)


@decayed
def lion(w, states, g, lr, step, beta_1=0.9, beta_2=0.99):
    m = states["m"]
    w -= lr * np.sign(beta_1 * m + (1 - beta_1) * g)
    m[:] = beta_2 * m + (1 - beta_2) * g


def _nearest(p, lr, l1, l2):
    """The x that makes l1 |x| + l2 x^2 / 2 + (x - p)^2 / (2 lr) least."""
    return np.sign(p) * np.maximum(np.abs(p) - lr * l1, 0) / (1 + lr * l2)


@decayed
def proximalsgd(w, states, g, lr, step, l1=0.0, l2=0.0):
    w[:] = _nearest(w - lr * g, lr, l1, l2)


@decayed
def proximaladagrad(w, states, g, lr, step, l1=0.0, l2=0.0, initial_accumulator=0.1):
    accumulator = states["accumulator"]
    accumulator += g**2
    rate = lr / np.sqrt(accumulator)
    w[:] = _nearest(w - rate * g, rate, l1, l2)


def adagradda(
    w,
    states,
    g,
    lr,
    step,
    l1=0.0,
    l2=0.0,
    initial_accumulator=0.1,
    global_step=1.0,
    weight_decay=0.0,
):
    total, squares = states["gradient_accumulator"], states["gradient_squared_accumulator"]
    total += g
    squares += g**2
    left = np.sign(total) * np.maximum(np.abs(total) - l1 * global_step, 0)
    w[:] = -lr * left / (l2 * global_step * lr + np.sqrt(squares))


def schedulefreeadamw(
    w,
    states,
    g,
    lr,
    step,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-8,
    warmup_steps=0.0,
    weight_decay=0.0,
):
    v = states["v"]
    z = w + states["ahead"]
    w -= w * (weight_decay * lr)
    v[:] = beta_2 * v + (1 - beta_2) * g**2
    rate = lr * min(1.0, step / warmup_steps) if warmup_steps else lr
    z -= rate * g / (np.sqrt(v / (1 - beta_2**step)) + epsilon)
    x = (w - (1 - beta_1) * z) / beta_1  # the paper has the z before this step
    x += (z - x) / step
    w[:] = (1 - beta_1) * z + beta_1 * x
    states["ahead"][:] = z - w


def _sparse_group(w, z, divisor, l1, l21):
    """The last two lines of Algorithm 1 of arXiv 2107.14432; a row is a group."""
    s = np.where(np.abs(z) <= l1, 0.0, np.sign(z) * l1 - z)
    norm = np.sqrt((s**2).sum(axis=1, keepdims=True))
    if l21 > 0:
        is_left = norm > np.sqrt(w.shape[1]) * l21
        s = np.where(is_left, s * (1 - np.sqrt(w.shape[1]) * l21 / np.where(is_left, norm, 1)), 0.0)
    w[:] = s / divisor


def _growth(w, before, step, decayed, divisor, old_divisor):
    """Of z. A row that was never updated has had no divisor, whatever its initial value."""
    never = np.all([(state == 0).all(axis=1) for state in before.values()], axis=0)[:, None]
    return step - (divisor * decayed - np.where(never, 0.0, old_divisor) * w)


def groupadam(
    w,
    states,
    g,
    lr,
    step,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    l1=0.0,
    l2=0.0,
    l21=0.0,
    weight_decay=0.0,
    with_vhat=False,
):
    before = {name: state.copy() for name, state in states.items()}
    m, v = states["m"], states["v"]
    m[:] = beta_1 * m + (1 - beta_1) * g
    v[:] = beta_2 * v + (1 - beta_2) * g**2
    if with_vhat:
        states["vhat"][:] = np.maximum(states["vhat"], v)
    scale = "vhat" if with_vhat else "v"
    divisor, old = (np.sqrt(each[scale]) + epsilon for each in (states, before))
    alpha = lr * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    states["linear"] += _growth(w, before, alpha * m, w * (1 - weight_decay * lr), divisor, old)
    _sparse_group(w, states["linear"], divisor + 2 * lr * l2, lr * l1, lr * l21)


def groupamsgrad(w, states, g, lr, step, **hyper):
    groupadam(w, states, g, lr, step, with_vhat=True, **hyper)


def _trust_ratio(w, r):
    size, length = (np.sqrt((x**2).sum(axis=1, keepdims=True)) for x in (w, r))
    return np.where((size > 0) & (length > 0), size / (length + 1e-8), 1.0)


def grouplamb(
    w,
    states,
    g,
    lr,
    step,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    l1=0.0,
    l2=0.0,
    l21=0.0,
    weight_decay=0.0,
):
    before = {name: state.copy() for name, state in states.items()}
    m, v = states["m"], states["v"]
    m[:] = beta_1 * m + (1 - beta_1) * g
    v[:] = beta_2 * v + (1 - beta_2) * g**2
    correction = np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    divisor, old = np.sqrt(v) + epsilon, np.sqrt(before["v"]) + epsilon
    decayed = w * (1 - weight_decay * lr)
    ratio = _trust_ratio(decayed, correction * m / divisor)
    states["linear"] += _growth(w, before, lr * ratio * correction * m, decayed, divisor, old)
    _sparse_group(w, states["linear"], divisor + 2 * lr * l2, lr * l1, lr * l21)


def groupmomentum(
    w, states, g, lr, step, momentum=0.9, nesterov=False, l1=0.0, l2=0.0, l21=0.0, weight_decay=0.0
):
    before = {name: state.copy() for name, state in states.items()}
    velocity = states["momentum"]
    velocity[:] = momentum * velocity - lr * g
    loss = lr * g - momentum * velocity if nesterov else -velocity
    one = np.ones_like(w)
    states["linear"] += _growth(w, before, loss, w * (1 - weight_decay * lr), one, one)
    _sparse_group(w, states["linear"], 1 + 2 * lr * l2, lr * l1, lr * l21)


@decayed
def sparsegroupftrl(
    w,
    states,
    g,
    lr,
    step,
    learning_rate_power=-0.5,
    initial_accumulator=0.1,
    l1=0.0,
    l2=0.0,
    l2_shrinkage=0.0,
    beta=0.0,
    l21=0.0,
):
    accumulator, linear = states["accumulator"], states["linear"]
    new_accumulator = accumulator + g**2
    root, old_root = new_accumulator**-learning_rate_power, accumulator**-learning_rate_power
    linear += g + 2 * l2_shrinkage * w - (root - old_root) / lr * w
    divisor = root / lr + 2 * (l2 + beta / (2 * lr))
    unlearned = np.where(divisor == 0, w, 0.0)
    _sparse_group(w, linear, np.where(divisor == 0, 1.0, divisor), l1, l21)
    w[:] = np.where(divisor == 0, unlearned, w)
    accumulator[:] = new_accumulator
