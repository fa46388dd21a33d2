"""`TableWeight`: a layer's table as a weight for Keras, its files, gradient tapes and optimizers.

A Keras file holds the arrays of the table in the store of its layer, with one set for each of
several ranks. A table that keeps strings adds two: `text_keys` (t,) int64 and `texts` (t,), the
strings that the rank knows.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sok_lite.bridge import checkpoint, stored, table_exports
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import communicator, other_ranks
from sok_lite.bridge.keras import saving
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.callers import warn
from sok_lite.engine.optimizer_states import settle_states
from sok_lite.engine.table.restore import NoRoomError
from sok_lite.engine.texts import prune_texts

# Prefix of the array names of one rank, if several ranks saved.
_OF_RANK = re.compile(r"rank\d+of(\d+)_")
_OF_A_FILE = (
    "A file of Keras makes its model with the old max_capacity: build the model anew with a larger "
    "one, and load_weights() of the file. sok.load reads it once `sok-lite convert` has made a "
    "dump of it."
)
_TEXTS = {"text_keys": tf.int64, "texts": tf.string}


@unconverted
class TableWeight(TableVariable):
    """A layer weight whose rows are found by key; `is_frozen`: its layer is not trained."""

    kind = "sok_lite.keras.Table"
    instead_of_value = "Use layer(keys) for some rows and table.export() for all."
    instead_of_write = "Use table.assign(keys, rows)."
    instead_of_copy = "Make another layer of table.get_config(), and set_weights(get_weights())."
    instead_of_custom_step = (
        "Compile the model with an optimizer of the Keras that the layer is of, and keep the table "
        "or its layer where Keras finds it: in an attribute of a layer or model, or in a list or "
        "dict of one."
    )
    instead_of_broadcast = (
        "To give all ranks the weights of one, broadcast the other variables, or give fit() "
        "sok_lite.keras.AllRanks(), which does so."
    )
    instead_of_save = (
        "Save to a path that ends in .keras or .weights.h5; for serving, use "
        "sok_lite.export_serving."
    )
    trained_by_patched = True
    averages_over_ranks = True
    tracked_as_weight = True
    is_frozen = False
    _shown: Any = None  # the rows inside `showing_rows`

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch it."""
        return super().trainable and not self.is_frozen

    @property
    def shape(self) -> tf.TensorShape:
        """[rows on this rank, dim] at this moment, which `model.summary()` counts."""
        size = on_device(self.table.backend, lambda: self.table.size)
        return tf.TensorShape([size, self.dimension])

    @property
    def spec_shape(self) -> tf.TensorShape:
        return tf.TensorShape([None, self.dimension])

    @contextmanager
    def showing_rows(self) -> Iterator[None]:
        """A context in which it reads as a dense variable (n, dim): this rank's rows by ascending
        key.
        """
        handle, rows = self._handle, tf.Variable(table_exports.export(self)[1], trainable=False)
        # Eager operators read `_handle` and call no method.
        self._shown, self._handle = rows, rows.handle
        try:
            yield
        finally:
            self._shown, self._handle = None, handle

    def _dense_var_to_tensor(self, *args: Any, **kwargs: Any) -> Any:
        if self._shown is not None:
            return self._shown._dense_var_to_tensor(*args, **kwargs)
        return super()._dense_var_to_tensor(*args, **kwargs)

    def saved_dtypes(self) -> dict[str, tf.DType]:
        """Returns names and dtypes of saved tensors; see bridge/checkpoint.py."""
        return checkpoint.saved_dtypes(self.key_type, self.dtype)

    def saved_tensors(self) -> dict[str, tf.Tensor]:
        """Returns this rank's keys, rows, optimizer states and scores as eager tensors."""
        return checkpoint.serialized(self)

    def restore_tensors(self, tensors: dict[str, tf.Tensor]) -> None:
        """Replaces the content of the table by `saved_tensors`."""
        checkpoint.restored(self, tensors)

    def settle_states(self) -> None:
        """Makes a new optimizer start fresh, whatever states the table was restored with."""
        on_device(self.table.backend, settle_states, self.table)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        rank, size = part = _part()
        if size > 1:
            warn(
                f"A checkpoint of TensorFlow has of {self.name!r} the rows of one rank, here of "
                f"rank {rank} of {size}. Every rank has to write one, to a path of its own. Or "
                "have every rank call model.save(path): that is one file of all ranks.",
            )
        return checkpoint.serialized(self, part)

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return checkpoint.restored(self, restored_tensors, _part())


