"""How `tf.compat.v1.train.Saver` saves KvVariables.

A KvVariable is also a SaveableObject, which savers check for first. One call makes the tensors of
all partitions, so they are of one moment. A restore reads the files itself, so it accepts any
number of partitions and the files of all saving ranks; TensorFlow's own operation only has to find
one tensor.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.checkpoint import as_tensors
from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.meta_graph import leave_out
from sok_lite.bridge.saveable import saver_call
from sok_lite.bridge.table_call import text_call
from sok_lite.bridge.tf_private import SaveableObject, SaveSpec
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.locking import with_lock
from sok_lite.kv_variable.saved_files import check_path
from sok_lite.kv_variable.saved_table import SavedTable
from sok_lite.kv_variable.saved_tensors import PREDICT, TRAIN, saved_dtypes
from sok_lite.kv_variable.share import Share

# The variables of a TF1 graph.
GRAPH_COLLECTION = "kv_variables"
leave_out(GRAPH_COLLECTION)
# A program feeds False for a delta.
_FULL_EXPORT = "do_full_export"

_mode = TRAIN
_is_delta_export_enabled = False

_DEVICE = "CPU:0"  # where checkpoints are written and read


class KvVariableSaveable(SaveableObject):
    """A KvVariable with options for the list of a `tf.compat.v1.train.Saver`.

    A KvVariable in the list is saved with the defaults. With a dict, TensorFlow does not pass on
    the names: they have no effect here.

    Args:
      variable: a KvVariable, partition or PartitionedKvVariable.
      name: of the variable in the checkpoint; None: its own.
      mode: 1: everything for training. 0: keys and rows only. None: from `set_tfplus_saver_mode`.
    """

    def __init__(self, variable: Any, name: str | None = None, mode: int | None = None) -> None:
        self.op, self.name = variable.op, variable.name
        self._saved: SavedTable = variable.saved
        self._handles = [part.handle for part in variable.parts]
        self._shares = [part.share for part in variable.parts]
        self._named = self._saved.name if name is None else name
        mode = _saver_mode() if mode is None else _checked_mode(mode)
        self._how = (mode, _delta_export_enabled())

    @property
    def specs(self) -> list[Any]:
        """The names and tensors for the current operation of a saver."""
        call = saver_call()
        if call is not None and call.restores:
            made, what = _saver_cache(self._saved, call.filename), ("found", self._named)
            if what not in made:
                made[what] = _find_tensor(self._saved, self._named, call.filename)
            key_type = self._saved.key_type
            return [SaveSpec(lambda: tf.zeros([0], key_type), "", made[what], key_type, _DEVICE)]
        dtypes = saved_dtypes(self._saved.key_type, self._saved.dtype)
        unnamed: dict[Any, Any] = {}

        def tensor(share: Share, name: str) -> tf.Tensor:
            call = saver_call()
            filename = None if call is None else call.filename
            made = unnamed if filename is None else _saver_cache(self._saved, filename)
            what = ("saved", *self._how)
            if what not in made:
                made[what] = _save_table(self._saved, *self._how, filename)
            return made[what][share.number, name]

        return [
            SaveSpec(
                partial(tensor, share, name),
                "",
                f"{self._saved.prefix(self._named, share)}-{name}",
                dtype,
                _DEVICE,
            )
            for share in self._shares
            for name, dtype in dtypes.items()
        ]

    @specs.setter
    def specs(self, value: Any) -> None:
        raise AttributeError("`specs` are made when they are asked for.")

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns the operation that restores the table and marks its variables as initialized.

        The saver has found the tensor that `specs` named, which proves that the file has it.
        """
        call = saver_call()
        if call is None:
            raise RuntimeError(
                f"{self.name!r} is restored by a tf.compat.v1.train.Saver alone, not by "
                "init_from_checkpoint or warm_start: its rows are known by key and are no initial "
                "value. Name the other variables there in place of their scope, initialize, and "
                "then call "
                f"Saver([KvVariableSaveable(v, {self._named!r})]).restore(session, path), with the "
                "name that the checkpoint has."
            )
        made, what = _saver_cache(self._saved, call.filename), ("restored", self._named)
        if what not in made:
            made[what] = _restore(
                self._saved, self._named, self._how[1], call.filename, restored_tensors[0]
            )
        if tf.executing_eagerly():
            return tf.no_op()
        return self._saved.mark_initialized(self._handles, made[what])


