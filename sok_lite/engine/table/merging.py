"""Joins what a table holds with what was saved, for the table to hold both."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.joined import JoinedState, without_slots
from sok_lite.engine.table.pieces import ENTRY_BYTES, outline, pending_pieces, pieces
from sok_lite.engine.table.saved import Saved, SavedPart
from sok_lite.engine.table.table import EmbeddingTable

# Strategies whose scores do not say when a key was looked up: they mean the same in all tables.
_TIMELESS = ("kLfu", "kCustomized")


def merged(table: EmbeddingTable, saved: Saved, num_bytes: int) -> Saved:
    """Returns what a table holds once the keys of what was saved are assigned to it.

    A key of both has the row and the states that were saved; a state that was not saved begins
    anew. The saved keys count as seen by the last lookup of this table. Their scores are those of
    new keys, or, between tables with the same strategy "kLfu" or "kCustomized", the saved ones.
    Pending counts stay as they are; those of other keys are added.

    Args:
      table: locked by the caller until the result has been restored.
      num_bytes: of the table's own rows that are read together.
    """
    keeps_scores = False
    if isinstance(table, HkvTable) and table.index.has_scores:
        strategy = table.index.strategy
        is_same = strategy in _TIMELESS and saved.facts.get("strategy") == strategy
        keeps_scores = is_same and saved.has_scores
    others = [_Assigned(table, part, keeps_scores) for part in saved.parts]
    own = _Own(table, sum(part.num_known for part in others), num_bytes)
    states = _states(own.columns_of_states, len(others), saved.states)
    return Saved([*others, own], [own, *others], states, dict(own.facts))


class _Assigned(SavedPart):
    """A part that was saved, whose keys the table's last lookup has seen."""

    def __init__(self, table: EmbeddingTable, part: SavedPart, keeps_scores: bool) -> None:
        self._table, self._part, self._keeps_scores = table, part, keeps_scores
        self.num_keys, self.states, self.facts = part.num_keys, part.states, part.facts
        self.num_with_rows, self.older, self.owns = part.num_with_rows, part.older, part.owns
        self.columns = ("stamps", "scores")

    @property
    def num_known(self) -> int:
        """How many of its keys the table has."""
        table, num_known = self._table, 0
        xp, device, host = table.backend.xp, table.backend.from_host, table.backend.to_host
        for keys in self._part.read("keys"):
            whole = table.key_dtype.to_int64(xp, device(keys), f"keys of {table.name!r}")
            is_known = table.index.find(whole).rows != np.uint32(NO_ROW)
            if self.owns is not None:
                is_known &= device(self.owns(host(keys)))
            num_known += int(xp.count_nonzero(is_known))
        return num_known

    def corrupt(self, reason: str) -> ValueError:
        return self._part.corrupt(reason)

    def read(self, name: str, wanted: Collection[int] | None = None) -> Iterator[Array]:
        is_new = name in ("stamps", "sighting_stamps", "scores")
        if not is_new or (name == "scores" and self._keeps_scores):
            yield from self._part.read(name, wanted)
            return
        xp, now = self._table.backend.xp, np.uint32(self._table.num_lookups)
        of = "sighted_keys" if name == "sighting_stamps" else "keys"
        for keys in self._part.read(of):
            last_seen = xp.full(keys.size, now, np.uint32)
            if name == "scores" and isinstance(self._table, HkvTable):
                yield self._table.index.initial_scores(last_seen)
            else:
                yield last_seen


_STATE = "state"  # a state may be called "keys": its tensor is (this, its column)


class _Own(SavedPart):
    """The table itself as a part: its keys stay where none that was saved is equal."""

    may_repeat = True

    def __init__(self, table: EmbeddingTable, num_saved: int, num_bytes: int) -> None:
        outlined = outline(table)
        self._table, self.num_keys = table, outlined.num_keys - num_saved
        # Those of an optimizer that is gone are not to be free, for another of its kind.
        self.columns_of_states = [each for each in outlined.states if not each.rows.is_gone]
        self.states, columns = (), [each.rows for each in outlined.states]
        self.columns = ("stamps", "scores") if outlined.has_scores else ("stamps",)
        self.facts = without_slots(outlined.facts)
        widest = max(column.row_bytes for column in (table.store.column(), *columns))
        self._num_slots = max(1, num_bytes // max(widest, ENTRY_BYTES))

    def read(self, name: Any, wanted: Collection[int] | None = None) -> Iterator[Array]:
        fields = {"sighted_keys": "keys", "sightings": "rows", "sighting_stamps": "last_seen"}
        if name in fields:
            for piece in pending_pieces(self._table, self._num_slots):
                yield getattr(piece, fields[name])
            return
        xp = self._table.backend.xp
        for i, piece in enumerate(pieces(self._table, self._num_slots)):
            if wanted is not None and i not in wanted:
                continue
            if name in ("keys", "stamps", "scores"):
                yield piece.column(name)
            else:
                column = name[1] if isinstance(name, tuple) else name
                yield self._table.store.read(xp.ascontiguousarray(piece.rows), column)


def _states(
    numbered: Sequence[State], last: int, saved: Sequence[JoinedState]
) -> list[JoinedState]:
    """Returns all states of the table, then those of groups that it does not have.

    A saved group goes on in the first of the table's that has the same kinds of states, and a state
    that no optimizer keeps together with others in one like it.

    Args:
      numbered: the states of the table.
      last: which part the table is.
    """
    own: dict[int | None, dict[str, State]] = {}
    for each in numbered:
        own.setdefault(each.group, {})[each.name] = each
    others: dict[int | None, dict[str, JoinedState]] = {}
    for state in saved:
        others.setdefault(state.group, {})[state.name] = state
    states = []
    for group, its in own.items():
        match = _match(group, its, others)
        for name, one in its.items():
            tensors = {
                **(match[name].tensors if name in match else {}),
                last: (_STATE, one.rows.name),
            }
            states.append(JoinedState(name, one.dim, one.initial, group, tensors))
    first = max((group or 0 for group in own), default=0) + 1
    for number, (group, its_states) in enumerate(others.items(), start=first):
        for state in its_states.values():
            states.append(state._replace(group=number if group else None))
    return states


def _match(
    group: int | None,
    own: Mapping[str, State],
    others: dict[int | None, dict[str, JoinedState]],
) -> dict[str, JoinedState]:
    """Takes the saved states that are those of a group out of `others` and returns them."""
    if group is None:  # of these no two belong together
        free = others.get(None, {})
        alike = [name for name in own if name in free and _is_like(own[name], free[name])]
        return {name: free.pop(name) for name in alike}
    for number, states in others.items():
        has_these = number is not None and states.keys() == own.keys()
        if has_these and all(_is_like(own[name], state) for name, state in states.items()):
            return others.pop(number)
    return {}


def _is_like(one: State, other: JoinedState) -> bool:
    return (one.dim, one.initial) == (other.dim, other.initial)
