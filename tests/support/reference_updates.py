"""Every update rule once more, in plain NumPy float64 and in the words of the papers.

The oracle of the update kernels; shares no code with sok_lite. A rule is a function of
(w, states, g, lr, step, **hyper_parameters): `w` (u, dim) and the arrays in `states` are float64
and changed in place; `step` is 1 for the first update.
"""

import functools
from types import SimpleNamespace

import numpy as np


def rule(*states, **defaults):
    """Gives a rule its states by name, its hyper-parameters as `h`, with these defaults, and begins
    it with a decoupled weight decay, unless it has its own."""

    def decorate(function):
        @functools.wraps(function)
        def update(w, states, g, lr, step, **hyper):
            assert hyper.keys() <= {*defaults, "weight_decay"}, f"{function.__name__}: {hyper}"
            h = SimpleNamespace(**{"weight_decay": 0.0} | defaults | hyper)
            if "weight_decay" not in defaults:
                w -= w * (h.weight_decay * lr)
            function(w, states, g, lr, step, h)

        update.states = states
        return update

    return decorate


@rule()
def sgd(w, states, g, lr, step, h):
    w -= lr * g


@rule("momentum", momentum=0.9, nesterov=False, lr_in_state=True)
def momentum(w, states, g, lr, step, h):
    velocity = states["momentum"]
    if h.lr_in_state:  # Keras: the velocity is a step that was already taken
        velocity[:] = h.momentum * velocity - lr * g
        w += h.momentum * velocity - lr * g if h.nesterov else velocity
    else:  # tf.compat.v1 MomentumOptimizer: the velocity is a gradient
        velocity[:] = h.momentum * velocity + g
        w -= lr * g + lr * h.momentum * velocity if h.nesterov else lr * velocity


@rule("accumulator", epsilon=1e-7, epsilon_inside_root=True, initial_accumulator=0.1)
def adagrad(w, states, g, lr, step, h):
    accumulator = states["accumulator"]
    accumulator += g**2
    w -= lr * g / _root(accumulator, h)


@rule("accumulator", epsilon=1e-7, epsilon_inside_root=True, initial_accumulator=0.1)
def rowwiseadagrad(w, states, g, lr, step, h):
    accumulator = states["accumulator"]  # (u, 1)
    for row in range(len(w)):
        accumulator[row, 0] += sum(x * x for x in g[row]) / len(g[row])
        w[row] -= lr * g[row] / _root(accumulator[row, 0], h)


def _root(x, h):
    return np.sqrt(x + h.epsilon) if h.epsilon_inside_root else np.sqrt(x) + h.epsilon


def _moments(states, g, h, has_m=True):
    """Moves the averages of gradients and squares; returns them, of AMSGrad the largest."""
    m, v = states["m"] if has_m else np.zeros_like(g), states["v"]
    m[:] = h.beta_1 * m + (1 - h.beta_1) * g
    v[:] = h.beta_2 * v + (1 - h.beta_2) * g**2
    if getattr(h, "amsgrad", False):
        states["vhat"][:] = np.maximum(states["vhat"], v)
        v = states["vhat"]
    return m, v


def _correction(h, step):
    return np.sqrt(1 - h.beta_2**step) / (1 - h.beta_1**step)


_ADAM = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}


# With products in place of powers float64 gives the same.
@rule(
    "m", "v", "vhat", **_ADAM, amsgrad=False, adaptive_epsilon=False, has_products=False, has_m=True
)
def adam(w, states, g, lr, step, h):
    m, v = _moments(states, g, h, h.has_m)
    epsilon_hat = h.epsilon * (np.sqrt(1 - h.beta_2**step) if h.adaptive_epsilon else 1)
    w -= lr * _correction(h, step) * m / (np.sqrt(v) + epsilon_hat)


def adamw(w, states, g, lr, step, weight_decay=0.004, **hyper):
    adam(w, states, g, lr, step, weight_decay=weight_decay, **hyper)


@rule("m", "v", "vhat", **_ADAM, amsgrad=False, sma_threshold=5.0, nesterov=False)
def rectifiedadam(w, states, g, lr, step, h):
    m, v = _moments(states, g, h)
    mean = (h.beta_1 * m + (1 - h.beta_1) * g if h.nesterov else m) / (1 - h.beta_1**step)
    rho_inf = 2 / (1 - h.beta_2) - 1
    rho = rho_inf - 2 * step * h.beta_2**step / (1 - h.beta_2**step)
    if rho < h.sma_threshold:
        w -= lr * mean
        return
    r = np.sqrt((rho - 4) / (rho_inf - 4) * ((rho - 2) / (rho_inf - 2)) * (rho_inf / rho))
    w -= lr * r * mean / (np.sqrt(v / (1 - h.beta_2**step)) + h.epsilon)


