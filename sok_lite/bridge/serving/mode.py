"""Lookups as plain TensorFlow operations while a model is exported for serving.

Every lookup goes through `dispatch_lookup`, with a version that does not call Python. All else
that would call Python raises during an export.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.set_within import set_within
from sok_lite.bridge.tf_private import kept_by

# The `ServedTables` of the current export. Functions are traced in the calling thread.
_tables: ContextVar[Any] = ContextVar("served_tables", default=None)
# Attribute of TF1 graphs: the lookups built there, in order.
_LOOKUPS = "_sok_lite_lookups"

# Takes the tables of an export and the inputs of a lookup; returns its outputs.
Plain = Callable[..., Sequence[tf.Tensor]]


class Lookup(NamedTuple):
    """A lookup in a TF1 graph, to be replaced by `plain` operations, which hold no table."""

    what: str
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    plain: Plain


def exporting(tables: Any) -> AbstractContextManager[None]:
    """A `with` block in which functions are traced for serving, with the `ServedTables`."""
    return set_within(_tables, tables)


def is_exporting() -> bool:
    """Whether the current trace is for serving."""
    return _tables.get() is not None


def stand_in(handle: tf.Tensor) -> tf.Tensor:
    """Returns a table's resource or, during an export, a substitute.

    TensorFlow colocates a lookup's outputs with the resource, and a served model has no such table.
    """
    tables = _tables.get()
    return handle if tables is None or tf.executing_eagerly() else tables.stand_in


def refuse_while_exporting(what: str) -> None:
    """Raises if a graph for serving would call Python."""
    if is_exporting() and not tf.executing_eagerly():
        raise NotImplementedError(
            f"{what} cannot be exported for serving: only lookups are made plain operations of "
            "TensorFlow. Export a function that looks rows up, and neither writes nor counts nor "
            "trains."
        )


def dispatch_lookup(
    what: str, live: Callable[..., Sequence[Any]], plain: Plain, inputs: Sequence[tf.Tensor]
) -> Sequence[Any]:
    """Returns the outputs of a lookup, in live tables or in those of an export.

    `live` looks up in this process's tables; `plain` does so by plain operations, and holds none.
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
