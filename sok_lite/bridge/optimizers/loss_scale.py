"""Optimizers that scale the loss, and skip steps with non-finite gradients.

The decision to skip is over the gradients of all variables on all ranks; the optimizer itself sees
only dense gradients. To skip, these become NaN, and the optimizer does the rest: it keeps its
variables and lowers its scale.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.keras3 import KERAS3
from sok_lite.bridge.static_variable import StaticVariable

_NAMES = {"LossScaleOptimizer", "LossScaleOptimizerV3"}
_ROOTS = {"keras", "tf_keras"}


class LossScale(NamedTuple):
    """How an optimizer that scales the loss treats gradients.

    `unscale` is their divisor; None: the program has unscaled them.
    """

    unscale: Any
    skips: bool
    counts_skipped: bool


def scales_loss(optimizer: Any) -> bool:
    """Whether an optimizer is a LossScaleOptimizer of Keras 3 or tf_keras."""
    root = type(optimizer).__module__.split(".")[0]
    names = {base.__name__ for base in type(optimizer).__mro__}
    return root in _ROOTS and bool(names & _NAMES)


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer in a LossScaleOptimizer; any other optimizer unchanged."""
    return optimizer.inner_optimizer if scales_loss(optimizer) else optimizer


def build(optimizer: Any, family: Family, variables: Iterable[Any]) -> None:
    """Creates the scale variable of a Keras 3 optimizer, before its first step.

    Before, it scales by a number, which would be a constant in a graph.
    """
    if family is KERAS3 and scales_loss(optimizer) and not optimizer.built:
        with tf.init_scope():
            optimizer.build(list(variables))


def check_built(optimizer: Any) -> None:
    """Raises ValueError if a graph would use a number for the scale."""
    if scales_loss(optimizer) and not optimizer.built and not tf.executing_eagerly():
        raise ValueError(
            "A LossScaleOptimizer of Keras 3 must be built before a tf.function scales a loss with "
            "it: its first scale would be a constant of the graph. Call its build(variables) with "
            "the dense variables, or minimize() of the wrapper."
        )


def loss_scale_of(
    optimizer: Any, family: Family, dense: Iterable[tuple[Any, Any]]
) -> LossScale | None:
    """Returns what an optimizer does in this step; None if it does not scale the loss.

    `dense` has all variables except dynamic tables. Raises ValueError if it has no scale yet, in a
    graph, and NotImplementedError if no dense gradient could show it a NaN.
    """
    if not scales_loss(optimizer):
        return None
    dense = list(dense)
    if family is KERAS3:
        check_built(optimizer)
        build(optimizer, family, [var for _, var in dense])
        scale = LossScale(tf.convert_to_tensor(optimizer.dynamic_scale), True, False)
    else:
        scale = LossScale(None, bool(optimizer.dynamic), True)
    if scale.skips and not any(_shows_nan(*pair) for pair in dense):
        raise NotImplementedError(
            f"{type(optimizer).__name__} changes its scale in a step of dense variables only, and "
            "this call has none with a dense gradient. Train a dense variable in the same call, "
            "or use a fixed scale (loss_scale_factor, dynamic=False)."
        )
    return scale


def _shows_nan(grad: Any, variable: Any) -> bool:
    """Whether a gradient has elements on every rank, in every step."""
    is_sparse = isinstance(grad, tf.IndexedSlices) or isinstance(variable, StaticVariable)
    return grad is not None and not is_sparse
