"""While a model is exported for serving, a lookup is built of plain operations of TensorFlow.

Whoever looks rows up for a program does so through `looked_up`, and says there how the rows are got
without a call of Python. Everything else that would call Python raises while a model is exported.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.set_within import set_within
from sok_lite.bridge.tf_private import kept_by

# The `ServedTables` of the export that is tracing. Functions are traced in the thread that asks.
_tables: ContextVar[Any] = ContextVar("served_tables", default=None)
# An attribute of TF1 graphs: the lookups that were built there, in their order.
_LOOKUPS = "_sok_lite_lookups"

# Takes the tables of an export and the inputs of a lookup; gives its outputs.
Plain = Callable[..., Sequence[tf.Tensor]]


class Lookup(NamedTuple):
    """A lookup of a TF1 graph, as an export replaces it.

    Attributes:
      what: names it in errors.
      inputs, outputs: tensors of the graph.
      plain: makes like outputs of like inputs, of plain operations. It keeps no table.
    """

    what: str
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    plain: Plain


def exporting(tables: Any) -> AbstractContextManager[None]:
    """A `with` block in which what is traced is for serving.

    Args:
      tables: the `ServedTables` that lookups read.
    """
    return set_within(_tables, tables)


def is_exporting() -> bool:
    """Whether what is traced now is for serving."""
    return _tables.get() is not None


def stand_in(handle: tf.Tensor) -> tf.Tensor:
    """Returns a table's resource, in a graph that is exported another one: TensorFlow puts what a
    lookup gives beside the resource, and a model for serving has no such table."""
    tables = _tables.get()
    return handle if tables is None or tf.executing_eagerly() else tables.stand_in


def refuse_while_exporting(what: str) -> None:
    """Raises where a graph for serving would have a call of Python."""
    if is_exporting() and not tf.executing_eagerly():
        raise NotImplementedError(
            f"{what} cannot be exported for serving: only lookups are made plain operations of "
            "TensorFlow. Export a function that looks rows up, and neither writes nor counts nor "
            "trains."
        )


def looked_up(
    what: str, live: Callable[..., Sequence[Any]], plain: Plain, inputs: Sequence[tf.Tensor]
) -> Sequence[Any]:
    """Returns the outputs of a lookup, of live tables or of those of an export.

    Args:
      what: names it in errors.
      live: takes the inputs, and looks up in the tables of this process.
      plain: does the same by plain operations, and keeps no table.
      inputs: tensors.
    """
    tables = _tables.get()
    if tables is not None:
        return plain(tables, *inputs)
    outputs = live(*inputs)
    if not tf.executing_eagerly() and not tf.inside_function():
        built = kept_by(tf.compat.v1.get_default_graph(), _LOOKUPS, list)
        built.append(Lookup(what, list(inputs), list(outputs), plain))
    return outputs


def lookups_of(graph: Any) -> list[Lookup]:
    """Returns the lookups of a TF1 graph, in the order in which they were built."""
    return list(getattr(graph, _LOOKUPS, []))
