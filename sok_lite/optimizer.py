"""`sok.OptimizerWrapper` and `sok.SGD`: gradients in, rows and optimizer states updated in place.

The wrapped optimizer gives the hyper-parameters and updates the dense variables; rows of dynamic
variables are updated by the engine's kernels, all of a call in one host call. Only the rows that
have a gradient change, their states included.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from sok_lite.backend.publish import setting
from sok_lite.dynamic_variable import DynamicVariable
from sok_lite.engine.optimizers import SGD as SGDRule
from sok_lite.host_call import host_call, on_device, refuse_replicas
from sok_lite.optimizer_host import (
    NonFiniteRows,
    OptimizerHost,
    checked_gradient,
    joined_gradients,
    keys_kind,
)
from sok_lite.optimizer_rules import Settings, family_of, refuse_unsupported, settings_of
from sok_lite.slot import SlotView
from sok_lite.step_order import StepOrder, Turn, dense_checks, keep_alive

__all__ = ["SGD", "OptimizerWrapper"]

Pairs = list[tuple[tf.IndexedSlices, DynamicVariable]]


class _RowOptimizer(tf.Module):
    """What both optimizers share: the host call, the counters, the states.

    Attributes:
      iterations: int64 variable, number of steps so far.
      on_nonfinite: "allow" or "error".
      stochastic_rounding: whether rows of 16 bits are rounded at random.
      nonfinite: counts gradient rows with a NaN or an infinity.
    """

    def __init__(self, on_nonfinite: str, stochastic_rounding: bool, first_step: int = 0) -> None:
        super().__init__()
        if on_nonfinite not in ("allow", "error"):
            raise ValueError(
                f"`on_nonfinite` must be 'allow' or 'error'. Received: {on_nonfinite!r}."
            )
        if not isinstance(stochastic_rounding, bool):
            raise TypeError(
                f"`stochastic_rounding` must be True or False. Received: {stochastic_rounding!r}."
            )
        self.on_nonfinite = on_nonfinite
        self.stochastic_rounding = stochastic_rounding
        self.nonfinite = NonFiniteRows()
        self.iterations = tf.Variable(
            first_step, dtype=tf.int64, trainable=False, name="sok_iterations"
        )
        self._order = StepOrder()
        # The step that rows have taken and `iterations` may not know of; 0: it knows of all.
        self._taken = SimpleNamespace(step=0)

    @property
    def num_nonfinite(self) -> int:
        """Gradient rows with a NaN or an infinity so far. On a GPU it waits."""
        return self.nonfinite.count

    @num_nonfinite.setter
    def num_nonfinite(self, count: int) -> None:
        self.nonfinite = NonFiniteRows(count)

    def _counted(self, step: tf.Tensor) -> Any:
        """Counts a step, now or as an operation of a graph."""
        counted = self.iterations.assign(step)
        self._taken.step = 0
        return counted

    def _catch_up(self) -> None:
        """Counts a step that was interrupted after its rows had moved, in eager mode."""
        if tf.executing_eagerly() and self._taken.step:
            self._counted(self._taken.step)

    @contextmanager
    def _turn(self) -> Iterator[Turn]:
        """Gives one step at a time its turn, after what an interrupted one has left uncounted."""
        with self._order.turn() as turn:
            self._catch_up()
            try:
                yield turn
            finally:
                self._catch_up()

    def _update(
        self,
        pairs: Pairs,
        settings: Settings,
        learning_rate: Any,
        step: tf.Tensor,
        optimizer: Any = None,
        dense_step: Callable[[], Any] | None = None,
    ) -> tuple[Any, Any]:
        """Updates the rows of all pairs in one host call, and the dense variables.

        Whichever part fails, the other has not begun: in eager mode the rows are checked, the dense
        step done, and the rows then changed by what nothing refuses any more. In a graph, where a
        check would be a call of its own, the rows go first.

        Args:
          optimizer: whose states the rows have.
          dense_step: updates the dense variables.

        Returns:
          The operation in a graph, and what `dense_step` returns.
        """
        backend = pairs[0][1].table.backend
        variables = [variable for _, variable in pairs]
        what = f"The update of {', '.join(repr(variable.name) for variable in variables)}"
        refuse_replicas(what)
        gradients = [checked_gradient(*pair) for pair in pairs]
        kinds = [keys_kind(keys, var) for (keys, _), var in zip(gradients, variables, strict=True)]
        host = OptimizerHost(self, optimizer, variables, kinds, settings)
        numbers = [learning_rate, *settings.numbers.values()]
        inputs = joined_gradients(gradients, backend)
        if tf.executing_eagerly():
            done = None
            arguments = ([float(number) for number in numbers], int(step), inputs)
            if dense_step is not None:
                on_device(backend, partial(host.run, *arguments, check_only=True))
                done = dense_step()
            along = setting(self._taken, step=int(step))
            on_device(backend, partial(host.run, *arguments, along=along))
            return None, done
        if optimizer is not None:
            keep_alive(optimizer)
        stacked = tf.stack([tf.cast(tf.convert_to_tensor(n), tf.float64) for n in _plain(numbers)])

        def run(step: tf.Tensor, values: tf.Tensor, *tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            host.run([float(value) for value in values.numpy()], int(step), tensors)
            return ()

        update = host_call(run, [step, stacked, *inputs], [], backend, what)
        if dense_step is None:
            return update, None
        with tf.control_dependencies([update]):
            return update, dense_step()


class OptimizerWrapper(_RowOptimizer):
    """Lets a TensorFlow or Keras optimizer update dynamic variables, together with dense ones.

    Supported are SGD (with momentum, Nesterov), Adagrad, Adam (amsgrad), AdamW, RMSprop and Ftrl of
    Keras 3, of tf_keras (new and legacy) and of tf.compat.v1.train. Settings that change (a
    learning rate with its schedule, `beta_1`, ...) are read in every step. Weight decay acts on the
    rows that have a gradient.

    The step count is the wrapped optimizer's where dense variables are in the call, and this
    object's `iterations` follows it. Without dense variables, and for tf.compat.v1.train, it is
    this object's alone, as in SOK: the same optimizer may then be used by itself for the dense
    variables.

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
        inner_iterations = self._family.iterations(optimizer)
        first_step = 0
        if inner_iterations is not None and tf.executing_eagerly():
            first_step = int(inner_iterations)
        super().__init__(on_nonfinite, stochastic_rounding, first_step)
        self.optimizer = optimizer
        settings_of(optimizer, self._family)

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
          ValueError: `on_nonfinite` is "error" and a gradient is not finite, or the table's states
            belong to another optimizer.
        """
        refuse_unsupported(self.optimizer)
        pairs, dense = _separated(grads_and_vars)
        has_dense = any(grad is not None for grad, _ in dense)
        if not pairs and not has_dense:
            return None
        dense_step = partial(self._dense_step, dense, has_dense, global_step, name)
        with self._turn() as turn:
            inner_count = self._family.iterations(self.optimizer) if has_dense else None
            count = self.iterations if inner_count is None else inner_count
            # Read now: the wrapped optimizer counts on when it updates the dense variables.
            step = _next_step(count)
            update = None
            if pairs:
                rate = self._family.learning_rate(self.optimizer, count)
                settings = settings_of(self.optimizer, self._family)
                checks = [] if tf.executing_eagerly() else dense_checks(dense)
                with tf.control_dependencies(checks):
                    update, done = self._update(
                        pairs, settings, rate, step, self.optimizer, dense_step
                    )
            else:
                done = dense_step()
            with tf.control_dependencies(_operations(update)):
                counted = self._counted(step)
            if inner_count is not None and tf.inside_function():
                turn.last.append(tf.convert_to_tensor(inner_count))  # counted on by now
            turn.last += _operations(counted, done)
        if tf.executing_eagerly() or tf.inside_function():
            return done
        return tf.group(*_operations(update, done, counted, turn.end), name=name)

    def _dense_step(self, dense: Any, has_dense: bool, global_step: Any, name: Any) -> Any:
        is_v1 = isinstance(self.optimizer, tf.compat.v1.train.Optimizer)
        if has_dense:
            if is_v1:
                return self.optimizer.apply_gradients(dense, global_step=global_step, name=name)
            return self.optimizer.apply_gradients(dense)
        if is_v1 and global_step is not None:
            return global_step.assign_add(1)
        return None

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
        """Returns the names of the states that the rule keeps for every row."""
        settings = settings_of(self.optimizer, self._family)
        numbers = {name: float(value) for name, value in settings.numbers.items()}
        return list(settings.rule(**numbers, **settings.flags).states)

    def get_slot(self, var: DynamicVariable, name: str) -> Any:
        """Returns a read-only view of a state of a variable's rows; see `SlotView`."""
        if isinstance(var, DynamicVariable):
            return SlotView(var, name)
        return self.optimizer.get_slot(var, name)


