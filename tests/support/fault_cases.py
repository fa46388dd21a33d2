"""The operations that faults are injected into; each says what it does to a dict as well."""

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


def mixed(bench):
    """Known and new keys, some of them twice."""
    some = np.concatenate([bench.held[::4], new(bench)[::2]])
    return np.concatenate([some, some[::3]])


def rows_of(keys):
    """Small whole numbers: their sums are exact."""
    return (np.arange(DIM * keys.size, dtype=np.float32).reshape(-1, DIM) % 64) - 30


def scores_of(keys, table):
    # Elsewhere a score is, or ends with, the number of a lookup.
    counts = getattr(table.index, "strategy", "kLru") in ("kLfu", "kCustomized")
    most = 1000 if counts else table.num_lookups
    return (np.arange(keys.size) * 7 % (most + 1)).astype(np.uint64)


def _counts_of(keys):
    return np.arange(keys.size) % 3 + 1


def nothing(bench, oracle, state, table):
    return None


def on_backend(bench, array):
    return bench.backend.from_host(array)


def _write(name, batch):
    return lambda bench, tables: getattr(tables[0], name)(
        batch(bench), on_backend(bench, rows_of(batch(bench)))
    )


def _written(name, batch):
    return lambda bench, oracle, state, table: getattr(oracle, name)(
        batch(bench), rows_of(batch(bench))
    )


def _lookup(batch, **options):
    return lambda bench, tables: tables[0].lookup(batch(bench), **options).values


def _flags(bench):
    """Those of the table as it was built, however often this is called; some are wrong."""
    flags = np.isin(mixed(bench), bench.held)
    flags[::5] ^= True
    return flags


def _expired(bench, oracle, state, table):
    return [key for key, (stamp, _) in state.seen.items() if stamp <= state.now - 2]


def _many(bench, *_):
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


def _sgd_of(batch):
    """A key without a row, evicted or never there, begins anew."""

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
_GROWING = ("hbm", "roomy")


def _inserts(before, after):
    return bool(after.rows.keys() - before.rows.keys()) or after.pending != before.pending


def _writes(before, after):
    return after.rows != before.rows


def _counts(name):
    return lambda before, after: after.counts[name] > before.counts[name]


_counts_erased = _counts("erased")


def _grows(before, after):
    return after.capacity > before.capacity


def _inserting(kinds, batch, work=None, happens=_inserts, **fields):
    """A case that gives rows to the keys of a batch; without `work` a lookup of them."""
    model = lambda bench, oracle, state, table: oracle.find_or_insert(batch(bench))  # noqa: E731
    return Case(kinds, work or _lookup(batch), model, happens, **fields)


def _writing(name, kinds=_ALL, batch=None, happens=_writes, called=None, **fields):
    """A case that writes the rows of a batch by a method, which a dict calls `name`."""
    batch = batch or mixed
    work = fields.pop("work", _write(called or name, batch))
    return Case(kinds, work, _written(name, batch), happens, **fields)


def _erasing(doomed, work, kinds=_ALL, happens=_counts_erased, **fields):
    """A case that removes the keys that `doomed` gives."""

    def model(bench, oracle, state, table):
        oracle.erase(doomed(bench, oracle, state, table))

    return Case(kinds, work, model, happens, **fields)


def _updating(kinds, rule, batch, model=None, happens=_writes, **fields):
    return Case(kinds, _update(rule, batch), (model or _sgd_of)(batch), happens, **fields)


def _reading(work, kinds=_ALL, happens=lambda before, after: True, **fields):
    """A case that leaves the rows as they are."""
    return Case(kinds, work, nothing, happens, **fields)


