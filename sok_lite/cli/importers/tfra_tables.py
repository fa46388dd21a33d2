"""TFRA's tables: keys and rows, and a further such table per optimizer slot.

A slot's table is named after the variable, the trainable or the optimizer, and the slot:
`user/emb/user/emb-shadow/m`, `user/emb/Adam/m`, or with another `short_file_name` `user/emb/m`.
File names have "_" for each "/".

While a table is read, its keys are in memory, 16 bytes each, and 16 more per state; rows are arrays
as given, possibly mapped from a file.
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
from sok_lite.engine.table.content import last_occurrences

_log = logging.getLogger("sok_lite")

# Optimizer slots of the frameworks, by our names.
_STATES = {
    **{name: name for name in ("m", "v", "vhat", "accumulator", "linear", "momentum", "rms")},
    "accum": "accumulator",
    "accum_grad": "accumulator",
    "accum_var": "delta_accumulator",
    "mg": "mean_grad",
    "average_gradient": "mean_grad",
    "velocity": "rms",
}
# Initial values of states in new rows, if not 0.
_INITIAL = {"accumulator": 0.1}


class StoredRows(NamedTuple):
    """Keys and rows stored together."""

    keys: np.ndarray  # (k,)
    rows: np.ndarray  # (k, dim) in the storage of the table's dtype


class KeyedRows(NamedTuple):
    """The keys and rows of a table, in parts. The last of a repeated key counts."""

    name: str
    key_type: str
    dtype: str
    dim: int
    parts: Sequence[StoredRows]

    def all_keys(self) -> np.ndarray:
        """Concatenates the keys of all parts."""
        none = np.empty(0, key_dtype(self.key_type).dtype)
        return np.concatenate([none, *(part.keys for part in self.parts)])


class KeyedSource(Source):
    """A table as a `Source`, with facts and rows of each state; missing rows are initial."""

    def __init__(self, keyed: KeyedRows, states: Sequence[tuple[StateFacts, KeyedRows]]) -> None:
        self.name, self.key_type, self.dtype, self.dim, self._parts = keyed
        keys = keyed.all_keys()
        kept = last_occurrences(keys, f"table {self.name!r}")
        self._is_kept = np.zeros(keys.size, bool)
        self._is_kept[kept] = True
        self.num_keys = kept.size
        self._states = {facts.tensor: (facts, _RowFinder(rows)) for facts, rows in states}
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


class _RowFinder:
    """Finds rows of a state by key, as float32."""

    def __init__(self, keyed: KeyedRows) -> None:
        self._keyed = keyed
        keys = keyed.all_keys()
        self._places = last_occurrences(keys, f"the states in {keyed.name!r}")
        self._keys = keys[self._places]
        self._ends = np.cumsum([part.keys.size for part in keyed.parts])

    def rows(self, keys: np.ndarray, initial: float) -> np.ndarray:
        """Returns rows by key, (k, dim); `initial` for missing ones."""
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
    tables: Mapping[str, KeyedRows],
    separator: str,
    initial: str,
    slots: str,
    known: Mapping[str, Sequence[tuple[State, KeyedRows]]] = MappingProxyType({}),
) -> list[Source]:
    """Returns tables as sources, with slots as optimizer states of their table.

    A table is a slot of another if its name says so, rows are equally long, and at least half of
    its keys are the other's: TFRA keeps removed keys in slots, which are left out here. Other
    tables stay tables. Both cases are logged if the name is of a slot. An optimizer takes over
    states with the same initial values as its own.

    Args:
      tables: by TFRA's names.
      separator: between the parts of slot names.
      initial, slots: as in tfra_files.py.
      known: further states by table name, their facts and rows.

    Raises:
      ValueError: invalid `slots`. WrongUse: `initial` names an unknown state.
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
    tables: Mapping[str, KeyedRows], name: str, slot: KeyedRows, separator: str
) -> tuple[str, str, str] | None:
    """Returns the table, optimizer and state of a slot, or None."""
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


def _fits(name: str, slot: KeyedRows, other: str, table: KeyedRows) -> bool:
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
