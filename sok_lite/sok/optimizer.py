"""`sok.OptimizerWrapper` and `sok.SGD`: gradients in, rows and optimizer states updated in place.

The wrapped optimizer gives the hyper-parameters and updates the dense variables; rows of dynamic
variables are updated by the engine's kernels, all of a call in one host call. Only the rows that
have a gradient change, their states included.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.family import OwnStep, Settings
from sok_lite.bridge.optimizers.settings import family_of, refuse_unsupported, settings_of
from sok_lite.bridge.optimizers.shown import show_slots, view_of
from sok_lite.bridge.optimizers.slots import begin, create_slots, own_names
from sok_lite.bridge.optimizers.step import RowOptimizer, operations, separated
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.engine.optimizers import SGD as SGDRule
from sok_lite.sok.dynamic_variable import DynamicVariable

__all__ = ["SGD", "OptimizerWrapper"]


class OptimizerWrapper(RowOptimizer):
    """Lets a TensorFlow or Keras optimizer update dynamic variables, together with dense ones.

    Supported are SGD (with momentum, Nesterov), Adagrad, Adam (amsgrad), AdamW, RMSprop and Ftrl of
    Keras 3, of tf_keras (new and legacy) and of tf.compat.v1.train. Settings that change (a
    learning rate with its schedule, `beta_1`, ...) are read in every step. Weight decay acts on the
    rows that have a gradient.

    The step count is the wrapped optimizer's where dense variables are in the call, and this
    object's `iterations` follows it. Without dense variables, and for tf.compat.v1.train, it is
    this object's alone, as in SOK: the same optimizer may then be used by itself for the dense
    variables.

    The states of the rows (momenta, accumulators) belong to the wrapped optimizer, as in SOK: each
    has its own in a table, whatever others train it, and a new one begins anew. This object holds
    none: wrapped again, the same optimizer goes on with its states, and `iterations` begins again
    at the optimizer's own count. Legacy Keras optimizers and those of tf.compat.v1.train have them
    among their slots as well: `optimizer.get_slot(var, name)` and `optimizer._slots` give views,
    once there are states. The states go when the wrapped optimizer does. Those that a checkpoint
    brings are taken over by the first optimizer that has the same.

    Args:
      optimizer: the optimizer.
      on_nonfinite: "allow": rows whose gradient has a NaN or an infinity are updated and counted in
        `num_nonfinite`. "error": the step raises before anything has changed.
      stochastic_rounding: True: an update rounds rows of tf.float16 and tf.bfloat16 up or down at
        random, so that steps below their last bit count on average; rounding to nearest loses them.
        The random bits depend on the table's seed and name, on key, column and step, not on ranks
        or threads. Rows of tf.float32 and dense variables are not rounded.

    Raises:
      TypeError: not an optimizer, or `stochastic_rounding` is not a bool.
      NotImplementedError: an optimizer without a rule, or with a setting that could not act on rows
        (clipping, averaging, gradient accumulation, loss scaling).
    """

    def __init__(
        self, optimizer: Any, on_nonfinite: str = "allow", stochastic_rounding: bool = False
    ) -> None:
        self._family = family_of(optimizer)
        settings = settings_of(optimizer, self._family)  # refuses what it cannot follow
        if isinstance(settings, OwnStep):
            self._carried = begin(settings, stochastic_rounding)
        inner_iterations = self._family.iterations(optimizer)
        first_step = 0
        if inner_iterations is not None and tf.executing_eagerly():
            first_step = int(inner_iterations)
        super().__init__(on_nonfinite, stochastic_rounding, first_step)
        self.optimizer = optimizer
        self._shown = _Shown()

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Updates variables with their gradients. No communication.

        Args:
          grads_and_vars: (gradient, variable) pairs, dynamic and dense mixed. Pairs without a
            gradient (None) are left out. The same key twice in a gradient is summed.
          global_step: incremented, with tf.compat.v1.train optimizers.
          name: of the operation, where the wrapped optimizer takes one.

        Returns:
          In a TF1 graph the operation; else what the wrapped optimizer returns, or None.

        Raises:
          TypeError: the gradient of a dynamic variable is no IndexedSlices.
          ValueError: `on_nonfinite` is "error" and a gradient is not finite.
        """
        refuse_unsupported(self.optimizer)
        pairs, dense = separated(grads_and_vars)
        has_dense = any(grad is not None for grad, _ in dense)
        if not pairs and not has_dense:
            return None

        def settings(count: Any) -> tuple[Settings | OwnStep, Any]:
            rate = self._family.learning_rate(self.optimizer, count)
            settings = settings_of(self.optimizer, self._family)
            self._show_slots(settings, [variable for _, variable in pairs])
            return settings, 0.0 if rate is None else rate

        has_more = has_dense or (self._family is V1 and global_step is not None)
        return self._step(
            pairs,
            dense,
            settings,
            partial(self._dense_step, dense, has_dense, global_step, name) if has_more else None,
            optimizer=self.optimizer,
            count=self._family.iterations(self.optimizer) if has_dense else None,
            name=name,
        )

    def _dense_step(self, dense: Any, has_dense: bool, global_step: Any, name: Any) -> Any:
        if not has_dense:
            return global_step.assign_add(1)
        if self._family is V1:
            return self.optimizer.apply_gradients(dense, global_step=global_step, name=name)
        return self.optimizer.apply_gradients(dense)

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate after `iterations` steps."""
        return self._family.learning_rate(self.optimizer, self.iterations)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if isinstance(self.optimizer, tf.compat.v1.train.Optimizer):
            raise NotImplementedError(
                f"The learning rate of {type(self.optimizer).__name__} of tf.compat.v1.train "
                "cannot be set. Make the optimizer with a tf.Variable and assign to that."
            )
        self.optimizer.learning_rate = value

    @property
    def lr(self) -> Any:
        """The same as `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def __dir__(self) -> list[str]:
        """Leaves `get_slot_names` out.

        tf.train.Checkpoint looks for it here, and would want every state as a dense variable. The
        states are saved with their table.
        """
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def get_slot_names(self) -> list[str]:
        """Returns the names of the states of a row; legacy and TF1 optimizers' own names."""
        return own_names(settings_of(self.optimizer, self._family), self._family)

    def get_slot(self, var: DynamicVariable, name: str) -> Any:
        """Returns a view of a state of this optimizer, of a variable's rows; see `SlotView`.

        Args:
          var: a dynamic variable that was updated, or had its states made by `_create_slots`. Any
            other is the wrapped optimizer's.
          name: as in `get_slot_names`, or as the framework calls it, such as TF1's "accum".

        Raises:
          ValueError: it has no such state.
        """
        if isinstance(var, DynamicVariable):
            return view_of(self.optimizer, var, name)
        return self.optimizer.get_slot(var, name)

    @property
    def _slots(self) -> Any:
        """The slots of the wrapped optimizer, by SOK's name; AttributeError where it has none."""
        return self.optimizer._slots

    @property
    def _optimizer(self) -> Any:
        """The wrapped optimizer, by SOK's name."""
        return self.optimizer

    def _create_slots(self, vars: Any) -> None:
        """Makes the states of variables' rows now rather than in the first update, as in SOK.

        Args:
          vars: a dynamic variable or several. The wrapped optimizer makes those of dense ones.
        """
        listed = [vars] if isinstance(vars, tf.Variable) else list(vars)
        dynamic = [var for var in listed if isinstance(var, DynamicVariable)]
        settings = settings_of(self.optimizer, self._family)
        self._show_slots(settings, dynamic)
        create_slots(self.optimizer, settings, dynamic)

    def _show_slots(self, settings: Settings | OwnStep, variables: list[Any]) -> None:
        """Puts views of states where the wrapped optimizer has slots, once for each variable."""
        new = [variable for variable in variables if variable not in self._shown]
        if new:
            show_slots(self.optimizer, self._family, settings, new)
            self._shown.update(new)


class _Shown(weakref.WeakSet[Any]):
    """The variables whose states the wrapped optimizer has among its slots."""

    def __reduce__(self) -> Any:
        return _Shown, ()  # a copy of an optimizer has none


class SGD(RowOptimizer):
    """SOK's own optimizer, for dynamic and dense variables: `row -= lr * gradient`.

    Args:
      lr: learning rate; `self.lr` is a variable.
      on_nonfinite, stochastic_rounding: as in `OptimizerWrapper`.
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
        """Updates variables with their gradients; see `OptimizerWrapper.apply_gradients`.

        Raises:
          TypeError: no variable of TensorFlow, or the gradient of a dynamic one is no
            IndexedSlices.
          ValueError: the gradient of a dense variable has another shape.
        """
        pairs, dense = separated(grads_and_vars)
        dense = [(grad, var) for grad, var in dense if grad is not None]
        for grad, var in dense:
            _check_dense(grad, var)
        if not pairs and not dense:
            return None
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
