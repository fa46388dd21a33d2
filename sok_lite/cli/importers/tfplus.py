"""KvVariables in checkpoints of TF1's Saver, from TFPlus and `sok_lite.kv_variable`.

See `kv_variable/saved_tensors.py` for the tensors. A whole table is in memory while it is read.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from sok_lite.cli.importers.tensorflow_reader import looks_like_one, open_checkpoint, prefix_of
from sok_lite.cli.options import choose_tables, of_table, split_list
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import Source, TableInfo


def detect(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a TensorFlow checkpoint with KvVariables. Needs TensorFlow."""
    if not looks_like_one(path):
        return False
    open_checkpoint(path)
    from sok_lite.kv_variable import saved_files

    return bool(saved_files.names_in(prefix_of(path)))


def sources(
    path: str | os.PathLike[str],
    *,
    deltas: str | None = None,
    tables: str | None = None,
    names: str | None = None,
    enter_threshold: str | None = None,
) -> list[Source]:
    """Returns the KvVariables of a checkpoint in memory, partitions joined.

    They include counts and times of keys, also of keys without a row. TFPlus stores times by day or
    not at all; missing ones become the current time. Slots of its optimizers are variables, and so
    separate tables. From `sok_lite.kv_variable` optimizer states and the keys of all ranks are
    included.

    Args:
      path: of the checkpoint's .index file, or the prefix of its files.
      deltas: paths of checkpoints with later changes, in order, separated by commas.
      tables: names of variables to read, separated by commas.
      names: new names of tables, such as "old=new".
      enter_threshold: times that a key had to be seen to get a row; default 0. May differ per
        table.

    Raises:
      ImportError: no TensorFlow. OSError: the checkpoint cannot be read.
      ValueError: it has no such variables, parts are missing, it is a delta, or corrupt.
    """
    open_checkpoint(path)
    from sok_lite.kv_variable import saved_files

    prefix = prefix_of(path)
    found = saved_files.names_in(prefix)
    if not found:
        raise ValueError(
            f"{prefix} has no KvVariables: no tensor is named as theirs, such as 'NAME:0-keys'."
        )
    result: list[Source] = []
    for name in choose_tables(found, tables, prefix, (names, enter_threshold)):
        threshold = int(of_table(enter_threshold, name, 0))
        dtype, whole = _read_saved(prefix, name, threshold)
        if whole.is_delta:
            raise ValueError(
                f"{prefix} has of {name!r} what has changed since another save. Give the full "
                "save, and this one as `deltas`."
            )
        content = whole.content
        for delta in map(prefix_of, split_list(deltas)):
            content = _apply_delta(content, whole.saves, dtype, delta, name, threshold)
        result.append(ContentSource(of_table(names, name, name), dtype, content))
    return result


def _read_saved(prefix: str, name: str, threshold: int) -> tuple[str, Any]:
    """Returns the row dtype of a variable and its `saved_files.Read`."""
    from sok_lite.kv_variable import saved_files

    places = saved_files.places_of(prefix, name)
    if not places:
        raise ValueError(f"{prefix} has nothing of KvVariable {name!r}.")
    key_type, (dtype, shape) = places[0].form("keys")[0], places[0].form("values")
    saved_files.check_forms(places, key_type, dtype, shape[-1], name)
    rows = row_dtype(dtype.name)
    return rows.name, saved_files.read_all(places, rows, threshold, time.time(), name)


def _apply_delta(
    content: Any, saves: dict[int, Any], dtype: str, prefix: str, name: str, threshold: int
) -> Any:
    """Applies a delta, which must be of the full save `saves`."""
    from sok_lite.kv_variable.saved_tensors import apply_delta

    its_dtype, delta = _read_saved(prefix, name, threshold)
    bases = {rank: (base, None) for rank, (_, base) in delta.saves.items()}
    if not delta.is_delta or bases != saves:
        raise ValueError(
            f"{prefix} has of {name!r} no delta of the save that it is given with. Give the save "
            "that was the last full one before it."
        )
    forms = [(each.keys.dtype.name, each.values.shape[1]) for each in (content, delta.content)]
    if its_dtype != dtype or forms[0] != forms[1]:
        raise ValueError(
            f"{prefix} does not fit {name!r}, which has {(*forms[0], dtype)} for (key type, "
            f"dimension, dtype). Received: {(*forms[1], its_dtype)}."
        )
    return apply_delta(content, delta.content, delta.deleted, repr(name))


class ContentSource(Source):
    """A KvVariable's content, with counts and times as in kv_variable/saved_tensors.py."""

    def __init__(self, name: str, dtype: str, content: Any) -> None:
        from sok_lite.kv_variable.saved_tensors import as_of_table

        content = as_of_table(content)
        self.name, self.dtype, self.dim = name, dtype, content.values.shape[1]
        self.key_type, self.num_keys = content.keys.dtype.name, content.keys.size
        self.columns = ("stamps", "scores")
        num_pending = content.pending_keys.size
        self.about = TableInfo("hybrid", facts=content.facts, num_pending=num_pending)
        self.states = tuple(
            StateFacts(f"states.{i}.{each.name}", each.name, each.dim, each.initial, each.group)
            for i, each in enumerate(content.states)
        )
        self._whole = {
            "keys": content.keys,
            "values": content.values,
            "sighted_keys": content.pending_keys.astype(content.keys.dtype),
            **content.columns,
            **content.pending,
        }
        rows = [np.ascontiguousarray(each.rows) for each in content.states]
        tensors = [facts.tensor for facts in self.states]
        self._whole |= dict(zip(tensors, rows, strict=True))

    def read(self, column: str) -> Iterator[np.ndarray]:
        yield self._whole[column]
