"""The operations that faults are injected into."""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scripts.bench.common.row_steps import ensure_state
from sok_lite.comm import SingleCommunicator
from sok_lite.engine.hashing import new_seed
from sok_lite.engine.optimizers import SGD, Adagrad, Adam
from sok_lite.engine.table import content
from sok_lite.engine.table.hkv import RefusedError
from sok_lite.engine.table.restore import restore
from sok_lite.engine.update_rows import Update
from tests.support.chosen_keys import of_one_segment
from tests.support.fault_bench import DIM, NEW
from tests.support.parts import Part, forward_parts
from tests.support.steps import apply_updates

_LAST_LOOKUP = 2**32 - 1
OTHER = 70_000  # keys from here on are in no case


class Case(NamedTuple):
    """An operation.

    Attributes:
      kinds: of tables.
      work: (bench, tables) -> anything; the operation.
      happens: (before, after) -> bool; whether a clean run did what the case is about.
      prepare: (bench, tables) -> None; before it.
      others: kinds of more tables that take part.
      scores_are_content: scores are what it writes, and not only when keys were seen.
      apart: each table by itself is as before or as after.
      ages: it halves the numbers of all lookups first.
      raises: what a clean run ends with.
    """

    kinds: tuple[str, ...]
    work: Callable
    happens: Callable = lambda before, after: True
    prepare: Callable = lambda bench, tables: None
    others: tuple[str, ...] = ()
    scores_are_content: bool = False
    apart: bool = False
    ages: bool = False
    raises: type | None = None

    @property
    def of_each_index(self) -> tuple[str, ...]:
        """One kind of table with each kind of index: what else differs is for tests/fuzz."""
        return tuple(kind for kind in self.kinds if kind in ("hbm", "kLru")) or self.kinds[:1]


def variants() -> list[tuple[str, str]]:
    """Returns (name, kind) of all cases with each kind of index, and with keys not yet admitted."""
    return [
        (name, kind)
        for name, case in CASES.items()
        for kind in dict.fromkeys([*case.of_each_index, *({"sighting"} & {*case.kinds})])
    ]


# -------------------------------------------------------------------- batches


def known(bench):
    return np.repeat(bench.held[1::3], 2)


def new(bench):
    return NEW + np.arange(bench.n)


def _so_many(bench, times=6):
    return NEW + np.arange(times * bench.n)


def _very_many(bench):
    return _so_many(bench, 60)


def mixed(bench):
    """Known and new keys, some of them twice."""
    some = np.concatenate([bench.held[::4], new(bench)[::2]])
    return np.concatenate([some, some[::3]])


def doubtful(bench):
    """The same of an update: so few new ones that none is refused."""
    some = np.concatenate([bench.held[::4], new(bench)[:2]])
    return np.concatenate([some, some[::3]])


def chosen(bench):
    """New keys that somebody has chosen against the seed of the hash."""
    return of_one_segment(20 * bench.n, new_seed())


def too_many(bench):
    """More new keys than any full table has slots."""
    return NEW + np.arange(12 * bench.n)


def _many(bench):
    return np.concatenate([bench.held[::2], bench.held[::4], new(bench)])


def _rows_of(batch):
    """Gives small whole numbers, whose sums are exact, as rows of the keys of a batch."""

    def rows(bench):
        size = DIM * batch(bench).size
        return bench.backend.from_host(np.arange(size, dtype=np.float32).reshape(-1, DIM) % 64 - 30)

    return rows


def _scores_of(batch, table):
    # Elsewhere a score is, or ends with, the number of a lookup.
    counts = getattr(table.index, "strategy", "kLru") in ("kLfu", "kCustomized")
    most = 1000 if counts else table.num_lookups
    return (np.arange(batch.size) * 7 % (most + 1)).astype(np.uint64)


def _flags(bench):
    """Those of the table as it was built, however often this is called; some are wrong."""
    flags = np.isin(mixed(bench), bench.held)
    flags[::5] ^= True
    return flags


# -------------------------------------------------------------------- operations


def _call(name, *batches, **options):
    """Calls a method of the first table with what functions give of the bench, and options."""
    return lambda bench, tables: getattr(tables[0], name)(
        *(batch(bench) for batch in batches), **options
    )


def _write(name, batch):
    return _call(name, batch, _rows_of(batch))


