"""How `tf.compat.v1.train.Saver` saves KvVariables: what it finds when it asks one for its tensors.

A KvVariable is a SaveableObject of TensorFlow's as well, which savers take before anything else.
The tensors of all partitions come from one call, so they are of one moment. A restore looks into
the file itself: so it takes any number of partitions and the files of all ranks that have saved,
and of TensorFlow's own operation it wants no more than that it finds one tensor.

`Saver.save` writes a meta graph beside each checkpoint. The operations of a table call Python
functions of the process that has built them, which no file can hold, so an import refuses it.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import tensorflow as tf

from sok_lite.bridge.checkpoint import as_tensors
from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.saveable import saver_call
from sok_lite.bridge.table_call import text_call
from sok_lite.bridge.tf_private import SaveableObject, SaveSpec, register_proto_function
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone
from sok_lite.kv_variable.saved_files import check_path
from sok_lite.kv_variable.saved_table import SavedTable
from sok_lite.kv_variable.saved_tensors import PREDICT, TRAIN, saved_dtypes
from sok_lite.kv_variable.share import Share

# Of a TF1 graph, its variables.
GRAPH_COLLECTION = "kv_variables"
# What a program feeds False for a delta.
_FULL_EXPORT = "do_full_export"

_mode = TRAIN
_is_delta_export_enabled = False

_DEVICE = "CPU:0"  # where checkpoints are written and read


class KvVariableSaveable(SaveableObject):
    """A KvVariable for a `tf.compat.v1.train.Saver` that is told what to save, in a list or dict.

    A KvVariable in such a list is saved as this with its defaults. The names of a dict are not used
    for these: TensorFlow does not tell them.

    Args:
      variable: a KvVariable, partition or PartitionedKvVariable.
      name: of the variable in the checkpoint; None: its own.
      mode: 1: all that training needs. 0: keys and rows alone. None: as `set_tfplus_saver_mode`
        says.
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
        """Names of tensors, and the tensors, for what the saver does that asks."""
        call = saver_call()
        if call is not None and call.restores:
            made, what = _made_for(self._saved, call.filename), ("found", self._named)
            if what not in made:
                made[what] = _found(self._saved, self._named, call.filename)
            key_type = self._saved.key_type
            return [SaveSpec(lambda: tf.zeros([0], key_type), "", made[what], key_type, _DEVICE)]
        dtypes = saved_dtypes(self._saved.key_type, self._saved.dtype)
        unnamed: dict[Any, Any] = {}

        def tensor(share: Share, name: str) -> tf.Tensor:
            call = saver_call()
            filename = None if call is None else call.filename
            made = unnamed if filename is None else _made_for(self._saved, filename)
            what = ("saved", *self._how)
            if what not in made:
                made[what] = _saved(self._saved, *self._how, filename)
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
        """Returns the operation that makes the table what was saved, and its variables initialized.

        Args:
          restored_tensors: of the tensor that `specs` named, which must have been found.
          restored_shapes: not used.
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
        made, what = _made_for(self._saved, call.filename), ("restored", self._named)
        if what not in made:
            made[what] = _restore(
                self._saved, self._named, self._how[1], call.filename, restored_tensors[0]
            )
        if tf.executing_eagerly():
            return tf.no_op()
        return self._saved.initialized(self._handles, made[what])


def _made_for(saved: SavedTable, filename: tf.Tensor) -> dict[Any, Any]:
    """Returns what was made of a table for the saver of a file name, shared by all partitions.

    By ("saved", mode, whether there are deltas) the tensors by number of partition and name; by
    ("found", name of the variable) the name of one tensor of it that a checkpoint has; by
    ("restored", name of the variable) the operation that restores it.
    """
    if saved.made is None or saved.made[0]() is not filename:
        saved.made = (weakref.ref(filename), {})
    return saved.made[1]


def _saved(
    saved: SavedTable, mode: int, has_deltas: bool, filename: tf.Tensor | None
) -> dict[tuple[int, str], tf.Tensor]:
    """Returns the tensors of all partitions of a table, of one call."""
    dtypes = saved_dtypes(saved.key_type, saved.dtype)
    shares = [Share(number, saved.count) for number in range(saved.count)]
    whole, name = weakref.ref(saved), saved.name

    def run(
        table: EmbeddingTable, is_full: tf.Tensor, path: tf.Tensor, *_: tf.Tensor
    ) -> list[tf.Tensor]:
        check_path(tf.compat.as_str(path.numpy()), name)
        save = partial(alive(whole).saved, shares, mode, bool(is_full), has_deltas)
        parts = alone(table, save)
        with tf.device(_DEVICE):
            return [
                tensors[name]
                for tensors in [as_tensors(part, dtypes) for part in parts]
                for name in dtypes
            ]

    inputs = [_is_full(has_deltas), "" if filename is None else filename]
    if not tf.executing_eagerly():
        # An error where the session has not initialized it. Given, lest TensorFlow leaves it out.
        inputs += [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=saved.dtype)
            for handle in saved.handles
        ]
    outputs = list(dtypes.values()) * len(shares)
    tensors = text_call(saved, f"Saving {name!r}", run, inputs, outputs, [None] * len(outputs))
    names = [(share.number, tensor) for share in shares for tensor in dtypes]
    return dict(zip(names, tensors, strict=True))


def _is_full(has_deltas: bool) -> tf.Tensor:
    """Returns whether a save is a full one, in a graph what a program can feed."""
    if not has_deltas or tf.executing_eagerly():
        return tf.constant(True)
    graph = tf.compat.v1.get_default_graph()
    try:
        return graph.get_tensor_by_name(f"{_FULL_EXPORT}:0")
    except KeyError:
        with tf.compat.v1.name_scope(None):
            return tf.compat.v1.placeholder_with_default(True, [], name=_FULL_EXPORT)


def _found(saved: SavedTable, name: str, filename: tf.Tensor) -> Any:
    """Returns the name of a tensor of key type that a checkpoint has of a variable.

    Where there is none it is the name that there should be: TensorFlow's error tells of it.
    """
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
    """The part of a KvVariable that makes it a SaveableObject as well.

    Attributes:
      saved: what checkpoints know the table by.
    """

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
        """The tensors that a `tf.compat.v1.train.Saver` made now saves, by its mode.

        Raises:
          ValueError: the saver has another name for it.
        """
        call = saver_call()
        if call is not None:
            self._check_names(call.names)
        return KvVariableSaveable(self).specs

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns what such a saver restores it by."""
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
        """Returns nothing: `tf.train.Checkpoint` saves the table, once for all partitions."""
        return {}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return tf.no_op()

    def to_proto(self, export_scope: Any = None) -> None:
        """Returns None: the Python functions of a table's operations are not in a meta graph.

        So TensorFlow leaves the variable out of the meta graph that `Saver.save` writes.
        """


# ---- modes and deltas ----------------------------------------------------------------------------


def set_tfplus_saver_mode(mode: int) -> None:
    """Sets what savers save of KvVariables that are made from now on.

    Args:
      mode: 1: all that training needs. 0: keys and rows alone, those that are not zeros.

    Raises:
      ValueError: another mode.
    """
    global _mode
    _mode = _checked_mode(mode)


def _saver_mode() -> int:
    """Returns the mode of a saver that is made now."""
    return _mode


def _checked_mode(mode: int) -> int:
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


def _delta_export_enabled() -> bool:
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


# ---- meta graphs, which a saver writes beside each checkpoint ------------------------------------


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
