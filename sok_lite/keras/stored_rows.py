"""A table in the store of a file of Keras: its arrays, of several ranks one set for each rank.

Of a table that keeps texts there are two more, of the texts that each rank knows: `text_keys` (t,)
int64 and `texts` (t,), the texts of these keys.
"""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import tensorflow as tf

from sok_lite.backend.publish import publish
from sok_lite.bridge import stored
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import communicator
from sok_lite.bridge.keras import saving
from sok_lite.engine.texts import settle
from sok_lite.keras.weight import TableWeight

# The start of the names of the arrays of one rank, where several ranks have saved.
_OF_RANK = re.compile(r"rank\d+of(\d+)_")
_TEXTS = {"text_keys": tf.int64, "texts": tf.string}


def save_rows(variable: TableWeight, store: MutableMapping[str, Any], name: str) -> None:
    """Writes keys, rows, optimizer states and scores to a store of Keras; of all ranks, if any.

    Args:
      variable: the table.
      store: takes arrays by name.
      name: of the table, for errors.

    Raises:
      NotImplementedError: there are several ranks, and it is none of `model.save` and
        `model.save_weights`, which every rank calls.
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
    """Makes a table what `save_rows` wrote, on this rank of any number.

    Optimizer states go to optimizers that use the table. Where Keras restores optimizers too the
    rest is for the next that needs the same; else it is dropped.

    Raises:
      ValueError: something is missing or is not of such a table. The table is as it was.
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
        kept.add(texts)  # an interrupt later leaves too many, and no row without its text
    variable.restore_tensors(tensors)
    if not saving.restores_optimizers():
        variable.settle_states()
    if kept is not None:
        publish(kept.plan_replace(texts))
    saving.note(variable)


def _save(variable: TableWeight) -> dict[str, tf.Tensor]:
    """Returns what is written of this rank. With several ranks every rank must call it."""
    tensors, table = variable.saved_tensors(), variable.table
    if table.texts is None:
        return tensors
    kept = on_device(table.backend, settle, table, table.texts, communicator()).as_dict()
    texts = tf.constant(list(kept.values()), tf.string, [len(kept)])
    return tensors | {"text_keys": tf.constant(list(kept), tf.int64, [len(kept)]), "texts": texts}


def _texts_of_rank(
    variable: TableWeight, store: Mapping[str, Any], name: str, saved_by: int
) -> dict[int, bytes]:
    """Returns the texts that this rank takes of a store, by key."""
    comm, found = communicator(), dict[int, bytes]()
    if variable.table.texts is not None:
        for rank in range(comm.rank, saved_by, comm.size):
            prefix = _prefix(rank, saved_by)
            if f"{prefix}text_keys" in list(store.keys()):
                keys, texts = stored.read_tensors(store, _TEXTS, name, prefix).values()
                found |= dict(zip(keys.numpy().tolist(), texts.numpy().tolist(), strict=True))
    return found


def _prefix(rank: int, size: int) -> str:
    """Returns the start of the names of the arrays of a rank."""
    return "" if size == 1 else f"rank{rank}of{size}_"
