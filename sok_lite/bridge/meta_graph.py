"""Meta graphs, which TF1 savers write beside checkpoints: tables are left out, and imports refused.

An imported graph would not have tables of its own: its operations would call those of the graph
that was exported, where that is still alive, and restore a checkpoint into them.
"""

from typing import Any, NoReturn

import tensorflow as tf

from sok_lite.bridge.tf_private import register_proto_function

# The collection of the tables of a graph.
_TABLES = "sok_lite_tables"


def add_to_graph(variable: Any) -> None:
    """Has the meta graphs of its TF1 graph refuse to be imported: `variable` is a table."""
    tf.compat.v1.add_to_collection(_TABLES, variable)


def leave_out(collection: str) -> None:
    """Leaves what is in a collection out of meta graphs, which cannot hold tables."""
    register_proto_function(
        collection, proto_type=tf.train.BytesList, to_proto=_nothing, from_proto=_refuse
    )


def _nothing(variable: Any, export_scope: str | None = None) -> None:
    pass


def _named(variable: Any, export_scope: str | None = None) -> tf.train.BytesList:
    return tf.train.BytesList(value=[variable.kind.encode(), variable.name.encode()])


def _refuse(names: tf.train.BytesList, import_scope: str | None = None) -> NoReturn:
    kind, name = (each.decode() for each in names.value)
    raise NotImplementedError(
        f"A meta graph does not hold {kind} {name!r}: its operations are calls of the process and "
        "of the graph that made them. Build the graph again, by the code that built this one, and "
        "restore the checkpoint there."
    )


register_proto_function(_TABLES, proto_type=tf.train.BytesList, to_proto=_named, from_proto=_refuse)
