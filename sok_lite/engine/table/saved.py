"""The content that a table is to have, in parts that are read piece by piece: of files, arrays or
tables.

The form between whoever has saved something and `restoring.py`: never all of it is in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.table.joined import (
    JoinedState,
    NamedState,
    joined_facts,
    joined_states,
    without_slots,
)

# Says of some keys, (k,) of a table's key type on the host, which are those of a rank, (k,) bool.
Owns: TypeAlias = Callable[[np.ndarray], np.ndarray]


class SavedRows(ABC):
    """Keys and their rows, in pieces."""

    @abstractmethod
    def read(self, name: str, wanted: Collection[int] | None = None) -> Iterator[Array]:
        """Yields a column in pieces, of the same lengths for every column.

        Args:
          name: "keys", (k,) of the table's key type, which may be distinct or not; "value", (k,
            dim) of the row's storage dtype; or the tensor of a state, (k, its dim) float32.
          wanted: numbers of the pieces that are to come, ascending; None: all.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """


class SavedPart(SavedRows):
    """A part of what was saved: all keys of it, and the rows of the first pieces of them, or all.

    Attributes:
      num_keys: how many keys it brings at most.
      states: those that it has, of which `tensor` is what `read` knows each by.
      columns: what is known of each key, of "stamps", "scores" and "slots".
      facts: num_lookups, and spans, when those were, which old checkpoints do not have; of a
        "hybrid" table also capacity, strategy, epoch and where its slots are: bucket, segment,
        num_slots, hash_seed.
      num_with_rows: how many pieces of the keys have rows here, the first ones; None: all.
      older: what has the rows of other keys, the newest first.
      owns: says which keys count; None: all.
      may_repeat: whether it may have keys of parts before, without a warning.
    """

    num_keys: int
    states: Sequence[NamedState]
    columns: Collection[str]
    facts: Mapping[str, Any]
    num_with_rows: int | None = None
    older: Sequence[SavedRows] = ()
    owns: Owns | None = None
    may_repeat: bool = False

    @abstractmethod
    def read(self, name: str, wanted: Collection[int] | None = None) -> Iterator[Array]:
        """Yields a column as `SavedRows.read` does, or what is known of the keys.

        Args:
          name: also one of `columns`: "stamps", (k,) uint32, the number of the lookup that last saw
            each key; "scores", (k,) uint64; "slots", (k,) int64, the number of the slot of each; or
            "sighted_keys", (m,) of the table's key type, keys that were seen and have no row yet,
            "sightings", (m,) uint32, how often, and "sighting_stamps", (m,) uint32, the number of
            the lookup that last saw each; 0: nobody knows, as in old checkpoints. The pieces of
            these three are like each other.
        """

    def corrupt(self, reason: str) -> ValueError:
        """Returns the error that says so."""
        return ValueError(f"What was saved is corrupt: {reason}.")


class Saved(NamedTuple):
    """All that a table is to hold.

    Attributes:
      parts: of a key that several have the first counts; each is on the host or the table's device.
      pending: the parts, in the order in which they count for keys without a row.
      states: those of all parts.
      facts: of all parts together: number of lookups, their times and, of a "hybrid" table, what
        its index needs. `SavedPart` lists them.
    """

    parts: Sequence[SavedPart]
    pending: Sequence[SavedPart]
    states: Sequence[JoinedState]
    facts: dict[str, Any]

    @staticmethod
    def of(parts: Sequence[SavedPart]) -> "Saved":
        """Returns parts, one at least, as one: the states of any of them, and joined facts."""
        states = joined_states([part.states for part in parts])
        facts = joined_facts([dict(part.facts) for part in parts])
        facts = facts if len(parts) == 1 else without_slots(facts)
        return Saved(parts, parts, sorted(states, key=lambda s: s.group or 0), facts)

    @property
    def has_scores(self) -> bool:
        """Whether scores are known of all keys."""
        return all("scores" in part.columns for part in self.parts if part.num_keys)
