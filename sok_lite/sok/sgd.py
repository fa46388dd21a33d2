"""`sok.SGD`: SOK's own optimizer, plain descent on rows and on dense variables."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.optimizers.family import Settings
from sok_lite.bridge.optimizers.minimize import check_trained
from sok_lite.bridge.optimizers.step import RowOptimizer, operations, separated
from sok_lite.engine.optimizers import SGD as SGDRule

__all__ = ["SGD"]


@unconverted
class SGD(RowOptimizer):
    """SOK's own optimizer, for dynamic and dense variables: `row -= lr * gradient`.

    Args:
      lr: learning rate; `self.lr` is a variable.
      on_nonfinite: "allow": rows whose gradient has a NaN or an infinity are updated and counted in
        `num_nonfinite`. "error": the step raises before anything has changed.
      stochastic_rounding: whether 16-bit rows are rounded up or down at random, so that small steps
        count on average.
    """

    def __init__(
        self, lr: float, on_nonfinite: str = "allow", stochastic_rounding: bool = False
    ) -> None:
        super().__init__(on_nonfinite, stochastic_rounding)
        self.lr = tf.Variable(lr, dtype=tf.float32, trainable=False, name="sok_sgd_lr")

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Updates variables with their gradients: `row -= lr * gradient`.

        Raises:
          TypeError: no variable of TensorFlow, or the gradient of a dynamic one is no
            IndexedSlices.
          ValueError: no variable has a gradient, or that of a dense variable has another shape.
        """
        given = list(grads_and_vars)
        check_trained(given)
        pairs, dense = separated(given)
        dense = [(grad, var) for grad, var in dense if grad is not None]
        for grad, var in dense:
            _check_dense(grad, var)
        done = self._step(
            pairs,
            dense,
            lambda count: (Settings(SGDRule, {}, {}), self.lr),
            partial(self._descend, dense) if dense else None,
            also=lambda: [] if global_step is None else [global_step.assign_add(1)],
            name=name,
        )
        return None if tf.executing_eagerly() or tf.inside_function() else done

    def _descend(self, dense: list[tuple[Any, Any]]) -> Any:
        """Updates dense variables; returns the operation in a graph."""
        done = []
        for grad, var in dense:
            rate = tf.cast(self.lr, var.dtype)
            if isinstance(grad, tf.IndexedSlices):
                values = rate * tf.cast(grad.values, var.dtype)
                done.append(var.scatter_sub(tf.IndexedSlices(values, grad.indices)))
            else:
                done.append(var.assign_sub(rate * tf.cast(grad, var.dtype)))
        return None if tf.executing_eagerly() else tf.group(*operations(*done))


def _check_dense(grad: Any, var: Any) -> None:
    """Raises if a gradient does not fit a dense variable, as far as shapes are known."""
    if not isinstance(var, tf.Variable):
        raise TypeError(
            "sok.SGD updates DynamicVariables and tf.Variables. Received: a variable of type "
            f"{type(var).__name__}. Use sok.OptimizerWrapper, or its tf.Variable."
        )
    is_sparse = isinstance(grad, tf.IndexedSlices)
    received = grad.values.shape[1:] if is_sparse else tf.convert_to_tensor(grad).shape
    expected = var.shape[1:] if is_sparse else var.shape
    if not received.is_compatible_with(expected):
        raise ValueError(
            f"The gradient of {var.name!r} must have {'rows of ' if is_sparse else ''}shape "
            f"{expected}. Received: {received}."
        )
