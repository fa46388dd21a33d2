"""Finds the rows of keys in a file of a checkpoint and the files that it continues."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.manifest import Shard
from sok_lite.engine.files.shard import ShardReader


class FileRows(NamedTuple):
    """Rows of one file.

    Attributes:
      shard, reader: of the file.
      at: (k,) int64, ascending, the positions of the rows in the file.
      places: (k,) int64, the positions of their keys among the requested ones.
    """

    shard: Shard
    reader: ShardReader
    at: np.ndarray
    places: np.ndarray


def rows_of(
    shard: Shard, readers: Sequence[ShardReader], keys: np.ndarray, at: np.ndarray
) -> list[FileRows]:
    """Finds the newest row of each key.

    The newest file has all keys. An older one has a key's row if that has not changed since.

    Args:
      shard: the newest file.
      readers: of its chain, oldest first.
      keys: (n,) distinct.
      at: (n,) int64, ascending, the positions of the keys in the newest file.

    Raises:
      ValueError: a file is corrupt.
    """
    if shard.changed is None:
        return [FileRows(shard, readers[-1], at, np.arange(keys.size))]
    parts = list(reversed(list(zip(shard.chain, readers, strict=True))))
    keys_with_rows = (
        next(reader.rows("keys", iter([(0, part.num_rows)]))) for part, reader in parts
    )
    found = newest_rows(keys, keys_with_rows, readers[-1].corrupt)
    return [
        FileRows(part, reader, at, places)
        for (part, reader), (at, places) in zip(parts, found, strict=True)
    ]


def newest_rows(
    keys: np.ndarray, keys_with_rows: Iterable[np.ndarray], corrupt: Callable[[str], ValueError]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns of each file which of its rows are the newest of a key.

    Args:
      keys: (n,) distinct.
      keys_with_rows: of each file the keys that have a row there, the newest file first.
      corrupt: makes an error from a reason.

    Returns:
      Of each file `FileRows.at` and `FileRows.places`.

    Raises:
      ValueError: a key has no row.
    """
    found = []
    order = np.argsort(keys)
    left = keys[order], order  # ascending, and their places
    for some in keys_with_rows:
        at_left = np.searchsorted(left[0], some)
        at_left[at_left == left[0].size] = 0
        is_wanted = left[0][at_left] == some if left[0].size else np.zeros(some.size, bool)
        taken = at_left[is_wanted]
        found.append((np.flatnonzero(is_wanted), left[1][taken]))
        rest = np.ones(left[0].size, bool)
        rest[taken] = False
        left = left[0][rest], left[1][rest]
    if left[0].size:
        raise corrupt(
            f"{left[0].size:,} of its keys have no row there, nor in the files that it continues"
        )
    return found


def whole_tensor(reader: ShardReader, name: str) -> np.ndarray:
    """Returns all of a tensor."""
    (array,) = reader.rows(name, iter([(0, reader.tensors[name].shape[0])]))
    return array


def tensors_of_chain(shard: Shard, tensor: str) -> list[str | None]:
    """Returns the name of a tensor of rows in each file of a chain, oldest first; None: missing."""
    names: list[str | None] = []
    name: str | None = tensor
    for part in reversed(shard.chain):
        names.append(name)
        before = {state.tensor: state.before for state in part.states}
        name = name if name is None or name == "values" else before[name]
    return names[::-1]
