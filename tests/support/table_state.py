"""What a table holds, and whether that is as before an operation or as after it.

"After" is what a clean run of the same operation makes of an equal table. What may differ all the
same: capacities and memory set aside; and a lookup that was interrupted may count, with its keys
that were found as seen by it and its keys without a row as pending, but with none of the others.
"""

from typing import NamedTuple

import numpy as np

from tests.support.index_entries import entries_of
from tests.support.reference import ScoredTable
from tests.support.table_audit import pending_index, some

# What counts keys. `found` and `missed` say what was asked, the others go with what was done.
_DONE = ("inserted", "evicted", "refused", "erased", "not_updated")


class State(NamedTuple):
    """What a table holds, on the host.

    Attributes:
      rows: {key: (bits of its row, ((state, bits), ...))}. A state at its initial value is left
        out: a column that was made and never written changes nothing.
      numbers: {key: row number}.
      seen: {key: (stamp, score)}.
      pending: {key without a row: (count, stamp)}.
      removals: {key that was removed: stamp}, with a log; and {None: since when}.
      counts: those of `statistics`.
      now, epoch, row_version, capacity, seed: of the table.
    """

    rows: dict
    numbers: dict
    seen: dict
    pending: dict
    removals: dict
    counts: dict
    now: int
    epoch: int
    row_version: int
    capacity: int
    seed: int

    @classmethod
    def of(cls, table):
        host = table.backend.to_host
        with table.lock:
            counts = table.statistics()._asdict()
            saved = entries_of(table)
            keys, numbers = saved.keys.tolist(), table.backend.from_host(saved.rows)
            columns = {"value": [row.tobytes() for row in host(table.store.read(numbers))]}
            for name in sorted(table.store.state_names):
                initial = np.float32(table.store.column(name).initial)
                rows = host(table.store.read(numbers, name))
                touched = (rows != initial).any(axis=1)
                columns[name] = [
                    row.tobytes() if is_touched else None
                    for row, is_touched in zip(rows, touched, strict=True)
                ]
            values, *states = columns.values()
            _, *names = columns
            rows = {}
            for i, key in enumerate(keys):
                parts = ((name, state[i]) for name, state in zip(names, states, strict=True))
                rows[key] = (values[i], tuple(part for part in parts if part[1] is not None))
            stamps, scores = saved.last_seen.tolist(), saved.scores.tolist()
            pending = {}
            if pending_index(table) is not None:
                pending = pending_index(table).entries()
                parts = (host(part).tolist() for part in pending[:3])
                pending = {key: place for key, *place in zip(*parts, strict=True)}
            removals = {}
            if table.removals is not None:
                logged = table.removals.entries()
                parts = (host(part).tolist() for part in (logged.keys, logged.last_seen))
                removals = dict(zip(*parts, strict=True)) | {None: table.removals.since}
            return cls(
                rows,
                dict(zip(keys, saved.rows.tolist(), strict=True)),
                dict(zip(keys, zip(stamps, scores, strict=True), strict=True)),
                {key: tuple(place) for key, place in pending.items()},
                removals,
                {
                    name: counts[f"{name}_total"]
                    for name in (*_DONE, "found", "missed", "not_admitted")
                },
                table.num_lookups,
                getattr(table, "epoch", 0),
                table.row_version,
                table.capacity,
                table.index.seed,
            )

    def values(self):
        """{key: row} for an oracle."""
        return {key: np.frombuffer(row, np.float32) for key, (row, _) in self.rows.items()}


def aged(state, strategy):
    """The same with the number of every lookup halved."""

    def score(stamp, score):
        if strategy == "kLru":
            return stamp >> 1
        low = score & 0xFFFFFFFF
        return score - low + (low >> 1) if strategy == "kEpochLru" else score

    return state._replace(
        now=state.now >> 1,
        seen={key: (stamp >> 1, score(stamp, s)) for key, (stamp, s) in state.seen.items()},
        pending={key: (count, stamp >> 1) for key, (count, stamp) in state.pending.items()},
        removals={key: stamp >> 1 for key, stamp in state.removals.items()},
    )