def _saver_cache(saved: SavedTable, filename: tf.Tensor) -> dict[Any, Any]:
    """Returns the tensors and operations made of a table for one saver, shared by its partitions.

    Keys: ("saved", mode, has_deltas): tensors by partition and name; ("found", variable name): a
    tensor name in the checkpoint; ("restored", variable name): the restoring operation.
    """
    if saved.made is None or saved.made[0]() is not filename:
        saved.made = (weakref.ref(filename), {})
    return saved.made[1]


def _save_table(
    saved: SavedTable, mode: int, has_deltas: bool, filename: tf.Tensor | None
) -> dict[tuple[int, str], tf.Tensor]:
    """Returns the tensors of all partitions of a table, from one call."""
    dtypes = saved_dtypes(saved.key_type, saved.dtype)
    shares = [Share(number, saved.count) for number in range(saved.count)]
    whole, name = weakref.ref(saved), saved.name

    def run(
        table: EmbeddingTable, is_full: tf.Tensor, path: tf.Tensor, *_: tf.Tensor
    ) -> list[tf.Tensor]:
        check_path(tf.compat.as_str(path.numpy()), name)
        save = partial(alive(whole).saved, shares, mode, bool(is_full), has_deltas)
        parts = with_lock(table, save)
        with tf.device(_DEVICE):
            return [
                tensors[name]
                for tensors in [as_tensors(part, dtypes) for part in parts]
                for name in dtypes
            ]

    inputs = [_is_full(has_deltas), "" if filename is None else filename]
    if not tf.executing_eagerly():
        # Fails in a session that has not initialized it. An input, because TensorFlow prunes
        # others.
        inputs += [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=saved.dtype)
            for handle in saved.handles
        ]
    outputs = list(dtypes.values()) * len(shares)
    tensors = text_call(saved, f"Saving {name!r}", run, inputs, outputs, [None] * len(outputs))
    names = [(share.number, tensor) for share in shares for tensor in dtypes]
    return dict(zip(names, tensors, strict=True))


def _is_full(has_deltas: bool) -> tf.Tensor:
    """Returns whether a save is full; in a graph a placeholder that a program can feed."""
    if not has_deltas or tf.executing_eagerly():
        return tf.constant(True)
    graph = tf.compat.v1.get_default_graph()
    try:
        return graph.get_tensor_by_name(f"{_FULL_EXPORT}:0")
    except KeyError:
        with tf.compat.v1.name_scope(None):
            return tf.compat.v1.placeholder_with_default(True, [], name=_FULL_EXPORT)


def _find_tensor(saved: SavedTable, name: str, filename: tf.Tensor) -> Any:
    """Returns the name of a checkpoint's tensor of key type, or an expected name for the error."""
    whole = weakref.ref(saved)

    def run(path: tf.Tensor) -> list[tf.Tensor]:
        ours: SavedTable = alive(whole)
        place = ours.place(tf.compat.as_str(path.numpy()), name)
        with tf.device(_DEVICE):
            return [tf.constant(place)]

    what = f"The restore of {saved.name!r}"
    (found,) = host_call(
        run, [filename], [tf.string], saved.table.backend, what, handles=saved.handles
    )
    if tf.executing_eagerly():
        return tf.compat.as_str(found.numpy())
    found.set_shape([])
    return found


def _restore(
    saved: SavedTable, name: str, has_deltas: bool, filename: tf.Tensor, found: tf.Tensor
) -> Any:
    """Returns the operation that restores a table, after a tensor of it was found."""
    whole = weakref.ref(saved)

    def run(table: EmbeddingTable, path: tf.Tensor) -> list[tf.Tensor]:
        alive(whole).restore(tf.compat.as_str(path.numpy()), name, has_deltas)
        return []

    with tf.control_dependencies([found]):
        return text_call(saved, f"The restore of {saved.name!r}", run, [filename])


