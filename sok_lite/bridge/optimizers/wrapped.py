"""An optimizer of TensorFlow or Keras that steps on tables and dense variables together.

The wrapped optimizer provides the hyperparameters and updates the dense variables; the engine's
kernels update rows of tables, all of a call in one operation.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.optimizers.accumulation import (
    accumulation_of,
    check_accumulates,
    dense_part,
    is_last,
)
from sok_lite.bridge.optimizers.fallback_step import carried_by
from sok_lite.bridge.optimizers.family import FallbackStep, Settings
from sok_lite.bridge.optimizers.grad_transforms import grad_transforms_of
from sok_lite.bridge.optimizers.gradients import transform_grads
from sok_lite.bridge.optimizers.keras3 import batch_counter, num_batches
from sok_lite.bridge.optimizers.loss_scale import inner_of, loss_scale_of
from sok_lite.bridge.optimizers.minimize import check_any, check_trained, gradients_of
from sok_lite.bridge.optimizers.settings import family_of, refuse_unsupported, settings_of
from sok_lite.bridge.optimizers.slots import Shown, begin, create_slots, show_slots
from sok_lite.bridge.optimizers.step import Pairs, RowOptimizer, separated
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.bridge.variable import TableVariable


class Steps(Protocol):
    """Takes steps of tables, as `PerGraphSteps` does."""

    def take(self, grads_and_vars: Iterable[tuple[Any, Any]], *, go: Any) -> Any:
        """Updates tables, where `go`."""


@unconverted
class WrappedOptimizer(RowOptimizer):
    """Makes an optimizer update tables too. Base of the wrappers of all APIs.

    Args:
      optimizer: of Keras 3, tf_keras or tf.compat.v1.train, or a LossScaleOptimizer around one.
      on_nonfinite: for rows whose gradient has a NaN or an infinity. "allow": update and count
        them. "error": raise before anything changes.
      stochastic_rounding: whether 16-bit rows are rounded up or down at random.

    Raises:
      TypeError: not an optimizer, or `stochastic_rounding` is not a bool.
      NotImplementedError: an optimizer whose step has no meaning for rows, that cannot take its
        step itself, or that has a setting which could not act on rows.
    """

    # Whether a step without dense variables also counts in the optimizer's own counter.
    counts_with_optimizer = False

    def __init__(
        self, optimizer: Any, on_nonfinite: str = "allow", stochastic_rounding: bool = False
    ) -> None:
        inner = inner_of(optimizer)
        self._family = family_of(inner)
        self.optimizer = optimizer
        settings = self._settings()  # raises for unsupported settings
        if isinstance(settings, FallbackStep):
            begin(settings, stochastic_rounding)
            self._carried = carried_by(inner)
        super().__init__(on_nonfinite, stochastic_rounding, self._first_step(inner, settings))
        self.optimizer = optimizer
        self._shown = Shown()

    def _first_step(self, inner: Any, settings: Settings | FallbackStep) -> int | None:
        """Returns the number of past steps; None: this object need not count them."""
        iterations = self._family.iterations(inner)
        if iterations is None or not tf.executing_eagerly():
            return 0
        return int(tf.convert_to_tensor(iterations))  # Keras has int(variable) from 3.5 on

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Updates variables with their gradients.

        Communicates only if the optimizer clips norms or may skip a step: then every rank must call
        it, with the same tables in the same order and equal dense gradients.

        Args:
          grads_and_vars: (gradient, variable) pairs of tables and dense variables. Pairs without a
            gradient (None) are left out, with Keras' warning. Repeated keys in a gradient are
            summed.
          global_step: incremented, with tf.compat.v1.train optimizers.
          name: of the operation, if the wrapped optimizer accepts one.

        Returns:
          In a TF1 graph the operation; else what the wrapped optimizer returns, or None.

        Raises:
          TypeError: the gradient of a table is not an IndexedSlices.
          NotImplementedError: a setting changed later could not act on rows.
          CommunicatorError: norms are clipped and a rank has died, or is in another call.
          ValueError: no variable has a gradient, or `on_nonfinite` is "error" and one is not
            finite.
          RuntimeError: the wrapper was made in eager mode and this is a TF1 graph, or vice versa.
        """
        pairs = list(grads_and_vars)
        check_trained(pairs, self._family)
        return self.take(pairs, global_step, name)

    def take(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        go: Any = None,
        beside: Sequence[tuple["Steps", Pairs]] = (),
        **options: Any,
    ) -> Any:
        """As `apply_gradients`, with further options for the dense variables.

        `go` is a scalar bool tensor, whether rows change; `beside` has steps of other optimizers
        and the pairs of their tables, taken or skipped with this one.
        """
        refuse_unsupported(self._inner)
        grads_and_vars = list(grads_and_vars)
        pairs, dense = separated(grads_and_vars)
        self._refuse_others([variable for _, variable in pairs])
        has_dense = any(grad is not None for grad, _ in dense)
        if not pairs and not has_dense and not beside:
            return None
        self._refuse_elsewhere()
        batches = num_batches(self._inner)
        if batches > 1:
            check_accumulates(self.optimizer, self._family)
        loss_scale = loss_scale_of(self.optimizer, self._family, dense)
        self._refuse_step(pairs, loss_scale)
        others = [pair for _, its in beside for pair in its]
        pairs, dense, others, skips = transform_grads(
            self._inner, self._family, pairs, dense, loss_scale, others
        )
        go = is_counted = skips if go is None else go
        for steps, its in beside:
            steps.take(others[: len(its)], go=go)
            others = others[len(its) :]
        if batches > 1:
            go, accumulation = is_last(self._inner), accumulation_of(self._inner)
            tables = [var for _, var in grads_and_vars if isinstance(var, TableVariable)]
            accumulation.know(tables, self._settings().decays)
            pairs = accumulation.pairs(pairs)

        def settings(count: Any) -> tuple[Settings | FallbackStep, Any]:
            rate = self._family.learning_rate(self._inner, count)
            settings = self._settings()
            if isinstance(settings, FallbackStep):
                self._carried = carried_by(self._inner)  # not that of the original of this copy
            self._show_slots(settings, [variable for _, variable in pairs])
            return settings, 0.0 if rate is None else rate

        counts = has_dense or self.counts_with_optimizer or batches > 1
        counter = self._family.iterations(self._inner) if counts else None
        has_more = has_dense or (global_step if self._family is V1 else counter) is not None
        return self._step(
            pairs,
            dense,
            settings,
            partial(self._dense_step, dense, has_dense, global_step, name, is_counted, options)
            if has_more
            else None,
            optimizer=self._inner,
            count=counter,
            go=go,
            batches=batches,
            counts_skipped=loss_scale is not None and loss_scale.counts_skipped,
            name=name,
        )

    def _refuse_elsewhere(self) -> None:
        """Raises if the counter belongs to another graph, or to eager mode."""
        if self.iterations is None:
            return
        with tf.init_scope():
            here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        made_in = self.iterations.graph if self.iterations._in_graph_mode else None
        if made_in is not here:
            names = {True: "eager mode", False: "a graph of TF1"}
            raise RuntimeError(
                f"{type(self).__name__} takes steps where it was made. It was made in "
                f"{names[made_in is None]}. Received: a step in "
                f"{names[here is None] if made_in is None or here is None else 'another graph'}. "
                "Make the optimizer and its wrapper anew there."
            )

    def _refuse_step(self, pairs: Pairs, loss_scale: Any) -> None:
        """Raises for a step that tables with their own kind of steps do not support."""
        apart = [var.table for _, var in pairs if var.table.step_type is not None]
        if not apart:
            return
        why = None
        if isinstance(self._settings(), FallbackStep):
            why = f"rows have no update rule for {type(self._inner).__name__}"
        elif loss_scale is not None:
            why = "a LossScaleOptimizer skips steps of all tables together"
        elif num_batches(self._inner) > 1:
            why = "gradients of several batches are added up in rows of this process"
        elif grad_transforms_of(self._inner, self._family).limit is not None:
            why = "a norm is of the gradients of all workers, which do not wait for each other"
        if why is not None:
            apart[0].step_type.refuse(apart[0].name, why)

    def _refuse_others(self, variables: list[TableVariable]) -> None:
        """Raises if a table has another optimizer of its own."""
        for variable in variables:
            if variable.own_optimizer is not None and variable.own_optimizer is not self._inner:
                raise NotImplementedError(
                    f"Table {variable.table.name!r} has an optimizer of its own, and "
                    f"{type(self).__name__} would train it by {type(self._inner).__name__}. Have "
                    "the optimizer itself apply the gradients, which leaves such tables to theirs, "
                    "or make the table without `optimizer`."
                )

    def _dense_step(
        self,
        dense: Any,
        has_dense: bool,
        global_step: Any,
        name: Any,
        is_counted: Any,
        options: dict[str, Any],
    ) -> Any:
        if self._family is V1:
            if not has_dense:
                return global_step.assign_add(1)
            return self._apply_dense(dense, global_step=global_step, name=name, **options)
        if not has_dense:
            counter = batch_counter(self._inner)
            counter.assign_add(1 if is_counted is None else tf.cast(is_counted, counter.dtype))
            return None
        return self._apply_dense(dense, **options)

    def _apply_dense(self, dense: Any, **options: Any) -> Any:
        """Updates dense variables by the wrapped optimizer."""
        with dense_part(self._inner):
            return self.optimizer.apply_gradients(dense, **options)

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        *,
        tape: tf.GradientTape | None = None,
        grad_loss: Any = None,
        **options: Any,
    ) -> list[tuple[Any, Any]]:
        """Returns (gradient, variable) pairs for `apply_gradients`; a gradient may be None.

        Args:
          loss: a function without arguments, or a tensor, recorded by `tape` for Keras optimizers,
            in a graph for tf.compat.v1.train. Scaled if the optimizer scales it
            (`loss_scale_factor`).
          var_list: tables and dense variables, or a function that returns them; None: all trainable
            ones, with tf.compat.v1.train.
          tape: with Keras optimizers; has recorded, or records, the loss.
          grad_loss: gradient of the loss; None: ones.
          options: further arguments of tf.compat.v1.train's `compute_gradients`, by name.

        Raises:
          ValueError: a tensor without a tape, or no variables.
          TypeError: an argument that optimizers of this family do not have.
        """
        return gradients_of(
            self.optimizer, self._family, loss, var_list, tape, grad_loss, **options
        )

    def minimize(
        self,
        loss: Any,
        var_list: Any = None,
        *,
        tape: tf.GradientTape | None = None,
        grad_loss: Any = None,
        global_step: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Minimizes a loss: `compute_gradients`, then `apply_gradients`.

        Args:
          loss: a function without arguments, or a tensor recorded by `tape` or in a TF1 graph.
          var_list: variables, or a function that returns them; None: all trainable ones, with
            tf.compat.v1.train.
          tape, grad_loss: with Keras optimizers, the tape of the loss, and its gradient; None:
            ones.
          global_step, name: of tf.compat.v1.train, for `apply_gradients`.
          options: further arguments of tf.compat.v1.train's `compute_gradients`, by name.

        Returns:
          What `apply_gradients` returns.

        Raises:
          ValueError: a tensor without a tape, no variables, or none that has a gradient.
          TypeError: an argument that optimizers of this family do not have, or a gradient that does
            not fit its variable.
        """
        pairs = self.compute_gradients(loss, var_list, tape=tape, grad_loss=grad_loss, **options)
        check_any(pairs)
        return self.apply_gradients(pairs, global_step, name)

    @property
    def _inner(self) -> Any:
        """The wrapped optimizer, or the one within a LossScaleOptimizer."""
        return inner_of(self.optimizer)

    def _settings(self) -> Settings | FallbackStep:
        """Returns the settings of a step, by a rule or by the optimizer itself."""
        return settings_of(self._inner, self._family)

    def _make_slots(self, variables: list[Any]) -> None:
        """Creates the states of tables' rows before the first update."""
        settings = self._settings()
        self._show_slots(settings, variables)
        create_slots(self._inner, settings, variables)

    def _show_slots(self, settings: Settings | FallbackStep, variables: list[Any]) -> None:
        """Adds views of states to the wrapped optimizer's slots, once per variable."""
        new = [variable for variable in variables if variable not in self._shown]
        if new:
            show_slots(self._inner, self._family, settings, new)
            self._shown.update(new)
