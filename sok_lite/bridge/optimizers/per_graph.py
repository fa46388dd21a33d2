"""The steps of an optimizer that a program calls: in eager mode, and in each graph.

The program knows only its optimizer. The object that takes steps of tables is made at the first
step, and belongs to the optimizer.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.optimizers.family import FallbackStep, Settings
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.bridge.optimizers.wrapped import WrappedOptimizer
from sok_lite.bridge.variable import TableVariable

# Takes an optimizer, (gradient, dense variable) pairs and named options; updates the variables.
DenseStep = Callable[..., Any]


class PerGraphOptimizer(WrappedOptimizer):
    """Takes steps of an optimizer whose own method is wrapped; `dense_step` is the original one."""

    counts_with_optimizer = True

    def __init__(self, optimizer: Any, dense_step: DenseStep, **options: Any) -> None:
        self._step_of_dense = dense_step
        super().__init__(optimizer, **options)

    def _settings(self) -> Settings | FallbackStep:
        settings = super()._settings()
        if not isinstance(settings, FallbackStep):
            return settings
        # Other work of the class's method on gradients is already done.
        apply = partial(_apply_copy, self._step_of_dense, self._family is not V1)
        return settings._replace(family=replace(self._family, apply=apply))

    def _first_step(self, inner: Any, settings: Settings | FallbackStep) -> int | None:
        # Otherwise a graph, and its checkpoints, have the same variables as without tables.
        if self._family is V1 and (
            isinstance(settings, FallbackStep) or settings.rule.counts_steps
        ):
            return super()._first_step(inner, settings)
        return None

    def show_states(self, variables: list[Any]) -> None:
        """Creates the states of tables, so that a graph can read them before its first step."""
        if not isinstance(self._settings(), FallbackStep):
            self._make_slots(variables)

    def _apply_dense(self, dense: Any, **options: Any) -> Any:
        if options.get("name") is not None:
            # The name is that of the whole step: running the operation by name must run all of it.
            options["name"] += "_dense"
        return self._step_of_dense(self.optimizer, dense, **options)


def _apply_copy(dense_step: DenseStep, counts: bool, copy: Any, pairs: Any, step: int) -> None:
    """Takes a step of a copy of an optimizer; the first has number 1."""
    if counts:
        copy.iterations.assign(step - 1)
    dense_step(copy, pairs)


@unconverted
class PerGraphSteps:
    """The steps of an optimizer, not kept alive: one object for eager mode and each graph."""

    def __init__(self, optimizer: Any, dense_step: DenseStep, **options: Any) -> None:
        self._optimizer: Any = weakref.ref(optimizer)
        self._dense_step, self._options = dense_step, options
        self._wrapped: weakref.WeakKeyDictionary[Any, PerGraphOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._eager: PerGraphOptimizer | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of an optimizer takes steps of its own

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if it is gone."""
        return self._optimizer()

    def take(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Updates tables and dense variables with their gradients.

        Returns the operation in a TF1 graph; else what the dense step returns, or None.
        """
        pairs, here = list(grads_and_vars), self.here()
        if not tf.executing_eagerly():
            tables = [
                variable
                for grad, variable in pairs
                if isinstance(variable, TableVariable) and grad is not None
            ]
            here.show_states(tables)
        if family_of(self.optimizer) is V1 and name is None:
            name = self.optimizer.get_name()
        if tf.executing_eagerly() or tf.inside_function():
            return here.take(pairs, global_step, name, **options)
        train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
        before = list(train_ops)
        done = here.take(pairs, global_step, name, **options)
        if family_of(self.optimizer) is V1:
            train_ops[:] = [*before, done]  # not only the dense part
        return done

    def here(self) -> PerGraphOptimizer:
        """Returns the object for steps in this graph, or in eager mode; makes it if new."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                graph = tf.compat.v1.get_default_graph()
                if graph not in self._wrapped:
                    self._wrapped[graph] = self._make_step()
                return self._wrapped[graph]
            if self._eager is None:
                self._eager = self._make_step()
                if self._eager.iterations is not None:
                    # The optimizer has no counter of its own: its checkpoints include this one.
                    self.optimizer._track_trackable(
                        self._eager.iterations, "sok_iterations", overwrite=True
                    )
            return self._eager

    def _make_step(self) -> PerGraphOptimizer:
        return PerGraphOptimizer(self.optimizer, self._dense_step, **self._options)
