"""The operations that faults are injected into; each says what it does to a dict as well."""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scripts.bench.common.row_steps import ensure_state
from sok_lite.comm import SingleCommunicator
from sok_lite.engine.hashing import new_seed
from sok_lite.engine.optimizers import SGD, Adagrad
from sok_lite.engine.table import content
from sok_lite.engine.table.hkv import RefusedError
from sok_lite.engine.table.restore import restore
from sok_lite.engine.update_rows import Update
from tests.support.chosen_keys import of_one_segment
from tests.support.fault_bench import DIM, NEW
from tests.support.parts import Part, forward_parts
from tests.support.steps import apply_updates

LAST_LOOKUP_NUMBER = 2**32 - 1
OTHER = 70_000  # keys from here on are in no case


class Case(NamedTuple):
    """An operation.

    Attributes:
      kinds: of tables.
      work: (bench, tables) -> anything; the operation.
      model: (bench, oracle, state, table) -> None; the same for a DictTable. `state` is what the
        table was before the operation.
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
    model: Callable
    happens: Callable = lambda before, after: True
    prepare: Callable = lambda bench, tables: None
    others: tuple[str, ...] = ()
    scores_are_content: bool = False
    apart: bool = False
    ages: bool = False
    raises: type | None = None

    @property
    def of_each_index(self) -> tuple[str, ...]:
        """One kind of table with each kind of index: enough where nothing else differs."""
        return tuple(kind for kind in self.kinds if kind in ("hbm", "kLru")) or self.kinds[:1]


# -------------------------------------------------------------------- batches


def known(bench):
    return np.repeat(bench.held[1::3], 2)


def new(bench):
    return NEW + np.arange(bench.n)


def _so_many(bench, times=6):
    return NEW + np.arange(times * bench.n)


def mixed(bench):
    """Known and new keys, some of them twice."""
    some = np.concatenate([bench.held[::4], new(bench)[::2]])
    return np.concatenate([some, some[::3]])


def rows_of(keys, first=0.0):
    """Small whole numbers: their sums are exact."""
    return (np.arange(DIM * keys.size, dtype=np.float32).reshape(-1, DIM) % 64) - 30 + first


def scores_of(keys, table):
    # Elsewhere a score is, or ends with, the number of a lookup.
    counts = getattr(table.index, "strategy", "kLru") in ("kLfu", "kCustomized")
    most = 1000 if counts else table.num_lookups
    return (np.arange(keys.size) * 7 % (most + 1)).astype(np.uint64)


def _counts_of(keys):
    return np.arange(keys.size) % 3 + 1


def nothing(bench, oracle, state, table):
    return None


def looked_up(batch):
    return lambda bench, oracle, state, table: oracle.find_or_insert(batch(bench))


def written(name, batch, first=0.0):
    return lambda bench, oracle, state, table: getattr(oracle, name)(
        batch(bench), rows_of(batch(bench), first)
    )


def on_backend(bench, array):
    return bench.backend.from_host(array)


def _write(name, batch, first=0.0):
    return lambda bench, tables: getattr(tables[0], name)(
        batch(bench), on_backend(bench, rows_of(batch(bench), first))
    )


def _lookup(batch, **options):
    return lambda bench, tables: tables[0].lookup(batch(bench), **options).values


def _accum_or_assign(bench, tables):
    # The flags are those of the table as it was built, however often this is called.
    flags = np.isin(mixed(bench), bench.held)
    flags[::5] ^= True
    tables[0].accum_or_assign(mixed(bench), on_backend(bench, rows_of(mixed(bench))), flags)


def _accum_or_assign_model(bench, oracle, state, table):
    flags = np.isin(mixed(bench), bench.held)
    flags[::5] ^= True
    oracle.accum_or_assign(mixed(bench), rows_of(mixed(bench)), flags)


def _erase_model(doomed):
    return lambda bench, oracle, state, table: oracle.erase(doomed(bench, oracle, state))


def _expired(bench, oracle, state):
    return [key for key, (stamp, _) in state.seen.items() if stamp <= state.now - 2]


def _nearly_zero(bench, oracle, state):
    return [key for key, row in oracle.rows.items() if (abs(row) < 2020).all()]


def _many(bench):
    return np.concatenate([bench.held[::2], bench.held[::4], new(bench)])


# -------------------------------------------------------------------- larger operations


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


def _at_the_end_of_time(bench, tables):
    tables[0].clock.prepare_restart(LAST_LOOKUP_NUMBER)()


def _update(rule, batch):
    def work(bench, tables):
        updates = [
            Update(
                *(table, rule, batch(bench), on_backend(bench, rows_of(batch(bench)))),
            )
            for table in tables
        ]
        return apply_updates(updates, 1.0, 1)

    return work


def chosen(bench):
    """New keys that somebody has chosen against the seed of the hash."""
    return of_one_segment(20 * bench.n, new_seed())


def doubtful(bench):
    """Known and new keys of an update, some of them twice; so few new ones that none is refused."""
    some = np.concatenate([bench.held[::4], new(bench)[:2]])
    return np.concatenate([some, some[::3]])


def too_many(bench):
    """More new keys than any full table has slots."""
    return NEW + np.arange(12 * bench.n)


def _lookup_tables(batch):
    """One call of all tables; the first comes twice, and one part has weights."""

    def work(bench, tables):
        keys = on_backend(bench, batch(bench))
        splits = on_backend(bench, np.array([0, 2, 2, keys.size]))
        weights = on_backend(bench, np.ones(keys.size, np.float32))
        parts = [Part(table, keys, splits, None, "sum") for table in (*tables, tables[0])]
        parts[1] = parts[1]._replace(weights=weights, combiner="mean")
        return forward_parts(bench.backend, SingleCommunicator(), parts)

    return work


def _sgd_of_new_model(batch):
    def model(bench, oracle, state, table):
        keys = batch(bench)
        oracle.find_or_insert(keys)
        oracle.accumulate(keys, rows_of(keys), -1.0)

    return model


def _reread_of(batch):
    """An update that no dict can follow to the bit: its rows are taken over, the others compared.

    That the update itself is right is for test_update.py.
    """

    def model(bench, oracle, state, table):
        keys = np.unique(batch(bench))
        keys = keys[bench.backend.to_host(table.contains(keys))]
        rows = bench.backend.to_host(table.lookup(keys, insert=False).values)
        oracle.find_or_insert(keys)
        oracle.assign(keys, rows)

    return model


_reread = _reread_of(known)
# A key that a full table has evicted since begins anew.
_sgd_model = _sgd_of_new_model(known)


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


def _restore_model(bench, oracle, state, table):
    saved = _snapshot(bench)
    oracle.rows.clear()
    oracle.insert_or_assign(saved.keys, saved.values)


_ALL = ("hbm", "kLru", "kLfu", "kEpochLru", "kCustomized", "roomy", "sighting")
_LOGS = ("hbm log", "kLru log")
_FULL_ONES = ("kLru", "kLfu", "kEpochLru", "kCustomized")


def _inserts(before, after):
    return bool(after.rows.keys() - before.rows.keys()) or after.pending != before.pending


def _evicts(before, after):
    return after.counts["evicted"] > before.counts["evicted"]


def _erases(before, after):
    return after.counts["erased"] > before.counts["erased"]


def _writes(before, after):
    return after.rows != before.rows


CASES = {
    "find": Case(_ALL, lambda bench, tables: tables[0].find(mixed(bench)), nothing),
    "lookup_known": Case(_ALL, _lookup(known), looked_up(known)),
    "lookup_without_insert": Case(_ALL, _lookup(mixed, insert=False), nothing),
    "lookup_new": Case(_ALL, _lookup(new), looked_up(new), _inserts),
    "lookup_mixed": Case(_ALL, _lookup(mixed), looked_up(mixed), _inserts),
    "lookup_drawn": Case(
        ("kLru", "roomy", "sighting"), _lookup(mixed, filter_ratio=0.5), looked_up(mixed), _inserts
    ),
    "lookup_repeats": Case(("counting",), _lookup(mixed), looked_up(mixed), _inserts),
    "lookup_counts": Case(
        ("counting",),
        lambda bench, tables: tables[0].lookup(mixed(bench), counts=_counts_of(mixed(bench))),
        looked_up(mixed),
        lambda before, after: bool(after.rows.keys() - before.rows.keys()),
    ),
    "assign_sighted": Case(
        ("counting",), _write("insert_or_assign", new), written("insert_or_assign", new), _inserts
    ),
    "lookup_tables": Case(
        ("hbm", "roomy"),
        _lookup_tables(mixed),
        looked_up(mixed),
        _inserts,
        others=("sighting", "hbm"),
        apart=True,
    ),
    "lookup_full_tables": Case(
        ("kLru", "kLfu", "kCustomized"),
        _lookup_tables(mixed),
        looked_up(mixed),
        _evicts,
        others=("sighting", "kEpochLru", "hbm"),
        apart=True,
    ),
    "refuse_in_tables": Case(
        ("refusing",),
        _lookup_tables(too_many),
        looked_up(too_many),
        lambda before, after: after.counts["refused"] > before.counts["refused"],
        others=("sighting", "hbm"),
        apart=True,
        raises=RefusedError,
    ),
    "find_or_insert_scores": Case(
        _FULL_ONES[1:],
        lambda bench, tables: tables[0].find_or_insert(
            mixed(bench), scores=scores_of(mixed(bench), tables[0])
        ),
        looked_up(mixed),
        _inserts,
    ),
    "evict": Case(
        (*_FULL_ONES, "kLru log"),
        lambda bench, tables: tables[0].lookup_and_evict(mixed(bench)),
        looked_up(mixed),
        _evicts,
    ),
    "insert_and_evict": Case(
        _FULL_ONES, _write("insert_and_evict", mixed), written("insert_or_assign", mixed), _evicts
    ),
    "refuse": Case(
        ("refusing",),
        lambda bench, tables: tables[0].lookup(NEW + np.arange(3 * tables[0].capacity)),
        lambda bench, oracle, state, table: oracle.find_or_insert(
            NEW + np.arange(3 * table.capacity)
        ),
        lambda before, after: after.counts["refused"] > before.counts["refused"],
        raises=RefusedError,
    ),
    "insert_or_assign": Case(
        _ALL, _write("insert_or_assign", mixed), written("insert_or_assign", mixed), _writes
    ),
    "insert_or_assign_scores": Case(
        _ALL,
        lambda bench, tables: tables[0].insert_or_assign(
            *(mixed(bench), on_backend(bench, rows_of(mixed(bench)))),
            scores_of(mixed(bench), tables[0]),
        ),
        written("insert_or_assign", mixed),
        _writes,
        scores_are_content=True,
    ),
    "assign": Case(_ALL, _write("assign", mixed), written("assign", mixed), _writes),
    "accumulate": Case(_ALL, _write("accumulate", mixed), written("accumulate", mixed), _writes),
    "accum_or_assign": Case(_ALL, _accum_or_assign, _accum_or_assign_model, _writes),
    "assign_scores": Case(
        _ALL,
        lambda bench, tables: tables[0].assign_scores(
            mixed(bench), scores_of(mixed(bench), tables[0])
        ),
        nothing,
        lambda before, after: after.seen != before.seen,
        scores_are_content=True,
    ),
    "erase": Case(
        (*_ALL, *_LOGS),
        lambda bench, tables: tables[0].erase(_many(bench)[::3]),
        _erase_model(lambda bench, oracle, state: _many(bench)[::3]),
        _erases,
    ),
    # So many that an "hbm" table writes its index anew.
    "erase_many": Case(
        (*_ALL, *_LOGS),
        lambda bench, tables: tables[0].erase(_many(bench)),
        _erase_model(lambda bench, oracle, state: _many(bench)),
        _erases,
    ),
    "erase_if": Case(
        _ALL,
        lambda bench, tables: tables[0].erase_if(lambda entries: entries.keys % 3 == 0),
        _erase_model(lambda b, oracle, s: [key for key in oracle.rows if key % 3 == 0]),
        _erases,
    ),
    "expire": Case(
        (*_ALL, *_LOGS),
        lambda bench, tables: tables[0].expire(num_lookups=2),
        _erase_model(_expired),
        _erases,
    ),
    "erase_below": Case(
        _ALL,
        lambda bench, tables: tables[0].erase_below(2020),
        _erase_model(_nearly_zero),
        _erases,
    ),
    "clear": Case(
        (*_ALL, *_LOGS),
        lambda bench, tables: tables[0].clear(),
        lambda bench, oracle, state, table: oracle.rows.clear(),
        _writes,
    ),
    "log_removals": Case(
        ("hbm", "kLru"),
        lambda bench, tables: tables[0].log_removals(),
        nothing,
        lambda before, after: bool(after.removals) and not before.removals,
    ),
    "forget_removals": Case(
        _LOGS,
        lambda bench, tables: tables[0].forget_removals(before=3),
        nothing,
        lambda before, after: after.removals != before.removals,
    ),
    "reserve": Case(
        ("hbm", "roomy"),
        lambda bench, tables: tables[0].reserve(40 * bench.n),
        nothing,
        lambda before, after: after.capacity > before.capacity,
    ),
    "grow": Case(
        ("hbm", "roomy"),
        lambda bench, tables: tables[0].lookup(_so_many(bench)),
        lambda bench, oracle, state, table: oracle.find_or_insert(_so_many(bench)),
        lambda before, after: after.capacity > before.capacity,
    ),
    # Segment after segment takes the place of larger ones, or of two.
    "grow_segments": Case(
        ("hbm", "roomy"),
        lambda bench, tables: tables[0].lookup(_so_many(bench, 60)),
        lambda bench, oracle, state, table: oracle.find_or_insert(_so_many(bench, 60)),
        lambda before, after: after.capacity > before.capacity,
        prepare=lambda bench, tables: tables[0].lookup(_so_many(bench, 25)),
    ),
    # All new keys are in one segment, which has not enough slots.
    "reseed": Case(
        ("hbm", "wide"),
        _lookup(chosen),
        looked_up(chosen),
        lambda before, after: after.seed != before.seed,
    ),
    "shrink_segments": Case(
        ("hbm", "roomy"),
        lambda bench, tables: tables[0].erase(_so_many(bench, 60)),
        _erase_model(lambda bench, oracle, state: _so_many(bench, 60)),
        lambda before, after: after.capacity < before.capacity,
        prepare=lambda bench, tables: tables[0].lookup(_so_many(bench, 60)),
    ),
    "promote": Case(
        _FULL_ONES,
        _lookup(known),
        looked_up(known),
        lambda before, after: after.numbers != before.numbers,
        prepare=_make_hot,
    ),
    "age": Case(
        (*_ALL, *_LOGS),
        _lookup(known),
        looked_up(known),
        lambda before, after: after.now < before.now,
        prepare=_at_the_end_of_time,
        ages=True,
    ),
    "update": Case(_ALL, _update(SGD(), known), _sgd_model, _writes),
    "update_first_state": Case(_ALL, _update(Adagrad(), known), _reread, _writes),
    "update_state": Case(
        _ALL,
        _update(Adagrad(), known),
        _reread,
        _writes,
        prepare=lambda bench, tables: ensure_state(tables[0].store, "accumulator", 0.1),
    ),
    "update_two_tables": Case(
        ("hbm", "kLru"), _update(Adagrad(), known), _reread, _writes, others=("hbm",)
    ),
    # Keys without a row get one: inserted and updated, or neither, in all tables of the call.
    "update_new": Case(
        tuple(kind for kind in _ALL if kind != "sighting"),
        _update(SGD(), doubtful),
        _sgd_of_new_model(doubtful),
        _inserts,
    ),
    "update_new_of_tables": Case(
        ("hbm", "kLru", "roomy"),
        _update(SGD(), doubtful),
        _sgd_of_new_model(doubtful),
        _inserts,
        others=("roomy", "sighting", "hbm"),
    ),
    "update_new_first_state": Case(
        ("hbm", "kLru", "roomy"),
        _update(Adagrad(), new),
        _reread_of(new),
        _inserts,
        others=("hbm",),
    ),
    "update_refused": Case(
        ("refusing",),
        _update(SGD(), too_many),
        _sgd_of_new_model(too_many),
        lambda before, after: after.counts["not_updated"] > before.counts["not_updated"],
        others=("hbm",),
        raises=RefusedError,
    ),
    "update_turned_away": Case(
        ("sighting",),
        _update(SGD(), mixed),
        lambda bench, oracle, state, table: oracle.accumulate(
            mixed(bench), rows_of(mixed(bench)), -1.0
        ),
        lambda before, after: after.counts["not_updated"] > before.counts["not_updated"],
    ),
    "export": Case(_ALL, lambda bench, tables: tables[0].export(), nothing),
    "export_if": Case(
        _ALL,
        lambda bench, tables: tables[0].export_if(lambda entries: entries.keys > 0),
        nothing,
    ),
    "statistics": Case(_ALL, lambda bench, tables: tables[0].statistics(), nothing),
    "snapshot": Case(_ALL, lambda bench, tables: content.take(tables[0]), nothing),
    "restore": Case((*_ALL, *_LOGS), _restore, _restore_model, _writes),
    "restore_into_empty": Case(
        _ALL,
        _restore,
        _restore_model,
        _writes,
        prepare=lambda bench, tables: tables[0].clear(),
    ),
}
