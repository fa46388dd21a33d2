"""Modes and deltas of savers of TF1, and the names of KvVariables in meta graphs.

`Saver.save` writes a meta graph beside each checkpoint. The operations of a table call Python
functions of the process that has built them, which no file can hold, so an import refuses it.
"""

import os
from typing import Any, NoReturn

import tensorflow as tf

from sok_lite.bridge.tf_private import register_proto_function
from sok_lite.kv_variable.saved_tensors import PREDICT, TRAIN

# What a program feeds False for a delta.
FULL_EXPORT = "do_full_export"

_mode = TRAIN
_is_delta_export_enabled = False


def set_tfplus_saver_mode(mode: int) -> None:
    """Sets what savers save of KvVariables that are made from now on.

    Args:
      mode: 1: all that training needs. 0: keys and rows alone, those that are not zeros.

    Raises:
      ValueError: another mode.
    """
    global _mode
    _mode = checked_mode(mode)


def saver_mode() -> int:
    """Returns the mode of a saver that is made now."""
    return _mode


def checked_mode(mode: int) -> int:
    """Returns a mode, or raises ValueError where there is no such one."""
    if mode not in (TRAIN, PREDICT):
        raise ValueError("Expected tfplus saver mode to be 0 or 1.")
    return int(mode)


def enable_delta_export() -> None:
    """Lets savers that are made from now on save deltas; so does SUPPORT_DELTA_EXPORT=1 in the
    environment.

    Such a saver saves in full, unless a run is fed False for the graph's "do_full_export:0": then
    it saves the keys of KvVariables that are new or have changed since the last full save, and
    which are gone. Restore the full save and then the delta. `save_delta` does
    such a run.
    """
    global _is_delta_export_enabled
    _is_delta_export_enabled = True


def disable_delta_export() -> None:
    """Ends what `enable_delta_export` began; savers that were made before go on."""
    global _is_delta_export_enabled
    _is_delta_export_enabled = False


def enable_full_or_delta_import_v2() -> None:
    """Does nothing: every restore takes full saves and deltas."""


def disable_full_or_delta_import_v2() -> None:
    """Does nothing: every restore takes full saves and deltas."""


def enable_save_v3() -> None:
    """Does nothing: there is one format."""


def disable_save_v3() -> None:
    """Does nothing: there is one format."""


def set_new_num_shards(num_shards: int) -> None:
    """Does nothing: every restore takes any number of partitions."""


def delta_export_enabled() -> bool:
    """Whether a saver that is made now can save deltas."""
    return _is_delta_export_enabled or os.environ.get("SUPPORT_DELTA_EXPORT") == "1"


def save_delta(saver: Any, session: Any, path: str) -> str:
    """Saves what has changed in KvVariables since the last full save, and dense variables whole.

    Args:
      saver: a `tf.compat.v1.train.Saver` that was made while deltas were enabled.
      session: of its graph.
      path: what the files' names start with. The saver does not count it among its checkpoints.

    Returns:
      The path.

    Raises:
      ValueError: the saver does not save deltas.
    """
    try:
        session.graph.get_tensor_by_name(f"{FULL_EXPORT}:0")
    except KeyError:
        raise ValueError(
            "The saver was made without deltas. Call enable_delta_export() before it is made, and "
            "save in full first."
        ) from None
    names = saver.saver_def
    feed = {names.filename_tensor_name: path, f"{FULL_EXPORT}:0": False}
    saved = session.run(names.save_tensor_name, feed)
    return str(tf.compat.as_str(saved))


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