def _make_hot(bench, tables):
    """Looks far rows up until a pass of the tiers is due."""
    table = tables[0]
    keys, rows = (bench.backend.to_host(part) for part in table.export_rows())
    far = keys[rows >= table.store.near_rows]
    for _ in range(40):
        if table.tiers.is_due:
            return
        table.find_or_insert(far[: max(1, far.size // 2)])
    raise AssertionError("no pass became due")


def _update(rule, batch):
    def work(bench, tables):
        keys, grads = batch(bench), _rows_of(batch)(bench)
        return apply_updates([Update(table, rule, keys, grads) for table in tables], 1.0, 1)

    return work


def _lookup_tables(batch):
    """One call of all tables; the first comes twice, and one part has weights."""

    def work(bench, tables):
        keys = bench.backend.from_host(batch(bench))
        splits = bench.backend.from_host(np.array([0, 2, 2, keys.size]))
        weights = bench.backend.from_host(np.ones(keys.size, np.float32))
        parts = [Part(table, keys, splits, None, "sum") for table in (*tables, tables[0])]
        parts[1] = parts[1]._replace(weights=weights, combiner="mean")
        return forward_parts(bench.backend, SingleCommunicator(), parts)

    return work


@functools.lru_cache(maxsize=64)
def _snapshot(bench):
    """What is restored; the same for every run of a bench."""
    source = bench.empty()
    with contextlib.suppress(RefusedError):
        source.find_or_insert(np.arange(300, 300 + bench.n))
        source.find_or_insert(np.arange(300, 300 + bench.n, 2))
    if bench.kind == "sighting":
        source.find_or_insert(np.arange(300, 300 + bench.n))
        source.find_or_insert(np.arange(900, 900 + bench.n))
    saved = content.take(source)
    rows = np.repeat(saved.keys.astype(np.float32)[:, None], DIM, axis=1)
    return saved._replace(values=rows, states=[])


def _restore(bench, tables):
    restore(tables[0], _snapshot(bench))


# -------------------------------------------------------------------- what happens


def _inserts(before, after):
    return bool(after.rows.keys() - before.rows.keys()) or after.pending != before.pending


def _writes(before, after):
    return after.rows != before.rows


def _counts(name):
    return lambda before, after: after.counts[name] > before.counts[name]


def _grows(before, after):
    return after.capacity > before.capacity


_ALL = ("hbm", "kLru", "kLfu", "kEpochLru", "kCustomized", "roomy", "sighting")
_LOGS = ("hbm log", "kLru log")
_FULL_ONES = ("kLru", "kLfu", "kEpochLru", "kCustomized")
_GROWING = ("hbm", "roomy")
_LOOKUP_MIXED = _call("lookup", mixed)
_INSERT_MIXED = _write("insert_or_assign", mixed)

CASES = {
    "find": Case(_ALL, _call("find", mixed)),
    "lookup_known": Case(_ALL, _call("lookup", known)),
    "lookup_without_insert": Case(_ALL, _call("lookup", mixed, insert=False)),
    "lookup_new": Case(_ALL, _call("lookup", new), _inserts),
    "lookup_mixed": Case(_ALL, _LOOKUP_MIXED, _inserts),
    "lookup_drawn": Case(
        ("kLru", "roomy", "sighting"), _call("lookup", mixed, filter_ratio=0.5), _inserts
    ),
    "lookup_repeats": Case(("counting",), _LOOKUP_MIXED, _inserts),
    "lookup_counts": Case(
        ("counting",),
        lambda bench, tables: tables[0].lookup(
            mixed(bench), counts=np.arange(mixed(bench).size) % 3 + 1
        ),
        lambda before, after: bool(after.rows.keys() - before.rows.keys()),
    ),
    "assign_sighted": Case(("counting",), _write("insert_or_assign", new), _inserts),
    "lookup_tables": Case(
        _GROWING, _lookup_tables(mixed), _inserts, others=("sighting", "hbm"), apart=True
    ),
    "lookup_full_tables": Case(
        ("kLru", "kLfu", "kCustomized"),
        _lookup_tables(mixed),
        _counts("evicted"),
        others=("sighting", "kEpochLru", "hbm"),
        apart=True,
    ),
    "refuse_in_tables": Case(
        ("refusing",),
        _lookup_tables(too_many),
        _counts("refused"),
        others=("sighting", "hbm"),
        apart=True,
        raises=RefusedError,
    ),
    "find_or_insert_scores": Case(
        _FULL_ONES[1:],
        lambda bench, tables: tables[0].find_or_insert(
            mixed(bench), scores=_scores_of(mixed(bench), tables[0])
        ),
        _inserts,
    ),
    "evict": Case((*_FULL_ONES, "kLru log"), _call("lookup_and_evict", mixed), _counts("evicted")),
    "insert_and_evict": Case(_FULL_ONES, _write("insert_and_evict", mixed), _counts("evicted")),
    "refuse": Case(
        ("refusing",), _call("lookup", too_many), _counts("refused"), raises=RefusedError
    ),
    "insert_or_assign": Case(_ALL, _INSERT_MIXED, _writes),
    "insert_or_assign_scores": Case(
        _ALL,
        lambda bench, tables: tables[0].insert_or_assign(
            mixed(bench), _rows_of(mixed)(bench), _scores_of(mixed(bench), tables[0])
        ),
        _writes,
        scores_are_content=True,
    ),
    "assign": Case(_ALL, _write("assign", mixed), _writes),
    "accumulate": Case(_ALL, _write("accumulate", mixed), _writes),
    "accum_or_assign": Case(
        _ALL, _call("accum_or_assign", mixed, _rows_of(mixed), _flags), _writes
    ),
    "assign_scores": Case(
        _ALL,
        lambda bench, tables: tables[0].assign_scores(
            mixed(bench), _scores_of(mixed(bench), tables[0])
        ),
        lambda before, after: after.seen != before.seen,
        scores_are_content=True,
    ),
    "erase": Case(
        (*_ALL, *_LOGS), _call("erase", lambda bench: _many(bench)[::3]), _counts("erased")
    ),
    # So many that an "hbm" table writes its index anew.
    "erase_many": Case((*_ALL, *_LOGS), _call("erase", _many), _counts("erased")),
    "erase_if": Case(
        _ALL,
        _call("erase_if", predicate=lambda entries: entries.keys % 3 == 0),
        _counts("erased"),
    ),
    "expire": Case((*_ALL, *_LOGS), _call("expire", num_lookups=2), _counts("erased")),
    "erase_below": Case(_ALL, _call("erase_below", lambda bench: 2020), _counts("erased")),
    "clear": Case((*_ALL, *_LOGS), _call("clear"), _writes),
    "log_removals": Case(
        ("hbm", "kLru"),
        _call("log_removals"),
        lambda before, after: bool(after.removals) and not before.removals,
    ),
    "forget_removals": Case(
        _LOGS,
        lambda bench, tables: tables[0].forget_removals(before=min(3, tables[0].num_lookups)),
        lambda before, after: after.removals != before.removals,
    ),
    "reserve": Case(_GROWING, _call("reserve", lambda bench: 40 * bench.n), _grows),
    "grow": Case(_GROWING, _call("lookup", _so_many), _grows),
    # Segment after segment takes the place of larger ones, or of two.
    "grow_segments": Case(
        _GROWING,
        _call("lookup", _very_many),
        _grows,
        prepare=_call("lookup", lambda bench: _so_many(bench, 25)),
    ),
    # All new keys are in one segment, which has not enough slots.
    "reseed": Case(
        ("hbm", "wide"),
        _call("lookup", chosen),
        lambda before, after: after.seed != before.seed,
    ),
    "shrink_segments": Case(
        _GROWING,
        _call("erase", _very_many),
        lambda before, after: after.capacity < before.capacity,
        prepare=_call("lookup", _very_many),
    ),
    "promote": Case(
        _FULL_ONES,
        _call("lookup", known),
        lambda before, after: after.numbers != before.numbers,
        prepare=_make_hot,
    ),
    "age": Case(
        (*_ALL, *_LOGS),
        _call("lookup", known),
        lambda before, after: after.now < before.now,
        prepare=lambda bench, tables: tables[0].clock.prepare_restart(_LAST_LOOKUP)(),
        ages=True,
    ),
    "update": Case(_ALL, _update(SGD(), known), _writes),
    "update_first_state": Case(_ALL, _update(Adam(), known), _writes),
    "update_state": Case(
        _ALL,
        _update(Adagrad(), known),
        _writes,
        prepare=lambda bench, tables: ensure_state(tables[0].store, "accumulator", 0.1),
    ),
    "update_two_tables": Case(("hbm", "kLru"), _update(Adagrad(), known), _writes, others=("hbm",)),
    # Keys without a row get one: inserted and updated, or neither, in all tables of the call.
    "update_new": Case(
        tuple(kind for kind in _ALL if kind != "sighting"), _update(SGD(), doubtful), _inserts
    ),
    "update_new_of_tables": Case(
        (*_GROWING, "kLru"),
        _update(SGD(), doubtful),
        _inserts,
        others=("roomy", "sighting", "hbm"),
    ),
    "update_new_first_state": Case(
        (*_GROWING, "kLru"), _update(Adagrad(), new), _inserts, others=("hbm",)
    ),
    "update_refused": Case(
        ("refusing",),
        _update(SGD(), too_many),
        _counts("not_updated"),
        others=("hbm",),
        raises=RefusedError,
    ),
    "update_turned_away": Case(("sighting",), _update(SGD(), mixed), _counts("not_updated")),
    "export": Case(_ALL, _call("export")),
    "export_if": Case(_ALL, _call("export_if", predicate=lambda entries: entries.keys > 0)),
    "statistics": Case(_ALL, _call("statistics")),
    "snapshot": Case(_ALL, lambda bench, tables: content.take(tables[0])),
    "restore": Case((*_ALL, *_LOGS), _restore, _writes),
    "restore_into_empty": Case(_ALL, _restore, _writes, prepare=_call("clear")),
}
