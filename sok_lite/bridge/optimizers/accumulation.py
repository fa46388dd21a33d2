"""Gradients of several batches in one step: `gradient_accumulation_steps` of Keras 3.

Keras adds up a dense gradient for each variable. Those of a table are kept as they come, on the
rank that has them, and its rows move by their mean when the dense variables do.
"""

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, plan_set
from sok_lite.bridge.optimizers.changes import changes_of
from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.loss_scale import inner_of, scales_loss
from sok_lite.bridge.variable import TableVariable

_SETTING = "gradient_accumulation_steps"


class KeptGradient(NamedTuple):
    """A gradient that waits for its step.

    Attributes:
      variable: of the table.
      decays: whether weight decay acts on it.
      keys, grads: copies of what the batch gave.
      of_gradient: whether the keys are int64 as a lookup gave them.
    """

    variable: "weakref.ref[TableVariable]"
    decays: bool
    keys: Array
    grads: Array
    of_gradient: bool


class KeptGradients:
    """Those of an optimizer; no checkpoint has them.

    Attributes:
      gradients: in the order in which they came.
    """

    def __init__(self) -> None:
        self.gradients: list[KeptGradient] = []

    def plan_drop(self) -> list[Action]:
        """Prepares to forget them, when their step is taken."""
        return plan_set(self, gradients=[])


def num_batches(optimizer: Any) -> int:
    """Returns of how many batches each step of an optimizer is."""
    return int(getattr(optimizer, _SETTING, None) or 1)


def check_accumulates(optimizer: Any, family: Family) -> None:
    """Raises NotImplementedError where what is done to the mean would be done to each gradient."""
    inner, is_scaled = inner_of(optimizer), scales_loss(optimizer)
    changes = changes_of(inner, family)
    if is_scaled or changes.value is not None or changes.limit is not None:
        what = "a LossScaleOptimizer" if is_scaled else "clipping"
        raise NotImplementedError(
            f"Tables do not support {_SETTING}={num_batches(inner)} of {type(inner).__name__} "
            f"together with {what}, which acts on the mean of the batches in Keras. Leave one of "
            "them out."
        )


def is_last(optimizer: Any) -> tf.Tensor:
    """Returns whether the coming batch is the last of a step, scalar bool."""
    count = tf.cast(tf.convert_to_tensor(_counter(optimizer)), tf.int64)
    return tf.equal((count + 1) % num_batches(optimizer), 0)


def count_batch(optimizer: Any) -> None:
    """Counts a batch without dense variables."""
    _counter(optimizer).assign_add(1)


def _counter(optimizer: Any) -> Any:
    """Returns what counts batches; `iterations` is how many steps these are."""
    return optimizer.variables[0]
