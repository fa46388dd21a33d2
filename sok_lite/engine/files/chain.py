"""Where the rows of keys are, in a file of a checkpoint and those that it continues."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.manifest import Shard
from sok_lite.engine.files.shard import ShardReader


class Rows(NamedTuple):
    """Rows of one file.

    Attributes:
      shard, reader: of the file.
      at: (k,) int64, ascending, where they are in the file.
      places: (k,) int64, where their keys are among those that were asked for.
    """

    shard: Shard
    reader: ShardReader
    at: np.ndarray
    places: np.ndarray


def rows_of(
    shard: Shard, readers: Sequence[ShardReader], keys: np.ndarray, at: np.ndarray
) -> list[Rows]:
    """Returns where the newest row of each key is.

    The newest file has all keys. An older one has a key's row if that has not changed since.

    Args:
      shard: the newest file.
      readers: of its chain, oldest first.
      keys: (n,) distinct.
      at: (n,) int64, ascending, where they are in the newest file.

    Raises:
      ValueError: a file is corrupt.
    """
    if shard.changed is None:
        return [Rows(shard, readers[-1], at, np.arange(keys.size))]
    found = []
    order = np.argsort(keys)
    left = keys[order], order  # ascending, and their places
    for part, reader in reversed(list(zip(shard.chain, readers, strict=True))):
        (held,) = reader.rows("keys", iter([(0, part.num_rows)]))  # those that have a row there
        at_left = np.searchsorted(left[0], held)
        at_left[at_left == left[0].size] = 0
        is_wanted = left[0][at_left] == held if left[0].size else np.zeros(held.size, bool)
        taken = at_left[is_wanted]
        found.append(Rows(part, reader, np.flatnonzero(is_wanted), left[1][taken]))
        rest = np.ones(left[0].size, bool)
        rest[taken] = False
        left = left[0][rest], left[1][rest]
    if left[0].size:
        raise readers[-1].corrupt(
            f"{left[0].size:,} of its keys have no row there, nor in the files that it continues"
        )
    return found


def tensors_of_chain(shard: Shard, tensor: str) -> list[str | None]:
    """Returns what a tensor of rows is in each file of a chain, oldest first; None: not there."""
    names: list[str | None] = []
    name: str | None = tensor
    for part in reversed(shard.chain):
        names.append(name)
        before = {state.tensor: state.before for state in part.states}
        name = name if name is None or name == "values" else before[name]
    return names[::-1]


class NewestRows:
    """The newest rows of all keys of a file and those that it continues, in the order of its keys.

    It takes 12 bytes a key.

    Args:
      shard: the newest file.
      readers: of its chain, oldest first.

    Raises:
      ValueError: a file is corrupt. OSError: it cannot be read. Also `read`.
    """

    def __init__(self, shard: Shard, readers: Sequence[ShardReader]) -> None:
        self._shard = shard
        self._files = np.empty(shard.rows, np.int32)
        self._at = np.empty(shard.rows, np.int64)
        (keys,) = readers[-1].rows("keys", iter([(0, shard.rows)]))
        newest_first = rows_of(shard, readers, keys, np.arange(shard.rows))
        for number, rows in enumerate(reversed(newest_first)):
            self._files[rows.places] = number
            self._at[rows.places] = rows.at

    def read(
        self,
        readers: Sequence[ShardReader],
        tensor: str,
        initial: float,
        spans: Iterator[tuple[int, int]],
    ) -> Iterator[np.ndarray]:
        """Yields the rows of keys [first, last) for each of some spans.

        Args:
          readers: of the chain, oldest first, for this tensor alone.
          tensor: of the newest file.
          initial: what a state has where no file has a row of it.
        """
        names = tensors_of_chain(self._shard, tensor)
        about = readers[-1].tensors[tensor]
        for first, last in spans:
            piece = np.full((last - first, *about.shape[1:]), initial, about.storage)
            for number, (reader, name) in enumerate(zip(readers, names, strict=True)):
                places = np.flatnonzero(self._files[first:last] == number)
                if name is None or places.size == 0:
                    continue
                at = self._at[first:last][places]
                order = np.argsort(at)
                runs = np.split(at[order], np.flatnonzero(np.diff(at[order]) != 1) + 1)
                ranges = ((int(run[0]), int(run[-1]) + 1) for run in runs)
                piece[places[order]] = np.concatenate(list(reader.rows(name, ranges)))
            yield piece
