"""`sok.OptimizerWrapper` and `sok.SGD`: update rows and optimizer states in place.

The wrapped optimizer provides the hyperparameters and updates dense variables; the engine's kernels
update rows, all of a call in one operation. Only rows with a gradient change, and their states.
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

# The newest wrapper of each optimizer.
_last: "weakref.WeakKeyDictionary[Any, weakref.ref[OptimizerWrapper]]" = weakref.WeakKeyDictionary()


def wrapper_of(optimizer: Any) -> "OptimizerWrapper | None":
    """Returns the newest wrapper of an optimizer, or None if it is gone."""
    return _last[optimizer]() if optimizer in _last else None


@unconverted
class OptimizerWrapper(WrappedOptimizer):
    """Makes a TensorFlow or Keras optimizer update dynamic variables together with dense ones.

    Optimizers of Keras 3, tf_keras (new and legacy) and tf.compat.v1.train have an update rule,
    which changes rows in place; docs/optimizers.md lists them. For any other, such as a custom one,
    a copy of it updates the rows that have a gradient as dense variables, which is slower. Settings
    that change (learning rate and schedule, `beta_1`, ...) are read in every step. Weight decay
    acts on the rows that have a gradient.

    Gradients of tables are processed as the optimizer processes others before its step: unscaled
    (`loss_scale_factor`) and clipped (`clipvalue`, `clipnorm`, `global_clipnorm`). The gradient of
    a table covers the whole table, each key once: its norm is over the rows of all ranks.

    The optimizer may be inside a LossScaleOptimizer of Keras 3 or tf_keras. Whether it skips a step
    is then decided by the gradients of all variables on all ranks. The states are those of the
    inner optimizer. Its scale changes only with dense variables: each call must have one.

    If a call has dense variables, the step count is the wrapped optimizer's, and this object's
    `iterations` follows it. Without them, and for tf.compat.v1.train, it is this object's alone, as
    in SOK: the optimizer may then also be used directly for the dense variables.

    Row states (momenta, accumulators) belong to the wrapped optimizer, as in SOK: each has its own
    in a table, whatever others train it, and they go when it does. This object has none: wrapped
    again, the optimizer continues with its states, and `iterations` restarts from its own count.
    Legacy Keras and tf.compat.v1.train optimizers also list them as slots: once there are states,
    `optimizer.get_slot(var, name)` and `optimizer._slots` return views. States from a checkpoint go
    to the first optimizer that has the same.

    Args:
      optimizer: the optimizer, or the name of one of `tf.keras.optimizers`, such as "adam".
      on_nonfinite: "allow": rows whose gradient has a NaN or infinity are updated and counted in
        `num_nonfinite`. "error": the step raises before anything changes.
      stochastic_rounding: True: updates round tf.float16 and tf.bfloat16 rows up or down at random,
        so that steps below their last bit count on average; rounding to nearest loses them. The
        random bits depend on the table's seed and name, on key, column and step, not on ranks or
        threads. tf.float32 rows and dense variables are not rounded.

    Raises:
      TypeError: not an optimizer, or `stochastic_rounding` is not a bool.
      NotImplementedError: an optimizer whose step has no meaning for rows, that cannot step by
        itself, or with a setting that cannot act on rows, such as averaging (`use_ema`).

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
        """Scales the loss as the wrapped optimizer requires before taking gradients.

        Raises:
          ValueError: a LossScaleOptimizer of Keras 3 has no scale yet, in a tf.function.
        """
        return scaled_loss(self.optimizer, loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Unscales gradients of a scaled loss, tables' included, for `apply_gradients`.

        Only a LossScaleOptimizer of tf_keras needs it; others unscale in their step.
        """
        if not hasattr(self.optimizer, "get_unscaled_gradients"):
            return list(grads)
        return self.optimizer.get_unscaled_gradients(grads)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables, dynamic or dense, from weight decay, as the wrapped optimizer does.

        Args:
          var_list: variables.
          var_names: strings; variables whose name contains one are excluded.

        Raises:
          NotImplementedError: the wrapped optimizer has no weight decay.
          ValueError: it has already updated dense variables.
        """
        if not self._family.has_decay:
            raise NotImplementedError(
                f"{type(self.optimizer).__name__} of {self._family.name} has no weight decay. "
                "Leave exclude_from_weight_decay() out."
            )
        self._inner.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def get_config(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's config and this object's arguments; no states.

        Raises:
          NotImplementedError: optimizers of tf.compat.v1.train have no config.
        """
        return config_of(self.optimizer, self._family) | {
            "on_nonfinite": self.on_nonfinite,
            "stochastic_rounding": self.stochastic_rounding,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "OptimizerWrapper":
        """Returns a new wrapper of a new optimizer.

        Args:
          config: from `get_config`.
          custom_objects: custom classes or functions by name, such as a schedule, as in Keras.

        Raises:
          TypeError: hvd.DistributedOptimizer asks, which would make the wrapper an optimizer.
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

        tf.train.Checkpoint looks for it, and would expect each state as a dense variable. The table
        saves its states.
        """
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def get_slot_names(self) -> list[str]:
        """Returns the names of row states; legacy and TF1 optimizers' own names."""
        return own_names(settings_of(self._inner, self._family), self._family)

    def get_slot(self, var: DynamicVariable, name: str) -> Any:
        """Returns a view of this optimizer's state of a variable's rows.

        `tf.nn.embedding_lookup` accepts it like a variable.

        Args:
          var: a dynamic variable that was updated or passed to `_create_slots`. Others go to the
            wrapped optimizer.
          name: one of `get_slot_names()`, or the framework's name for it, such as TF1's "accum".

        Raises:
          ValueError: there is no such state.
        """
        if isinstance(var, DynamicVariable):
            return view_of(self._inner, var, name)
        return self._inner.get_slot(var, name)

    @property
    def _slots(self) -> Any:
        """The wrapped optimizer's slots, by SOK's name; AttributeError without any."""
        return self._inner._slots

    @property
    def _optimizer(self) -> Any:
        """The wrapped optimizer, by SOK's name."""
        return self.optimizer

    def _create_slots(self, vars: Any) -> None:
        """Creates the row states of variables now instead of in the first update, as in SOK.

        Args:
          vars: one or more dynamic variables. The wrapped optimizer creates those of dense ones.
        """
        listed = [vars] if isinstance(vars, tf.Variable) else list(vars)
        self._make_slots([var for var in listed if isinstance(var, DynamicVariable)])


@unconverted
class SGD(RowOptimizer):
    """SOK's own optimizer for dynamic and dense variables: `row -= lr * gradient`. Other arguments
    as for `OptimizerWrapper`.

    Args:
      lr: learning rate; `self.lr` is a variable.
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
        """Updates variables: `row -= lr * gradient`.

        Raises:
          TypeError: not a TensorFlow variable, or the gradient of a dynamic one is no
            IndexedSlices.
          ValueError: no variable has a gradient, or a dense gradient has another shape.
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
    """Makes a Keras' LossScaleOptimizers reject SOK's when made, not in the first step."""
    if name == "keras":
        hooks.around(
            package.optimizers.LossScaleOptimizer, "__init__", hooks.checking, _refuse_ours
        )
    else:  # its metaclass reports wrong arguments first
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
    """Raises if a gradient does not match a dense variable, as far as shapes are known."""
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
