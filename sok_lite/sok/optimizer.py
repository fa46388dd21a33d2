"""`sok.OptimizerWrapper` and `sok.SGD`: gradients in, rows and optimizer states updated in place.

The wrapped optimizer gives the hyper-parameters and updates the dense variables; rows of dynamic
variables are updated by the engine's kernels, all of a call in one operation. Only the rows that
have a gradient change, their states included.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.keras import guard, hooks
from sok_lite.bridge.keras.held import is_horovods
from sok_lite.bridge.optimizers.family import Settings
from sok_lite.bridge.optimizers.minimize import check_trained, config_of, optimizer_of, scaled_loss
from sok_lite.bridge.optimizers.settings import settings_of
from sok_lite.bridge.optimizers.slots import own_names, view_of
from sok_lite.bridge.optimizers.step import RowOptimizer, operations, separated
from sok_lite.bridge.optimizers.wrapped import WrappedOptimizer
from sok_lite.engine.optimizers import SGD as SGDRule
from sok_lite.sok.dynamic_variable import DynamicVariable

__all__ = ["SGD", "OptimizerWrapper"]

# The last wrapper around each optimizer.
_last: "weakref.WeakKeyDictionary[Any, weakref.ref[OptimizerWrapper]]" = weakref.WeakKeyDictionary()


def wrapper_of(optimizer: Any) -> "OptimizerWrapper | None":
    """Returns the last wrapper that was made around an optimizer; None: it is gone."""
    return _last[optimizer]() if optimizer in _last else None


@unconverted
class OptimizerWrapper(WrappedOptimizer):
    """Lets a TensorFlow or Keras optimizer update dynamic variables, together with dense ones.

    Optimizers of Keras 3, of tf_keras (new and legacy) and of tf.compat.v1.train have an update
    rule, which changes the rows in place; docs/optimizers.md lists them. Any other, such as one of
    a program's own, takes its step itself: a copy of it updates the rows that have a gradient as
    dense variables, which is slower. Settings that change (a learning rate with its schedule,
    `beta_1`, ...) are read in every step. Weight decay acts on the rows that have a gradient.

    What the optimizer does to gradients before its step it does to those of tables as well: it
    unscales them (`loss_scale_factor`) and clips them (`clipvalue`, `clipnorm`,
    `global_clipnorm`). The gradient of a table is that of the whole table, each key once: its norm
    is one over the rows of all ranks.

    A LossScaleOptimizer of Keras 3 or tf_keras may be around one of these. Whether it skips a step
    is then decided over the gradients of all variables on all ranks. The states are those of the
    optimizer in it. Its scale changes with dense variables only: each call must have one.

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
      optimizer: the optimizer, or the name of one of `tf.keras.optimizers`, such as "adam".
      on_nonfinite: "allow": rows whose gradient has a NaN or an infinity are updated and counted in
        `num_nonfinite`. "error": the step raises before anything has changed.
      stochastic_rounding: True: an update rounds rows of tf.float16 and tf.bfloat16 up or down at
        random, so that steps below their last bit count on average; rounding to nearest loses them.
        The random bits depend on the table's seed and name, on key, column and step, not on ranks
        or threads. Rows of tf.float32 and dense variables are not rounded.

    Raises:
      TypeError: not an optimizer, or `stochastic_rounding` is not a bool.
      NotImplementedError: an optimizer whose step means nothing for rows, that cannot take its step
        itself, or that has a setting which could not act on rows, such as averaging (`use_ema`).

    Examples:
      >>> items = sok.DynamicVariable(2, initializer=1.0, name="item")
      >>> optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.5))
      >>> with tf.GradientTape() as tape:
      ...     loss = tf.reduce_sum(tf.nn.embedding_lookup(items, tf.constant([7])))
      >>> _ = optimizer.apply_gradients([(tape.gradient(loss, items), items)])
      >>> tf.nn.embedding_lookup(items, tf.constant([7])).numpy().tolist()
      [[0.5, 0.5]]
    """

    def __init__(
        self, optimizer: Any, on_nonfinite: str = "allow", stochastic_rounding: bool = False
    ) -> None:
        guard.tell(_refuse_in_loss_scales)
        if isinstance(optimizer, str):
            optimizer = tf.keras.optimizers.get(optimizer)
        super().__init__(optimizer, on_nonfinite, stochastic_rounding)
        _last[optimizer] = weakref.ref(self)

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss, scaled as the wrapped optimizer wants it before gradients are taken.

        Raises:
          ValueError: a LossScaleOptimizer of Keras 3 has no scale yet, in a tf.function.
        """
        return scaled_loss(self.optimizer, loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Returns gradients of a scaled loss, tables' among them, as `apply_gradients` takes them.

        Only a LossScaleOptimizer of tf_keras asks for it; others divide in their step.
        """
        if not hasattr(self.optimizer, "get_unscaled_gradients"):
            return list(grads)
        return self.optimizer.get_unscaled_gradients(grads)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Has weight decay leave variables alone, dynamic or dense, as of the wrapped optimizer.

        Args:
          var_list: variables.
          var_names: texts; a variable whose name has one of them is left alone.

        Raises:
          NotImplementedError: the wrapped optimizer has no weight decay.
          ValueError: it has updated dense variables before.
        """
        if not self._family.has_decay:
            raise NotImplementedError(
                f"{type(self.optimizer).__name__} of {self._family.name} has no weight decay. "
                "Leave exclude_from_weight_decay() out."
            )
        self._inner.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def get_config(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's description and this object's arguments; no states.

        Raises:
          NotImplementedError: optimizers of tf.compat.v1.train have no description.
        """
        return config_of(self.optimizer, self._family) | {
            "on_nonfinite": self.on_nonfinite,
            "stochastic_rounding": self.stochastic_rounding,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "OptimizerWrapper":
        """Returns a new wrapper of a new optimizer.

        Args:
          config: what `get_config` gave.
          custom_objects: name -> class or function of one's own, such as a schedule, as of Keras.

        Raises:
          TypeError: hvd.DistributedOptimizer asks, which would make an optimizer of the wrapper.
        """
        if is_horovods(cls):
            raise TypeError(
                "hvd.DistributedOptimizer takes an optimizer of Keras. Received: a "
                "sok.OptimizerWrapper. Leave it out: take the gradients from "
                "hvd.DistributedGradientTape, with tape.register_local_source(table) for each "
                "table."
            )
        optimizer = optimizer_of(config, custom_objects)
        return cls(optimizer, config["on_nonfinite"], config["stochastic_rounding"])

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate after `iterations` steps."""
        return self._family.learning_rate(self._inner, self.iterations)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if isinstance(self.optimizer, tf.compat.v1.train.Optimizer):
            raise NotImplementedError(
                f"The learning rate of {type(self.optimizer).__name__} of tf.compat.v1.train "
                "cannot be set. Make the optimizer with a tf.Variable and assign to that."
            )
        self._inner.learning_rate = value

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
        return own_names(settings_of(self._inner, self._family), self._family)

    def get_slot(self, var: DynamicVariable, name: str) -> Any:
        """Returns a view of a state that this optimizer has of a variable's rows.

        `tf.nn.embedding_lookup` takes it in place of a variable.

        Args:
          var: a dynamic variable that was updated, or had its states made by `_create_slots`. Any
            other is the wrapped optimizer's.
          name: one of `get_slot_names()`, or the framework's name for it, such as TF1's "accum".

        Raises:
          ValueError: it has no such state.
        """
        if isinstance(var, DynamicVariable):
            return view_of(self._inner, var, name)
        return self._inner.get_slot(var, name)

    @property
    def _slots(self) -> Any:
        """The slots of the wrapped optimizer, by SOK's name; AttributeError where it has none."""
        return self._inner._slots

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
        self._make_slots([var for var in listed if isinstance(var, DynamicVariable)])


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
        guard.tell(_refuse_in_loss_scales)
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


def _refuse_in_loss_scales(name: str, package: Any) -> None:
    """Has LossScaleOptimizers of a Keras refuse those of SOK when they are made.

    That of Keras 3 would take one, and fail in its first step.
    """
    if name == "keras":
        hooks.around(
            package.optimizers.LossScaleOptimizer, "__init__", hooks.checking, _refuse_ours
        )
    else:  # the class of that class says first what it takes
        maker = type(package.mixed_precision.LossScaleOptimizer)
        hooks.around(maker, "__call__", hooks.checking, _refuse_ours)


def _refuse_ours(_: Any, inner_optimizer: Any = None, *__: Any, **___: Any) -> None:
    if isinstance(inner_optimizer, RowOptimizer):
        raise TypeError(
            "LossScaleOptimizer takes an optimizer of Keras. Received: a sok."
            f"{type(inner_optimizer).__name__}. Wrap the other way round: "
            "sok.OptimizerWrapper(LossScaleOptimizer(optimizer))."
        )


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
