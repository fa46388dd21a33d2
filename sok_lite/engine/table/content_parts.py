"""Contents of a table that are parts of others: chosen from one, or put together to one.

What a key has that comes in several parts, which states are one, and whose keys are whose is
decided here for all formats of checkpoints.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from sok_lite.engine.batch import ShardedTable
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.table.content import Content, placed_states
from sok_lite.engine.table.joined import joined_facts, joined_states, without_slots
from sok_lite.engine.table.saved import Owns

_log = logging.getLogger("sok_lite")

# Which of a key counts that several parts have.
Counts: TypeAlias = Literal["first", "last"]


def select(content: Content, chosen: np.ndarray, pending: np.ndarray) -> Content:
    """Returns some of the keys of a content, with what is known of them.

    Where they had their slots is known of all keys together only.

    Args:
      chosen: (n,) bool, or distinct places of keys with a row, in the order that they are to have.
      pending: (m,) bool, or such places of those without one.
    """
    if _are_in_place(chosen) and _are_in_place(pending):
        return content
    columns, facts = dict(content.columns), dict(content.facts)
    num_chosen = np.count_nonzero(chosen) if chosen.dtype == bool else chosen.size
    if num_chosen < content.keys.size:
        columns.pop("slots", None)
        facts = without_slots(facts)
    return Content(
        content.keys[chosen],
        content.values[chosen],
        [state._replace(rows=state.rows[chosen]) for state in content.states],
        {name: column[chosen] for name, column in columns.items()},
        content.pending_keys[pending],
        {name: column[pending] for name, column in content.pending.items()},
        facts,
    )


def _are_in_place(chosen: np.ndarray) -> bool:
    return chosen.dtype == bool and bool(chosen.all())


def owns(table: ShardedTable, rank: int, size: int) -> Owns:
    """Returns what says which of some keys, (k,) of the table's key type, a rank of several owns.

    Raises:
      ValueError: when it is called: the table's rule has no owner for a key among so many ranks.
    """

    def are_own(keys: np.ndarray) -> np.ndarray:
        if size == 1:
            return np.ones(keys.size, bool)
        kind = table.key_dtype
        return np.asarray(table.owner.owners(kind.to_int64(np, keys), size, kind, np) == rank)

    return are_own


def owned_by(content: Content, are_own: Owns) -> Content:
    """Returns the keys of a content that a rank owns, with what is known of them."""
    pending = content.pending_keys.astype(content.keys.dtype)
    return select(content, are_own(content.keys), are_own(pending))


def in_order(content: Content) -> Content:
    """Returns a content whose keys are distinct, in any order, with ascending ones."""
    return select(content, _order(content.keys), _order(content.pending_keys))


def _order(keys: np.ndarray) -> np.ndarray:
    if bool((keys[1:] > keys[:-1]).all()):
        return np.ones(keys.size, bool)
    return np.argsort(keys)


def concatenate(parts: Sequence[Content], whose: str, counts: Counts | None = None) -> Content:
    """Returns the content that several parts of a table have together.

    A state that a part does not have is what it begins with there. What is known of the keys of
    some parts only is left out, and so is where they had their slots. Facts are those of the part
    with most lookups.

    Args:
      parts: at least one.
      whose: names the table in what is said.
      counts: which part counts for a key that several have; None: none may.

    Raises:
      ValueError: a key comes in several parts, and none of them counts.
    """
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part.keys for part in parts])
    kept = one_of_each(keys, counts, whose)
    pending_keys = np.concatenate([part.pending_keys for part in parts])
    pending = _places(pending_keys, counts)
    facts = [dict(part.facts) for part in parts if part.facts]
    return Content(
        keys[kept],
        np.concatenate([part.values for part in parts])[kept],
        _joined_states(parts, kept),
        _joined_columns([(part.keys, part.columns) for part in parts], kept),
        pending_keys[pending],
        _joined_columns([(part.pending_keys, part.pending) for part in parts], pending),
        without_slots(joined_facts(facts)) if facts else {},
    )


def one_of_each(keys: np.ndarray, counts: Counts | None, whose: str) -> np.ndarray:
    """Returns the place of one of each distinct key, (k,) int64, in the order of the keys.

    Keys that come again are counted, and the logger "sok_lite" warns of them.

    Args:
      keys: (n,) of several parts, one part after the other.
      counts: which is taken of a key that comes more than once; None: none may.
      whose: names the table in what is said.

    Raises:
      ValueError: a key comes more than once, and none counts.
    """
    places = _places(keys, counts)
    num_repeated = keys.size - places.size
    if num_repeated and counts is None:
        raise ValueError(
            f"What was saved of {whose} is corrupt: its parts have {num_repeated:,} keys in common."
        )
    if num_repeated:
        _log.warning(
            "What was saved of %s has %s keys more than once: of each the %s one counts.",
            *(whose, f"{num_repeated:,}", counts),
        )
    return places


def _places(keys: np.ndarray, counts: Counts | None) -> np.ndarray:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_new = np.ones(keys.size, bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    if counts == "last":
        is_new = np.append(is_new[1:], True)[: keys.size]
    return order[is_new]


def _joined_columns(
    parts: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]], kept: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns what is known of the keys of all parts; a part without keys does not count."""
    first, *others = [columns for keys, columns in parts if keys.size] or [parts[0][1]]
    names = [name for name in first if name != "slots" and all(name in each for each in others)]
    return {
        name: np.concatenate([first[name], *(each[name] for each in others)])[kept]
        for name in names
    }


def _joined_states(parts: Sequence[Content], kept: np.ndarray) -> list[State]:
    """Returns the states of parts, one part after the other, group by group."""
    joined = []
    for name, dim, initial, group, tensors in joined_states(list(map(placed_states, parts))):
        rows = [
            part.states[tensors[i]].rows
            if i in tensors
            else np.full((part.keys.size, dim), initial, np.float32)
            for i, part in enumerate(parts)
        ]
        joined.append(State(name, dim, initial, np.concatenate(rows)[kept], group))
    return sorted(joined, key=lambda state: state.group or 0)
