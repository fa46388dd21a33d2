"""What a meta graph has of KvVariables: their names, so that an import of it can refuse them.

`Saver.save` writes a meta graph beside each checkpoint. The operations of a table call Python
functions of the process that has built them, which no file can hold.
"""

from typing import Any, NoReturn

import tensorflow as tf

from sok_lite.bridge.tf_private import register_proto_function

# Of a TF1 graph, its variables.
GRAPH_COLLECTION = "kv_variables"


def _to_proto(variable: Any, export_scope: str | None = None) -> tf.train.BytesList:
    return tf.train.BytesList(value=[variable.name.encode()])


def _from_proto(names: tf.train.BytesList, import_scope: str | None = None) -> NoReturn:
    raise NotImplementedError(
        f"A meta graph does not hold KvVariable {names.value[0].decode()!r}: its operations are "
        "Python functions of the process that has built them. Build the graph by get_kv_variable "
        "and the like, and restore the checkpoint by tf.compat.v1.train.Saver()."
    )


register_proto_function(
    GRAPH_COLLECTION, proto_type=tf.train.BytesList, to_proto=_to_proto, from_proto=_from_proto
)