def _part() -> tuple[int, int]:
    """Returns this rank and the number of ranks."""
    comm = other_ranks()
    return (0, 1) if comm is None else (comm.rank, comm.size)


# ---- in the store of a Keras file --------------------------------------------------------------


def save_rows(variable: TableWeight, store: MutableMapping[str, Any], name: str) -> None:
    """Writes keys, rows, optimizer states and scores of all ranks to a Keras store.

    NotImplementedError: on several ranks, called outside `model.save` and `model.save_weights`,
    which every rank calls.
    """
    comm = communicator()
    if comm.size == 1:
        stored.write_tensors(store, _save(variable))
    else:
        if not saving.all_ranks_save.get():
            raise NotImplementedError(
                f"The rows of {name!r} are on {comm.size} ranks, and this would save "
                "those of one. Have every rank call model.save(path), or "
                "model.save_weights(path)."
            )
        arrays: dict[str, Any] = {}
        stored.write_tensors(arrays, _save(variable))
        for rank, part in enumerate(stored.parts_of_all(comm, arrays)):
            for each, array in part.items():
                store[_prefix(rank, comm.size) + each] = array
    saving.note(variable)


def load_rows(variable: TableWeight, store: Mapping[str, Any], name: str) -> None:
    """Replaces the content of a table by what `save_rows` wrote, on any number of ranks.

    Optimizer states go to optimizers that use the table. If Keras restores optimizers too, the rest
    waits for the next one with the same states; otherwise it is dropped. ValueError: something is
    missing or is from another kind of table, and nothing has changed.
    """
    comm, dtypes = communicator(), variable.saved_dtypes()
    found = {match[1] for match in map(_OF_RANK.match, store.keys()) if match}
    saved_by = int(found.pop()) if found else 1
    if saved_by == comm.size:
        tensors = stored.read_tensors(store, dtypes, name, _prefix(comm.rank, saved_by))
    else:
        parts = [
            stored.read_tensors(store, dtypes, name, _prefix(rank, saved_by))
            for rank in range(saved_by)
        ]
        tensors = stored.part_of_rank(parts, variable.table, comm.rank, comm.size)
    texts, kept = _texts_of_rank(variable, store, name, saved_by), variable.table.texts
    if kept is not None:
        kept.add(texts)  # an interrupt later leaves surplus strings, and no row without its string
    try:
        variable.restore_tensors(tensors)
    except NoRoomError as error:
        raise ValueError(f"{error} {_OF_A_FILE}") from error
    if not saving.restores_optimizers():
        variable.settle_states()
    if kept is not None:
        kept.replace(texts)
    saving.note(variable)


def _save(variable: TableWeight) -> dict[str, tf.Tensor]:
    """Returns this rank's tensors to write. On several ranks every rank must call it."""
    tensors, table = variable.saved_tensors(), variable.table
    if table.texts is None:
        return tensors
    kept = on_device(table.backend, prune_texts, table, table.texts, communicator()).as_dict()
    texts = tf.constant(list(kept.values()), tf.string, [len(kept)])
    return tensors | {"text_keys": tf.constant(list(kept), tf.int64, [len(kept)]), "texts": texts}


def _texts_of_rank(
    variable: TableWeight, store: Mapping[str, Any], name: str, saved_by: int
) -> dict[int, bytes]:
    """Returns the strings that this rank takes from a store, by key."""
    comm, found = communicator(), dict[int, bytes]()
    if variable.table.texts is not None:
        for rank in range(comm.rank, saved_by, comm.size):
            prefix = _prefix(rank, saved_by)
            if f"{prefix}text_keys" in list(store.keys()):
                keys, texts = stored.read_tensors(store, _TEXTS, name, prefix).values()
                found |= dict(zip(keys.numpy().tolist(), texts.numpy().tolist(), strict=True))
    return found


def _prefix(rank: int, size: int) -> str:
    """Returns the prefix of a rank's array names."""
    return "" if size == 1 else f"rank{rank}of{size}_"