class SavedBySavers:
    """The part of KvVariable that implements SaveableObject, by its `saved` table."""

    name: str
    saved: SavedTable
    handle: tf.Tensor
    _in_graph_mode: bool

    @property
    def op(self) -> Any:
        """The operation of its resource in a graph, the resource in eager mode."""
        return self.handle.op if self._in_graph_mode else self.handle

    @property
    def specs(self) -> list[Any]:
        """The tensors for a TF1 saver made now; ValueError if it uses another name for this."""
        call = saver_call()
        if call is not None:
            self._check_names(call.names)
        return KvVariableSaveable(self).specs

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns the saver's operation to restore it."""
        return KvVariableSaveable(self).restore(restored_tensors, restored_shapes)

    def _check_names(self, names: Mapping[str, Any]) -> None:
        ours = (self.name, self.name.removesuffix(":0"), self.saved.name)
        for name, saved in names.items():
            each = saved if isinstance(saved, (list, tuple)) else [saved]
            if name not in ours and any(part is self for part in each):
                raise ValueError(
                    f"A saver saves KvVariable {self.name!r} by its own name. Received: {name!r}. "
                    "Give it KvVariableSaveable(variable, name) in place of the variable."
                )

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Returns nothing: `tf.train.Checkpoint` saves the table once for all partitions."""
        return {}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return tf.no_op()


# ---- modes and deltas ----------------------------------------------------------------------------


def set_tfplus_saver_mode(mode: int) -> None:
    """Sets what savers made from now on save of KvVariables.

    Args:
      mode: 1: everything for training. 0: keys and rows only, without rows of zeros.

    Raises:
      ValueError: another mode.
    """
    global _mode
    _mode = _checked_mode(mode)


def _saver_mode() -> int:
    """Returns the mode of a saver made now."""
    return _mode


def _checked_mode(mode: int) -> int:
    """Returns a valid mode, or raises ValueError."""
    if mode not in (TRAIN, PREDICT):
        raise ValueError("Expected tfplus saver mode to be 0 or 1.")
    return int(mode)


def enable_delta_export() -> None:
    """Makes savers created from now on able to save deltas; SUPPORT_DELTA_EXPORT=1 does the same.

    Such a saver saves in full unless a run feeds False to the graph's "do_full_export:0": then it
    saves the KvVariable keys that are new, changed or removed since the last full save. Restore the
    full save, then the delta. `save_delta` makes such a run.
    """
    global _is_delta_export_enabled
    _is_delta_export_enabled = True


def disable_delta_export() -> None:
    """Undoes `enable_delta_export` for savers created from now on."""
    global _is_delta_export_enabled
    _is_delta_export_enabled = False


def enable_full_or_delta_import_v2() -> None:
    """No effect: every restore accepts full saves and deltas."""


def disable_full_or_delta_import_v2() -> None:
    """No effect: every restore accepts full saves and deltas."""


def enable_save_v3() -> None:
    """No effect: there is one format."""


def disable_save_v3() -> None:
    """No effect: there is one format."""


def set_new_num_shards(num_shards: int) -> None:
    """No effect: every restore accepts any number of partitions."""


def _delta_export_enabled() -> bool:
    """Whether a saver made now can save deltas."""
    return _is_delta_export_enabled or os.environ.get("SUPPORT_DELTA_EXPORT") == "1"


def save_delta(saver: Any, session: Any, path: str) -> str:
    """Saves KvVariable changes since the last full save, and dense variables in full.

    Args:
      saver: a `tf.compat.v1.train.Saver` made while deltas were enabled.
      session: of its graph.
      path: prefix of the files. The saver does not list it among its checkpoints.

    Returns:
      The path.

    Raises:
      ValueError: the saver does not save deltas.
    """
    try:
        session.graph.get_tensor_by_name(f"{_FULL_EXPORT}:0")
    except KeyError:
        raise ValueError(
            "The saver was made without deltas. Call enable_delta_export() before it is made, and "
            "save in full first."
        ) from None
    names = saver.saver_def
    feed = {names.filename_tensor_name: path, f"{_FULL_EXPORT}:0": False}
    saved = session.run(names.save_tensor_name, feed)
    return str(tf.compat.as_str(saved))