class SGD(_RowOptimizer):
    """SOK's own optimizer for dynamic variables: `row -= lr * gradient`.

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
        """Updates dynamic variables with their gradients; see `OptimizerWrapper.apply_gradients`.

        Raises:
          TypeError: a variable that is not dynamic.
        """
        pairs, dense = _separated(grads_and_vars)
        if dense:
            raise TypeError(
                "sok.SGD updates DynamicVariables only. Received: a variable of type "
                f"{type(dense[0][1]).__name__}. Use sok.OptimizerWrapper for both kinds."
            )
        if not pairs:
            return None
        settings = Settings(SGDRule, {}, {})
        with self._turn() as turn:
            step = _next_step(self.iterations)
            update, _ = self._update(pairs, settings, self.lr, step)
            with tf.control_dependencies(_operations(update)):
                counted = [self._counted(step)]
                if global_step is not None:
                    counted.append(global_step.assign_add(1))
            turn.last += _operations(*counted)
        if tf.executing_eagerly() or tf.inside_function():
            return None
        return tf.group(*_operations(update, *counted, turn.end), name=name)


def _separated(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[Pairs, list[tuple[Any, Any]]]:
    """Returns (dynamic pairs that have a gradient, dense pairs)."""
    pairs, dense = [], []
    for grad, variable in grads_and_vars:
        if not isinstance(variable, DynamicVariable):
            dense.append((grad, variable))
        elif isinstance(grad, tf.IndexedSlices):
            pairs.append((grad, variable))
        elif grad is not None:
            raise TypeError(
                f"The gradient of {variable.name!r} must be a tf.IndexedSlices of keys and rows. "
                f"Received: {type(grad).__name__}."
            )
    return pairs, dense


def _operations(*results: Any) -> list[Any]:
    """Returns what a graph can wait for; nothing in eager mode."""
    return [] if tf.executing_eagerly() else [result for result in results if result is not None]


def _next_step(count: Any) -> tf.Tensor:
    """Returns the number of the coming step, int64, 1 for the first."""
    return tf.cast(tf.convert_to_tensor(count), tf.int64) + 1


def _plain(numbers: Sequence[Any]) -> list[Any]:
    """Returns Python numbers as float64 constants, which tf would make float32."""
    return [
        tf.constant(number, tf.float64) if isinstance(number, (int, float)) else number
        for number in numbers
    ]