# -------------------------------------------------------------------- before or after


def what_is_wrong(case, strategy, now, before, after):
    """Returns why `now` is neither `before` nor `after`, or None; and which of them it is."""
    reasons = []
    contents = ("rows", "seen", "pending", "removals", "counts", "now", "epoch")
    not_after = _first_difference(now, after, *contents)
    if not_after is None:
        reason, side = stale_rows(now, before), "after"
    else:
        bases = [before, aged(before, strategy)] if case.ages else [before]
        for base in bases:
            # A lookup of the old numbering cannot be followed by one of the new.
            late = after if base.now <= after.now else base
            reasons.append(_not_before(case, strategy, now, base, late, after))
        reason, side = None, "before"
        if None in reasons:
            reason = stale_rows(now, before)
        else:
            reason = f"not as before: {reasons[-1]}; not as after: {not_after}"
    return reason, side


def _first_difference(now, other, *names):
    for name in names:
        one, its = getattr(now, name), getattr(other, name)
        if one != its:
            is_dict = isinstance(one, dict)
            return _difference(name, one, its) if is_dict else f"{name} {one} and not {its}"
    return None


def _not_before(case, strategy, now, before, late, after):
    """Why it is not as before; the lookup of `late` may have counted, and seen what it found."""
    reason = _first_difference(now, before, "rows", "removals", "epoch")
    if reason is not None:
        return reason
    for name, count in now.counts.items():
        allowed = {before.counts[name]}
        if name not in _DONE:
            allowed.add(after.counts[name])
        if count not in allowed:
            return f"{name} is {count} and not {before.counts[name]}"
    if now.now == before.now:
        return _first_difference(now, before, "seen", "pending")
    if now.now != late.now:
        return f"lookup {now.now} and not {before.now} or {late.now}"
    for key, seen in now.seen.items():
        if key not in late.seen:
            continue  # the operation removes it: how it was seen on the way says nothing
        refreshed = late.seen[key]
        if case.scores_are_content:
            # Those that are written belong to the rows; a lookup that saw the key gives others.
            refreshed = (late.now, _score_of_a_lookup(strategy, before, key, late.now))
        if seen not in (before.seen[key], refreshed):
            return f"key {key} was seen {seen} and not {before.seen[key]} or {refreshed}"
    for key in now.pending.keys() | before.pending.keys():
        count, stamp = before.pending.get(key, (0, 0))
        allowed = [(count, stamp), (count, late.now)] if count else [None]
        allowed.append((count + 1, late.now))
        if now.pending.get(key) not in allowed:
            return (
                f"key {key} has the pending count {now.pending.get(key)} and not one of {allowed}"
            )
    return None


def _score_of_a_lookup(strategy, state, key, now):
    oracle = ScoredTable(1, None, strategy)
    oracle.now, oracle.epoch, oracle.scores = now, state.epoch, {key: state.seen[key][1]}
    return oracle.score_after(key)


def stale_rows(now, before):
    """Why row numbers from before are not what the row_version says, or None."""
    if now.row_version != before.row_version:
        return None
    stale = {key for key, row in before.numbers.items() if now.numbers.get(key) != row}
    if stale:
        return f"the rows of keys changed and the row_version did not: {some(sorted(stale))}"
    return None


def _difference(what, one, other):
    missing, strange = other.keys() - one.keys(), one.keys() - other.keys()
    differ = [key for key in one.keys() & other.keys() if one[key] != other[key]]
    parts = [
        f"{len(keys)} {text} ({some(sorted(keys))})"
        for keys, text in ((missing, "missing"), (strange, "too many"), (differ, "differ"))
        if keys
    ]
    if what in ("counts", "seen", "pending", "removals") and differ:
        key = differ[0]
        parts.append(f"{key}: {one[key]} for {other[key]}")
    return f"{what}: " + ", ".join(parts)
