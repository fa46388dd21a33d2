"""Signals that interrupt large operations of a table at random times.

Each round arms a timer, runs one operation, and then asks whether all of it was done or nothing.
The oracle is vectorised: `Rows` holds ascending keys and their rows. Run in a process of its own,
so that a hang or a crash is its own too.
"""

import random
import signal
import time
from typing import NamedTuple

import numpy as np

from sok_lite.backend import get_backend
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.update_rows import Update
from tests.support.helpers import new_table
from tests.support.steps import apply_updates
from tests.support.table_audit import audit

DIM = 8
BATCH = 20_000
SPACE = 60_000  # keys are below it
KINDS = {
    "hbm": {"var_type": "hbm"},
    # Full after a few rounds; a quarter of its rows are near.
    "hybrid": {
        "var_type": "hybrid",
        "init_capacity": 1 << 12,
        "max_capacity": 1 << 15,
        "max_hbm_for_vectors": (1 << 13) * DIM * 4 / 2**30,
        "on_refused": "ignore",
    },
}


class Rows(NamedTuple):
    """Keys (n,) int64, ascending, and rows (n, DIM) float32."""

    keys: np.ndarray
    rows: np.ndarray

    def find(self, keys):
        """Positions of keys, and whether each is there."""
        if not self.keys.size:
            return np.zeros(keys.size, np.int64), np.zeros(keys.size, bool)
        at = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return at, self.keys[at] == keys

    def without(self, keys):
        keep = ~np.isin(self.keys, keys)
        return Rows(self.keys[keep], self.rows[keep])

    def written(self, keys, rows):
        """With distinct keys set, those that are not there too."""
        other = self.without(keys)
        keys, rows = np.concatenate([other.keys, keys]), np.concatenate([other.rows, rows])
        order = np.argsort(keys)
        return Rows(keys[order], rows[order])


def first_rows(keys):
    return np.repeat((keys % 1000).astype(np.float32)[:, None], DIM, axis=1)


def looked_up(rows, keys):
    keys = np.unique(keys)
    new = keys[~rows.find(keys)[1]]
    return rows.written(new, first_rows(new))


def assigned(rows, keys, values, insert):
    last = np.full(keys.max() + 1, -1)
    last[keys] = np.arange(keys.size)
    distinct = np.unique(keys)
    if not insert:
        distinct = distinct[rows.find(distinct)[1]]
    return rows.written(distinct, values[last[distinct]])


def added(rows, keys, values, scale):
    distinct, inverse = np.unique(keys, return_inverse=True)
    sums = np.zeros((distinct.size, DIM), np.float32)
    np.add.at(sums, inverse, values)
    at, is_held = rows.find(distinct)
    changed = rows.rows.copy()
    changed[at[is_held]] += scale * sums[is_held]
    return rows._replace(rows=changed)


class Operation(NamedTuple):
    """run(table, keys, values); after(rows, keys, values) -> Rows."""

    run: object
    after: object


ENGINE = {
    "lookup": Operation(
        lambda table, keys, values: table.lookup(keys),
        lambda rows, keys, values: looked_up(rows, keys),
    ),
    "insert_or_assign": Operation(
        lambda table, keys, values: table.insert_or_assign(keys, values),
        lambda rows, keys, values: assigned(rows, keys, values, True),
    ),
    "assign": Operation(
        lambda table, keys, values: table.assign(keys, values),
        lambda rows, keys, values: assigned(rows, keys, values, False),
    ),
    "accumulate": Operation(
        lambda table, keys, values: table.accumulate(keys, values),
        lambda rows, keys, values: added(rows, keys, values, 1),
    ),
    "update": Operation(
        lambda table, keys, values: apply_updates([Update(table, SGD(), keys, values)], 1.0, 1),
        lambda rows, keys, values: added(looked_up(rows, keys), keys, values, -1),
    ),
    "erase": Operation(
        lambda table, keys, values: table.erase(keys),
        lambda rows, keys, values: rows.without(keys),
    ),
    "erase_if": Operation(
        lambda table, keys, values: table.erase_if(lambda entries: entries.keys % 7 == 0),
        lambda rows, keys, values: rows.without(rows.keys[rows.keys % 7 == 0]),
    ),
    "export": Operation(
        lambda table, keys, values: table.export(), lambda rows, keys, values: rows
    ),
    "clear": Operation(
        lambda table, keys, values: table.clear(),
        lambda rows, keys, values: Rows(rows.keys[:0], rows.rows[:0]),
    ),
}


