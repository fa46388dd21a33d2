"""Gradients of several batches in one step: `gradient_accumulation_steps` of Keras 3.

Keras adds up the gradients of each dense variable. A table adds up gradients of its rows, which
step by the mean together with the dense variables: engine/accumulation.py. Keras counts batches.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.grad_transforms import grad_transforms_of
from sok_lite.bridge.optimizers.keras3 import batch_counter, num_batches
from sok_lite.bridge.optimizers.loss_scale import inner_of, scales_loss
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.accumulation import Accumulator

Pairs = list[tuple[tf.IndexedSlices, TableVariable]]


class Accumulation(Accumulator):
    """An optimizer's accumulated gradients, and the tables that take part in its steps."""

    def __init__(self) -> None:
        super().__init__()
        # Whether weight decay applies to them.
        self._decays: weakref.WeakKeyDictionary[TableVariable, bool] = weakref.WeakKeyDictionary()

    def know(self, variables: Iterable[TableVariable], decays: Callable[[Any], bool]) -> None:
        """Makes tables of this process take part in steps."""
        self._decays.update((variable, decays(variable)) for variable in variables)

    @property
    def variables(self) -> dict[TableVariable, bool]:
        """The variables of the tables, and whether weight decay applies to them."""
        return {
            variable: decays
            for variable, decays in list(self._decays.items())
            if variable.table.step_type is None
        }

    def pairs(self, pairs: Pairs) -> Pairs:
        """Returns the gradients of a call; without any, an empty one, so that the call counts."""
        for variable in [] if pairs else self.variables:
            none = tf.zeros((0, variable.dimension)), tf.zeros(0, variable.key_type)
            return [(tf.IndexedSlices(*none), variable)]
        return pairs


_all: "weakref.WeakKeyDictionary[Any, Accumulation]" = weakref.WeakKeyDictionary()


def accumulation_of(optimizer: Any) -> Accumulation:
    """Returns an optimizer's accumulation, always the same object."""
    return _all.setdefault(optimizer, Accumulation())


_of_thread = threading.local()  # the optimizer in the dense part of a step


@contextmanager
def dense_part(optimizer: Any) -> Iterator[None]:
    """A `with` block in which this thread takes the dense part of an optimizer's step."""
    outer, _of_thread.optimizer = getattr(_of_thread, "optimizer", None), optimizer
    try:
        yield
    finally:
        _of_thread.optimizer = outer


def accumulates(optimizer: Any, lists_tables: bool = False) -> bool:
    """Whether tables take part in a step that has no gradient of them.

    `lists_tables`: tables are among the optimizer's variables; else it must know some.
    """
    inner = inner_of(optimizer)
    is_part = getattr(_of_thread, "optimizer", None) is inner
    return not is_part and num_batches(inner) > 1 and (lists_tables or inner in _all)


def check_accumulates(optimizer: Any, family: Family) -> None:
    """Raises NotImplementedError if a change of the mean would apply to each batch."""
    inner, is_scaled = inner_of(optimizer), scales_loss(optimizer)
    transforms = grad_transforms_of(inner, family)
    if is_scaled or transforms.value is not None or transforms.limit is not None:
        what = "a LossScaleOptimizer" if is_scaled else "clipping"
        raise NotImplementedError(
            f"Tables do not support gradient_accumulation_steps={num_batches(inner)} of "
            f"{type(inner).__name__} together with {what}, which acts on the mean of the batches "
            "in Keras. Leave one of them out."
        )


def is_last(optimizer: Any) -> tf.Tensor:
    """Returns whether the current batch is the last of a step, scalar bool."""
    count = tf.cast(tf.convert_to_tensor(batch_counter(optimizer)), tf.int64)
    return tf.equal((count + 1) % num_batches(optimizer), 0)
