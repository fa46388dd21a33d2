"""Gradients of several batches in one step: `gradient_accumulation_steps` of Keras 3.

Keras adds up a dense gradient for each variable. Those of a table are added up in its rows, and
these move by the mean when the dense variables do: engine/accumulation.py. Keras counts batches.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.changes import changes_of
from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.keras3 import batch_counter, num_batches
from sok_lite.bridge.optimizers.loss_scale import inner_of, scales_loss
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.accumulation import Accumulator

Pairs = list[tuple[tf.IndexedSlices, TableVariable]]


class Accumulation(Accumulator):
    """What an optimizer has accumulated.

    It knows the tables that take part in steps, also where the last batch of one has no gradient of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        # Whether weight decay acts on them.
        self._decays: weakref.WeakKeyDictionary[TableVariable, bool] = weakref.WeakKeyDictionary()

    def know(self, variables: Iterable[TableVariable], decays: Callable[[Any], bool]) -> None:
        """Has tables of this process take part in steps."""
        self._decays.update((variable, decays(variable)) for variable in variables)

    @property
    def variables(self) -> dict[TableVariable, bool]:
        """The variables of the tables, and whether weight decay acts on them."""
        return {
            variable: decays
            for variable, decays in list(self._decays.items())
            if variable.table.step_type is None
        }

    def pairs(self, pairs: Pairs) -> Pairs:
        """Returns the gradients of a call; where it has none, one without keys: the call is one of
        the tables too."""
        for variable in [] if pairs else self.variables:
            none = tf.zeros((0, variable.dimension)), tf.zeros(0, variable.key_type)
            return [(tf.IndexedSlices(*none), variable)]
        return pairs


_all: "weakref.WeakKeyDictionary[Any, Accumulation]" = weakref.WeakKeyDictionary()


def accumulation_of(optimizer: Any) -> Accumulation:
    """Returns what an optimizer has accumulated, the same object each time."""
    return _all.setdefault(optimizer, Accumulation())


_of_thread = threading.local()  # the optimizer whose dense part of a step is being taken


@contextmanager
def dense_part(optimizer: Any) -> Iterator[None]:
    """Within it this thread takes the dense part of a step of an optimizer."""
    outer, _of_thread.optimizer = getattr(_of_thread, "optimizer", None), optimizer
    try:
        yield
    finally:
        _of_thread.optimizer = outer


def accumulates(optimizer: Any, lists_tables: bool = False) -> bool:
    """Whether tables have a part in a step of an optimizer that has no gradient of them.

    Args:
      lists_tables: whether tables are among its variables, which it then need not know.
    """
    inner = inner_of(optimizer)
    is_part = getattr(_of_thread, "optimizer", None) is inner
    return not is_part and num_batches(inner) > 1 and (lists_tables or inner in _all)


def check_accumulates(optimizer: Any, family: Family) -> None:
    """Raises NotImplementedError where what is done to the mean would be done to each gradient."""
    inner, is_scaled = inner_of(optimizer), scales_loss(optimizer)
    changes = changes_of(inner, family)
    if is_scaled or changes.value is not None or changes.limit is not None:
        what = "a LossScaleOptimizer" if is_scaled else "clipping"
        raise NotImplementedError(
            f"Tables do not support gradient_accumulation_steps={num_batches(inner)} of "
            f"{type(inner).__name__} together with {what}, which acts on the mean of the batches "
            "in Keras. Leave one of them out."
        )


def is_last(optimizer: Any) -> tf.Tensor:
    """Returns whether the coming batch is the last of a step, scalar bool."""
    count = tf.cast(tf.convert_to_tensor(batch_counter(optimizer)), tf.int64)
    return tf.equal((count + 1) % num_batches(optimizer), 0)