CASES = {
    "find": _reading(lambda bench, tables: tables[0].find(mixed(bench))),
    "lookup_known": _inserting(_ALL, known, happens=lambda before, after: True),
    "lookup_without_insert": _reading(_lookup(mixed, insert=False)),
    "lookup_new": _inserting(_ALL, new),
    "lookup_mixed": _inserting(_ALL, mixed),
    "lookup_drawn": _inserting(
        ("kLru", "roomy", "sighting"), mixed, _lookup(mixed, filter_ratio=0.5)
    ),
    "lookup_repeats": _inserting(("counting",), mixed),
    "lookup_counts": _inserting(
        ("counting",),
        mixed,
        lambda bench, tables: tables[0].lookup(
            mixed(bench), counts=np.arange(mixed(bench).size) % 3 + 1
        ),
        lambda before, after: bool(after.rows.keys() - before.rows.keys()),
    ),
    "assign_sighted": _writing("insert_or_assign", ("counting",), new, _inserts),
    "lookup_tables": _inserting(
        _GROWING, mixed, _lookup_tables(mixed), others=("sighting", "hbm"), apart=True
    ),
    "lookup_full_tables": _inserting(
        ("kLru", "kLfu", "kCustomized"),
        mixed,
        _lookup_tables(mixed),
        _counts("evicted"),
        others=("sighting", "kEpochLru", "hbm"),
        apart=True,
    ),
    "refuse_in_tables": _inserting(
        ("refusing",),
        too_many,
        _lookup_tables(too_many),
        _counts("refused"),
        others=("sighting", "hbm"),
        apart=True,
        raises=RefusedError,
    ),
    "find_or_insert_scores": _inserting(
        _FULL_ONES[1:],
        mixed,
        lambda bench, tables: tables[0].find_or_insert(
            mixed(bench), scores=scores_of(mixed(bench), tables[0])
        ),
    ),
    "evict": _inserting(
        (*_FULL_ONES, "kLru log"),
        mixed,
        lambda bench, tables: tables[0].lookup_and_evict(mixed(bench)),
        _counts("evicted"),
    ),
    "insert_and_evict": _writing(
        "insert_or_assign", _FULL_ONES, happens=_counts("evicted"), called="insert_and_evict"
    ),
    "refuse": _inserting(("refusing",), too_many, happens=_counts("refused"), raises=RefusedError),
    "insert_or_assign": _writing("insert_or_assign"),
    "insert_or_assign_scores": _writing(
        "insert_or_assign",
        work=lambda bench, tables: tables[0].insert_or_assign(
            *(mixed(bench), on_backend(bench, rows_of(mixed(bench)))),
            scores_of(mixed(bench), tables[0]),
        ),
        scores_are_content=True,
    ),
    "assign": _writing("assign"),
    "accumulate": _writing("accumulate"),
    "accum_or_assign": Case(
        _ALL,
        lambda bench, tables: tables[0].accum_or_assign(
            mixed(bench), on_backend(bench, rows_of(mixed(bench))), _flags(bench)
        ),
        lambda bench, oracle, state, table: oracle.accum_or_assign(
            mixed(bench), rows_of(mixed(bench)), _flags(bench)
        ),
        _writes,
    ),
    "assign_scores": _reading(
        lambda bench, tables: tables[0].assign_scores(
            mixed(bench), scores_of(mixed(bench), tables[0])
        ),
        happens=lambda before, after: after.seen != before.seen,
        scores_are_content=True,
    ),
    "erase": _erasing(
        lambda bench, *_: _many(bench)[::3],
        lambda bench, tables: tables[0].erase(_many(bench)[::3]),
        (*_ALL, *_LOGS),
    ),
    # So many that an "hbm" table writes its index anew.
    "erase_many": _erasing(
        _many, lambda bench, tables: tables[0].erase(_many(bench)), (*_ALL, *_LOGS)
    ),
    "erase_if": _erasing(
        lambda bench, oracle, *_: [key for key in oracle.rows if key % 3 == 0],
        lambda bench, tables: tables[0].erase_if(lambda entries: entries.keys % 3 == 0),
    ),
    "expire": _erasing(
        _expired, lambda bench, tables: tables[0].expire(num_lookups=2), (*_ALL, *_LOGS)
    ),
    "erase_below": _erasing(
        lambda bench, oracle, *_: [k for k, row in oracle.rows.items() if (abs(row) < 2020).all()],
        lambda bench, tables: tables[0].erase_below(2020),
    ),
    "clear": _erasing(
        lambda bench, oracle, *_: list(oracle.rows),
        lambda bench, tables: tables[0].clear(),
        (*_ALL, *_LOGS),
        _writes,
    ),
    "log_removals": _reading(
        lambda bench, tables: tables[0].log_removals(),
        ("hbm", "kLru"),
        lambda before, after: bool(after.removals) and not before.removals,
    ),
    "forget_removals": _reading(
        lambda bench, tables: tables[0].forget_removals(before=min(3, tables[0].num_lookups)),
        _LOGS,
        lambda before, after: after.removals != before.removals,
    ),
    "reserve": _reading(lambda bench, tables: tables[0].reserve(40 * bench.n), _GROWING, _grows),
    "grow": _inserting(_GROWING, _so_many, happens=_grows),
    # Segment after segment takes the place of larger ones, or of two.
    "grow_segments": _inserting(
        _GROWING,
        lambda bench: _so_many(bench, 60),
        happens=_grows,
        prepare=lambda bench, tables: tables[0].lookup(_so_many(bench, 25)),
    ),
    # All new keys are in one segment, which has not enough slots.
    "reseed": _inserting(
        ("hbm", "wide"), chosen, happens=lambda before, after: after.seed != before.seed
    ),
    "shrink_segments": _erasing(
        lambda bench, *_: _so_many(bench, 60),
        lambda bench, tables: tables[0].erase(_so_many(bench, 60)),
        _GROWING,
        lambda before, after: after.capacity < before.capacity,
        prepare=lambda bench, tables: tables[0].lookup(_so_many(bench, 60)),
    ),
    "promote": _inserting(
        _FULL_ONES,
        known,
        happens=lambda before, after: after.numbers != before.numbers,
        prepare=_make_hot,
    ),
    "age": _inserting(
        (*_ALL, *_LOGS),
        known,
        happens=lambda before, after: after.now < before.now,
        prepare=lambda bench, tables: tables[0].clock.prepare_restart(_LAST_LOOKUP)(),
        ages=True,
    ),
    "update": _updating(_ALL, SGD(), known),
    "update_first_state": _updating(_ALL, Adam(), known, _reread_of),
    "update_state": _updating(
        _ALL,
        Adagrad(),
        known,
        _reread_of,
        prepare=lambda bench, tables: ensure_state(tables[0].store, "accumulator", 0.1),
    ),
    "update_two_tables": _updating(("hbm", "kLru"), Adagrad(), known, _reread_of, others=("hbm",)),
    # Keys without a row get one: inserted and updated, or neither, in all tables of the call.
    "update_new": _updating(
        tuple(kind for kind in _ALL if kind != "sighting"), SGD(), doubtful, happens=_inserts
    ),
    "update_new_of_tables": _updating(
        (*_GROWING, "kLru"), SGD(), doubtful, happens=_inserts, others=("roomy", "sighting", "hbm")
    ),
    "update_new_first_state": _updating(
        (*_GROWING, "kLru"), Adagrad(), new, _reread_of, _inserts, others=("hbm",)
    ),
    "update_refused": _updating(
        ("refusing",),
        SGD(),
        too_many,
        happens=_counts("not_updated"),
        others=("hbm",),
        raises=RefusedError,
    ),
    "update_turned_away": Case(
        ("sighting",),
        _update(SGD(), mixed),
        lambda bench, oracle, state, table: oracle.accumulate(
            mixed(bench), rows_of(mixed(bench)), -1.0
        ),
        _counts("not_updated"),
    ),
    "export": _reading(lambda bench, tables: tables[0].export()),
    "export_if": _reading(
        lambda bench, tables: tables[0].export_if(lambda entries: entries.keys > 0)
    ),
    "statistics": _reading(lambda bench, tables: tables[0].statistics()),
    "snapshot": _reading(lambda bench, tables: content.take(tables[0])),
    "restore": Case((*_ALL, *_LOGS), _restore, _restore_model, _writes),
    "restore_into_empty": Case(
        _ALL,
        _restore,
        _restore_model,
        _writes,
        prepare=lambda bench, tables: tables[0].clear(),
    ),
}