class Alarm:
    """Presses Ctrl-C at a time, if what it guards is still running."""

    def __init__(self):
        self._is_armed = False
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, number, frame):
        if self._is_armed:
            signal.raise_signal(signal.SIGINT)

    def run(self, seconds, work, *args):
        """Calls work(*args); returns whether it was interrupted. It may have been done by then."""
        try:
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work(*args)
            self._is_armed = False
        except KeyboardInterrupt:
            self._is_armed = False
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


def content(table):
    keys, rows = table.export()
    host = table.backend.to_host
    return Rows(host(keys).astype(np.int64), host(rows).copy())


def which(now, before, after, batch, counts):
    """Returns "before" or "after"; raises AssertionError if it is neither.

    Args:
      batch: (n,) keys of the operation, which a full table may refuse.
      counts: what the counters gained; None: the table neither evicts nor refuses.
    """
    if same(now, before):
        return "before"
    if same(now, after):
        return "after"
    assert counts is not None, f"neither before nor after: {difference(now, before, after)}"
    # Who was evicted is the table's choice: that each loss is one, and that no row is wrong.
    at, is_known = after.find(now.keys)
    assert is_known.all(), f"keys came from nowhere: {now.keys[~is_known][:5]}"
    wrong = now.keys[(now.rows != after.rows[at]).any(axis=1)]
    assert not wrong.size, f"rows are neither as before nor as after: {wrong[:5]}"
    gone = after.keys[~now.find(after.keys)[1]]
    came = before.keys[before.find(before.keys)[1] & ~now.find(before.keys)[1]]
    new = np.setdiff1d(np.unique(batch), before.keys)
    refused = int((~now.find(new)[1]).sum())
    assert came.size == counts["evicted"], f"{came.size} keys are gone, {counts['evicted']} evicted"
    assert refused == counts["refused"], (
        f"{refused} new keys are not there, not {counts['refused']}"
    )
    assert gone.size == came.size + refused
    assert new.size - refused == counts["inserted"]
    return "after"


def same(one, other):
    return np.array_equal(one.keys, other.keys) and np.array_equal(one.rows, other.rows)


def difference(now, before, after):
    def to(other):
        keys = np.intersect1d(now.keys, other.keys)
        rows = (now.rows[now.find(keys)[0]] != other.rows[other.find(keys)[0]]).any(axis=1)
        return (
            f"{np.setdiff1d(other.keys, now.keys).size} keys missing, "
            f"{np.setdiff1d(now.keys, other.keys).size} too many, {int(rows.sum())} rows differ"
        )

    return f"to before: {to(before)}; to after: {to(after)}"


def rounds(kind, count, seed):
    """Interrupts a table's operations `count` times; raises AssertionError at the first fault."""
    backend = get_backend("cpu")
    table = new_table(backend, DIM, **KINDS[kind])
    dice = random.Random(seed)
    alarm = Alarm()
    took = {}
    interrupted = done = 0
    while interrupted < count and done < 20 * count:
        done += 1
        # Mostly what inserts and writes; a table that was cleared fills up again.
        name = dice.choice([*ENGINE, "lookup", "lookup", "insert_or_assign", "update"])
        if name == "clear" and dice.random() < 0.7:
            name = "lookup"
        operation = ENGINE[name]
        rng = np.random.default_rng(dice.getrandbits(32))
        keys = rng.integers(0, SPACE, BATCH)
        values = rng.integers(-8, 8, (BATCH, DIM)).astype(np.float32)
        before, statistics = content(table), table.statistics()
        seconds = dice.uniform(1e-5, 1.2 * took.get(name, 0.01))
        start = time.perf_counter()
        was_interrupted = alarm.run(seconds, operation.run, table, keys, values)
        if not was_interrupted:
            took[name] = time.perf_counter() - start
        interrupted += was_interrupted
        try:
            audit(table)
            counts = None
            if kind == "hybrid" and name in ("lookup", "insert_or_assign", "update"):
                now = table.statistics()
                counts = {
                    field: getattr(now, f"{field}_total") - getattr(statistics, f"{field}_total")
                    for field in ("inserted", "evicted", "refused")
                }
            after = operation.after(before, keys, values)
            state = which(content(table), before, after, keys, counts)
            assert was_interrupted or state == "after" or same(before, after), "nothing was done"
        except AssertionError as error:
            raise AssertionError(
                f"{kind}, seed {seed}, round {done}: {name} interrupted after {seconds:.6f} s: "
                f"{error}"
            ) from None
    print(f"interrupted {interrupted} of {done}")