_RMS = {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False}


@rule("rms", "mean_grad", "momentum", **_RMS, epsilon_inside_root=True, initial_rms=0.0)
def rmsprop(w, states, g, lr, step, h):
    variance = states["rms"]
    variance[:] = h.rho * variance + (1 - h.rho) * g**2
    if h.centered:
        mean_grad = states["mean_grad"]
        mean_grad[:] = h.rho * mean_grad + (1 - h.rho) * g
        variance = variance - mean_grad**2
    increment = lr * g / _root(variance, h)
    if h.momentum > 0:
        states["momentum"][:] = h.momentum * states["momentum"] + increment
        increment = states["momentum"]
    w -= increment


_FTRL = {"learning_rate_power": -0.5, "initial_accumulator": 0.1, "l1": 0.0, "l2": 0.0}
_FTRL |= {"l2_shrinkage": 0.0, "beta": 0.0}


def _follow_the_leader(w, states, g, lr, h):
    """Moves both states; returns what the linear one is divided by."""
    accumulator, linear = states["accumulator"], states["linear"]
    old_root = accumulator**-h.learning_rate_power
    accumulator += g**2
    root = accumulator**-h.learning_rate_power
    linear += g + 2 * h.l2_shrinkage * w - (root - old_root) / lr * w
    return root / lr + 2 * (h.l2 + h.beta / (2 * lr))


@rule("accumulator", "linear", **_FTRL)
def ftrl(w, states, g, lr, step, h):
    divisor, linear = _follow_the_leader(w, states, g, lr, h), states["linear"]
    w[:] = np.where(np.abs(linear) > h.l1, (np.sign(linear) * h.l1 - linear) / divisor, 0.0)


@rule("m", "v", **_ADAM)
def adamax(w, states, g, lr, step, h):
    m, v = states["m"], states["v"]
    m[:] = h.beta_1 * m + (1 - h.beta_1) * g
    v[:] = np.maximum(h.beta_2 * v, np.abs(g))
    w -= lr * m / ((1 - h.beta_1**step) * (v + h.epsilon))


@rule("accumulator", "delta_accumulator", rho=0.95, epsilon=1e-7)
def adadelta(w, states, g, lr, step, h):
    squares, steps = states["accumulator"], states["delta_accumulator"]
    squares[:] = h.rho * squares + (1 - h.rho) * g**2
    delta = np.sqrt((steps + h.epsilon) / (squares + h.epsilon)) * g
    steps[:] = h.rho * steps + (1 - h.rho) * delta**2
    w -= lr * delta


@rule("m", "v", **_ADAM, schedule_decay=1.0)
def nadam(w, states, g, lr, step, h):
    momenta = h.beta_1 * (1 - 0.5 * 0.96 ** (h.schedule_decay * np.arange(1, step + 2)))
    so_far, with_next = momenta[:-1].prod(), momenta.prod()
    m, v = _moments(states, g, h)
    ahead = momenta[-1] * m / (1 - with_next) + (1 - momenta[-2]) * g / (1 - so_far)
    w -= lr * ahead / (np.sqrt(v / (1 - h.beta_2**step)) + h.epsilon)


@rule("m", beta_1=0.9, beta_2=0.99)
def lion(w, states, g, lr, step, h):
    m = states["m"]
    w -= lr * np.sign(h.beta_1 * m + (1 - h.beta_1) * g)
    m[:] = h.beta_2 * m + (1 - h.beta_2) * g


def _nearest(p, lr, h):
    """The x that makes l1 |x| + l2 x^2 / 2 + (x - p)^2 / (2 lr) least."""
    return np.sign(p) * np.maximum(np.abs(p) - lr * h.l1, 0) / (1 + lr * h.l2)


@rule(l1=0.0, l2=0.0)
def proximalsgd(w, states, g, lr, step, h):
    w[:] = _nearest(w - lr * g, lr, h)


@rule("accumulator", l1=0.0, l2=0.0, initial_accumulator=0.1)
def proximaladagrad(w, states, g, lr, step, h):
    accumulator = states["accumulator"]
    accumulator += g**2
    rate = lr / np.sqrt(accumulator)
    w[:] = _nearest(w - rate * g, rate, h)


_DUAL = {"l1": 0.0, "l2": 0.0, "initial_accumulator": 0.1, "global_step": 1.0, "weight_decay": 0.0}


@rule("gradient_accumulator", "gradient_squared_accumulator", **_DUAL)
def adagradda(w, states, g, lr, step, h):
    total, squares = states["gradient_accumulator"], states["gradient_squared_accumulator"]
    total += g
    squares += g**2
    left = np.sign(total) * np.maximum(np.abs(total) - h.l1 * h.global_step, 0)
    w[:] = -lr * left / (h.l2 * h.global_step * lr + np.sqrt(squares))


