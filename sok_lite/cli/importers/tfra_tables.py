"""TFRA's tables: keys and rows, the slots of an optimizer as such tables beside.

TFRA keeps each slot of an optimizer in a table of its own, named after the variable, the trainable
or the optimizer, and the slot: `user/emb/user/emb-shadow/m`, `user/emb/Adam/m`, with another
`short_file_name` `user/emb/m`. The names of its files have "_" for each "/".

The keys of a table are in memory while it is read, 16 bytes each, and of a state 16 more; rows are
as they came, which may be arrays that are mapped from a file.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from sok_lite.cli.options import initial_values
from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.source import Source
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.table.content import one_of_each

_log = logging.getLogger("sok_lite")

# Slots of the frameworks' optimizers by what our rules call them.
_STATES = {
    **{name: name for name in ("m", "v", "vhat", "accumulator", "linear", "momentum", "rms")},
    "accum": "accumulator",
    "accum_grad": "accumulator",
    "accum_var": "delta_accumulator",
    "mg": "mean_grad",
    "average_gradient": "mean_grad",
    "velocity": "rms",
}
# What a new row has in states that do not begin at 0, if nobody says otherwise.
_INITIAL = {"accumulator": 0.1}


class StoredRows(NamedTuple):
    """Keys and rows that are stored together.

    Attributes:
      keys: (k,) of the table's key type.
      rows: (k, dim) in the storage of the table's dtype.
    """

    keys: np.ndarray
    rows: np.ndarray


class Keyed(NamedTuple):
    """Keys and rows of one name. Of a key that repeats the last counts.

    Attributes:
      name: of the table.
      key_type, dtype, dim: of the table.
      parts: all of it.
    """

    name: str
    key_type: str
    dtype: str
    dim: int
    parts: Sequence[StoredRows]

    def all_keys(self) -> np.ndarray:
        """Returns the keys of all parts, one behind the other."""
        none = np.empty(0, key_dtype(self.key_type).dtype)
        return np.concatenate([none, *(part.keys for part in self.parts)])


class KeyedSource(Source):
    """A table as a `Source`.

    Args:
      keyed: keys and rows.
      states: the states' rows, by what is said of each; a key that one lacks has its initial value.
    """

    def __init__(self, keyed: Keyed, states: Sequence[tuple[StateFacts, Keyed]]) -> None:
        self.name, self.key_type, self.dtype, self.dim, self._parts = keyed
        keys = keyed.all_keys()
        kept = one_of_each(keys, "last", f"table {self.name!r}")
        self._is_kept = np.zeros(keys.size, bool)
        self._is_kept[kept] = True
        self.num_keys = kept.size
        self._states = {facts.tensor: (facts, _Found(rows)) for facts, rows in states}
        self.states = tuple(facts for facts, _ in self._states.values())
        widths = [row_dtype(self.dtype).storage.itemsize * self.dim, 8]
        widths += [4 * facts.dim for facts in self.states]
        self._piece_rows = max(1, CHUNK_BYTES // max(widths))

    def read(self, column: str) -> Iterator[np.ndarray]:
        begin = 0
        for part in self._parts:
            for first in range(0, part.keys.size, self._piece_rows):
                some = slice(first, first + self._piece_rows)
                keys = part.keys[some]
                is_kept = self._is_kept[begin + first :][: keys.size]
                if column == "values":
                    yield part.rows[some][is_kept]
                elif column == "keys":
                    yield keys[is_kept]
                else:
                    facts, found = self._states[column]
                    yield found.rows(keys[is_kept], facts.initial)
            begin += part.keys.size


class _Found:
    """Rows of a state, found by their keys and returned as float32."""

    def __init__(self, keyed: Keyed) -> None:
        self._keyed = keyed
        keys = keyed.all_keys()
        self._places = one_of_each(keys, "last", f"the states in {keyed.name!r}")
        self._keys = keys[self._places]
        self._ends = np.cumsum([part.keys.size for part in keyed.parts])

    def rows(self, keys: np.ndarray, initial: float) -> np.ndarray:
        """Returns the row of each key, (k, dim); all `initial` where it has none."""
        rows = np.full((keys.size, self._keyed.dim), initial, np.float32)
        at = np.searchsorted(self._keys, keys)
        is_there = at < self._keys.size
        is_there[is_there] = self._keys[at[is_there]] == keys[is_there]
        places, where = self._places[at[is_there]], np.flatnonzero(is_there)
        of_part = np.searchsorted(self._ends, places, "right")
        for number, part in enumerate(self._keyed.parts):
            its = of_part == number
            begin = self._ends[number] - part.keys.size
            stored = part.rows[places[its] - begin]
            rows[where[its]] = row_dtype(self._keyed.dtype).to_float32(np, stored)
        return rows


def with_slots(
    tables: Mapping[str, Keyed],
    separator: str,
    initial: str,
    slots: str,
    known: Mapping[str, Sequence[tuple[State, Keyed]]] = MappingProxyType({}),
) -> list[Source]:
    """Returns tables as sources, those that are slots of another as its optimizer states.

    A table is taken for a slot of another if its name says so, rows are as long, and half of its
    keys at least are of the other: TFRA leaves keys in slots that it has removed from their table.
    The rest of them is left out. Others stay tables. Either is said, if the name is of a slot.

    Args:
      tables: by the names that TFRA gave.
      separator: between the parts of the names of slots.
      initial: what new rows have in states, such as "accumulator=0.25"; else 0.1 in "accumulator"
        and 0 in all others. An optimizer takes over states that begin with what its own begin with.
      slots: "states", or "tables": no table is taken for a slot.
      known: further states by the names of their tables, what is said of each and their rows.

    Raises:
      ValueError: `slots` is neither.
      WrongUse: `initial` names a state that there is not.
    """
    if slots not in ("states", "tables"):
        raise ValueError(f"`slots` must be 'states' or 'tables'. Received: {slots!r}.")
    owners: dict[str, tuple[str, str, str]] = {}
    for name in sorted(tables, key=len) if slots == "states" else ():
        whole = {other: keyed for other, keyed in tables.items() if other not in owners}
        owner = _owner(whole, name, tables[name], separator)
        if owner:
            owners[name] = owner
    begin = _INITIAL | initial_values(initial, sorted({state for *_, state in owners.values()}))
    sources: list[Source] = []
    for name, keyed in tables.items():
        if name in owners:
            continue
        its = [(each, *owner[1:]) for each, owner in owners.items() if owner[0] == name]
        states = [
            (StateFacts(f"states.{i}.{of.name}", of.name, of.dim, of.initial, of.group), rows)
            for i, (of, rows) in enumerate(known.get(name, ()))
        ]
        first = 1 + max((facts.group or 0 for facts, _ in states), default=0)
        optimizers = sorted({optimizer for _, optimizer, _ in its})
        for slot, optimizer, state in sorted(its, key=lambda slot: slot[1:]):
            tensor, group = f"states.{len(states)}.{state}", first + optimizers.index(optimizer)
            facts = StateFacts(tensor, state, keyed.dim, begin.get(state, 0.0), group)
            states.append((facts, tables[slot]))
        sources.append(KeyedSource(keyed, states))
    return sources


def _owner(
    tables: Mapping[str, Keyed], name: str, slot: Keyed, separator: str
) -> tuple[str, str, str] | None:
    """Returns whose slot a table is, of which optimizer and which state; None: it is none."""
    for other in _longest_first(tables):
        if not name.startswith(other + separator):
            continue
        rest = name.removeprefix(other)  # such as /Adam/m
        for ending in _longest_first(_STATES):
            optimizer = rest.removesuffix(separator + ending)
            if optimizer != rest and _fits(name, slot, other, tables[other]):
                return other, optimizer, _STATES[ending]
    return None


def _longest_first(names: Iterable[str]) -> Sequence[str]:
    return sorted(names, key=len, reverse=True)


def _fits(name: str, slot: Keyed, other: str, table: Keyed) -> bool:
    if (table.key_type, table.dim) != (slot.key_type, slot.dim):
        return False
    keys = np.unique(slot.all_keys())
    num_others = int(np.isin(keys, table.all_keys(), invert=True).sum())
    fits = 2 * num_others <= keys.size
    if num_others:
        _log.warning(
            "%r is named as a state of %r, which does not have %s of its %s keys: %s.",
            *(name, other, f"{num_others:,}", f"{keys.size:,}"),
            "they are left out" if fits else "it stays a table",
        )
    return fits
