"""Which of TFRA's tables are the optimizer slots of others.

TFRA keeps each slot of an optimizer in a table of its own, named after the variable, the trainable
or the optimizer, and the slot: `user/emb/user/emb-shadow/m`, `user/emb/Adam/m`, with another
`short_file_name` `user/emb/m`. The names of its files have "_" for each "/".
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from sok_lite.cli.importers.keyed_rows import Keyed, KeyedSource
from sok_lite.cli.options import initial_values
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import Source
from sok_lite.engine.table.state_columns import State

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