@rule("ahead", "v", beta_1=0.9, beta_2=0.999, epsilon=1e-8, warmup_steps=0.0, weight_decay=0.0)
def schedulefreeadamw(w, states, g, lr, step, h):
    v = states["v"]
    z = w + states["ahead"]
    w -= w * (h.weight_decay * lr)
    v[:] = h.beta_2 * v + (1 - h.beta_2) * g**2
    rate = lr * min(1.0, step / h.warmup_steps) if h.warmup_steps else lr
    z -= rate * g / (np.sqrt(v / (1 - h.beta_2**step)) + h.epsilon)
    x = (w - (1 - h.beta_1) * z) / h.beta_1  # the paper has the z before this step
    x += (z - x) / step
    w[:] = (1 - h.beta_1) * z + h.beta_1 * x
    states["ahead"][:] = z - w


# -------------------------------------------------------------------- groups


_GROUP = {"l1": 0.0, "l2": 0.0, "l21": 0.0, "weight_decay": 0.0}
_GROUP_ADAM = _ADAM | _GROUP


def _sparse_group(w, z, divisor, l1, l21):
    """The last two lines of Algorithm 1 of arXiv 2107.14432; a row is a group."""
    s = np.where(np.abs(z) <= l1, 0.0, np.sign(z) * l1 - z)
    norm = np.sqrt((s**2).sum(axis=1, keepdims=True))
    if l21 > 0:
        is_left = norm > np.sqrt(w.shape[1]) * l21
        s = np.where(is_left, s * (1 - np.sqrt(w.shape[1]) * l21 / np.where(is_left, norm, 1)), 0.0)
    w[:] = s / divisor


def _grouped(w, states, before, lr, h, loss, divisor, old_divisor):
    """Moves z, the linear state, and the rows. A row that was never updated has had no divisor,
    whatever its initial value."""
    never = np.all([(state == 0).all(axis=1) for state in before.values()], axis=0)[:, None]
    decayed = w * (1 - h.weight_decay * lr)
    states["linear"] += loss - (divisor * decayed - np.where(never, 0.0, old_divisor) * w)
    _sparse_group(w, states["linear"], divisor + 2 * lr * h.l2, lr * h.l1, lr * h.l21)


def _group_adam(w, states, g, lr, step, h):
    before = {name: state.copy() for name, state in states.items()}
    m, v = _moments(states, g, h)
    old = before["vhat" if h.amsgrad else "v"]
    divisors = (np.sqrt(each) + h.epsilon for each in (v, old))
    _grouped(w, states, before, lr, h, lr * _correction(h, step) * m, *divisors)


@rule("m", "v", "linear", **_GROUP_ADAM, amsgrad=False)
def groupadam(w, states, g, lr, step, h):
    _group_adam(w, states, g, lr, step, h)


@rule("m", "v", "vhat", "linear", **_GROUP_ADAM, amsgrad=True)
def groupamsgrad(w, states, g, lr, step, h):
    _group_adam(w, states, g, lr, step, h)


def _trust_ratio(w, r):
    size, length = (np.sqrt((x**2).sum(axis=1, keepdims=True)) for x in (w, r))
    return np.where((size > 0) & (length > 0), size / (length + 1e-8), 1.0)


@rule("m", "v", "linear", **_GROUP_ADAM)
def grouplamb(w, states, g, lr, step, h):
    before = {name: state.copy() for name, state in states.items()}
    m, v = _moments(states, g, h)
    divisors = [np.sqrt(each) + h.epsilon for each in (v, before["v"])]
    loss = _correction(h, step) * m
    ratio = _trust_ratio(w * (1 - h.weight_decay * lr), loss / divisors[0])
    _grouped(w, states, before, lr, h, lr * ratio * loss, *divisors)


@rule("momentum", "linear", momentum=0.9, nesterov=False, **_GROUP)
def groupmomentum(w, states, g, lr, step, h):
    before = {name: state.copy() for name, state in states.items()}
    velocity, one = states["momentum"], np.ones_like(w)
    velocity[:] = h.momentum * velocity - lr * g
    loss = lr * g - h.momentum * velocity if h.nesterov else -velocity
    _grouped(w, states, before, lr, h, loss, one, one)


@rule("accumulator", "linear", **_FTRL, l21=0.0)
def sparsegroupftrl(w, states, g, lr, step, h):
    divisor = _follow_the_leader(w, states, g, lr, h)
    unlearned = np.where(divisor == 0, w, 0.0)
    _sparse_group(w, states["linear"], np.where(divisor == 0, 1.0, divisor), h.l1, h.l21)
    w[:] = np.where(divisor == 0, unlearned, w)
