"""Random operations for faults.py, and what each does to a dict."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import as_words
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.optimizers import Momentum
from sok_lite.engine.table import EmbeddingTable, content
from sok_lite.engine.table.locking import with_lock
from sok_lite.engine.update import StepOptions, UpdateStep
from sok_lite.engine.update_rows import Update
from tests.support.chosen_keys import of_one_segment
from tests.support.table_audit import log_index, pending_index

DIM = 2
_SPACE = 400  # keys are of so many
_INT64 = np.iinfo(np.int64)
# Its state is minus the gradient of the last update: a dict can follow it to the bit.
_RULE = Momentum(momentum=0.0)
STATE = "momentum"

Rows = dict[int, tuple[np.ndarray, np.ndarray]]  # key -> row and state


class KeyRows:
    """The first row of key k is k mod 1000 in every column."""

    def check(self, row_dtype: RowDtype, dim: int) -> None:
        return None

    def fill_launch(
        self,
        backend: Backend,
        store: Any,
        rows: Array,
        keys: Array,
        table_seed: int,
        out: Array | None = None,
    ) -> Launch:
        values = self.values(backend, keys, store.dim, table_seed)
        if out is not None:
            out[...] = values
        return store.write_launch(rows, values)

    def draw_launch(
        self,
        backend: Backend,
        row_dtype: RowDtype,
        out: Array,
        keys: Array,
        table_seed: int,
        rows: Array | None = None,
    ) -> Launch:
        assert rows is None  # these steps are lookups of one table, which keep no rows
        values = self.values(backend, keys, out.shape[1], table_seed)
        each, n = backend.xp.arange(len(keys), dtype=np.int32), len(keys)
        (_, words), (suffix, into) = as_words(values), as_words(out)
        return backend.prepared(f"dense_gather_{suffix}", n, words, out.shape[1], each, into, n)

    def values(self, backend: Backend, keys: Array, dim: int, table_seed: int) -> Array:
        values = (backend.to_host(keys) % 1000).astype(np.float32)
        return backend.from_host(np.repeat(values[:, None], dim, axis=1))


class Step(NamedTuple):
    """An operation with its arguments.

    Attributes:
      name: of the operation.
      run: runs it on the table.
      after: what it makes of the rows of a table that drops and refuses nothing.
      inserts: keys (n,) that get rows.
    """

    name: str
    run: Callable[[EmbeddingTable], Any]
    after: Callable[[Rows], Rows]
    inserts: np.ndarray


# -------------------------------------------------------------------- what a dict does


def _first(key: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(DIM, key % 1000, np.float32), np.zeros(DIM, np.float32)


def _looked_up(rows: Rows, keys: np.ndarray) -> Rows:
    return rows | {key: _first(key) for key in keys.tolist() if key not in rows}


def _written(rows: Rows, keys: np.ndarray, values: np.ndarray, insert: bool) -> Rows:
    rows = dict(rows)
    for key, value in zip(keys.tolist(), values, strict=True):
        if key in rows or insert:
            rows[key] = value, rows[key][1] if key in rows else _first(key)[1]
    return rows


def _sums(keys: np.ndarray, values: np.ndarray) -> dict[int, np.ndarray]:
    sums: dict[int, np.ndarray] = {}
    for key, value in zip(keys.tolist(), values, strict=True):
        sums[key] = sums.get(key, np.zeros(DIM, np.float32)) + value
    return sums


def _added(rows: Rows, keys: np.ndarray, values: np.ndarray) -> Rows:
    sums = _sums(keys, values)
    return rows | {
        key: (rows[key][0] + delta, rows[key][1]) for key, delta in sums.items() if key in rows
    }


def _updated(rows: Rows, keys: np.ndarray, grads: np.ndarray) -> Rows:
    sums = _sums(keys, grads)
    return rows | {key: (rows[key][0] - g, -g) for key, g in sums.items() if key in rows}


def _accum_or_assigned(rows: Rows, keys: np.ndarray, values: np.ndarray, flags: np.ndarray) -> Rows:
    is_held = np.array([key in rows for key in keys.tolist()], bool)
    add, put = flags & is_held, ~flags & ~is_held
    # Backwards: of a repeated key the first is inserted.
    return _written(_added(rows, keys[add], values[add]), keys[put][::-1], values[put][::-1], True)


def _without(rows: Rows, is_gone: Callable[[int], bool]) -> Rows:
    return {key: row for key, row in rows.items() if not is_gone(key)}


# -------------------------------------------------------------------- steps


def new_step(dice: random.Random, table: EmbeddingTable, rows: Rows) -> Step:
    """Chooses an operation and its arguments."""
    xp = table.backend.xp
    rng = np.random.default_rng(dice.getrandbits(32))
    n = dice.choice([0, 1, 3, 10, 40, 150])
    inserts = table.inserts_for_updates
    keys = rng.integers(-_SPACE // 2, _SPACE // 2, n)
    # Neither pending counts nor the log of removals ever take another seed.
    takes_chosen = pending_index(table) is None and log_index(table) is None
    if takes_chosen and dice.random() < 0.1:
        keys = of_one_segment(n, table.index.seed)  # chosen against the hash
    if n and dice.random() < 0.2:
        keys[0] = dice.choice([_INT64.max, _INT64.min])
    values = rng.integers(-8, 8, (n, DIM)).astype(np.float32)
    given = table.backend.from_host(values)
    flags = rng.random(n) < 0.5
    none = keys[:0]
    is_hybrid = table.var_type == "hybrid"
    now = table.num_lookups
    highest = 1000 if getattr(table.index, "strategy", "") in ("kLfu", "kCustomized") else now
    scores = rng.integers(0, highest + 1, n).astype(np.uint64)
    third = dice.randrange(1, 9)
    seen = with_lock(table, table.index.entries)
    old = dice.randrange(0, 6)
    stamps = dict(
        zip(
            table.backend.to_host(seen.keys).tolist(),
            table.backend.to_host(seen.last_seen).tolist(),
            strict=True,
        )
    )
    steps = [
        Step("lookup", lambda t: t.lookup(keys), lambda r: _looked_up(r, keys), keys),
        Step(
            "find_or_insert", lambda t: t.find_or_insert(keys), lambda r: _looked_up(r, keys), keys
        ),
        Step("find", lambda t: t.find(keys), dict, none),
        Step("lookup_without_insert", lambda t: t.lookup(keys, insert=False), dict, none),
        Step(
            "insert_or_assign",
            lambda t: t.insert_or_assign(keys, given, scores if third > 4 else None),
            lambda r: _written(r, keys, values, True),
            keys,
        ),
        Step(
            "assign",
            lambda t: t.assign(keys, given),
            lambda r: _written(r, keys, values, False),
            none,
        ),
        Step(
            "accumulate",
            lambda t: t.accumulate(keys, given),
            lambda r: _added(r, keys, values),
            none,
        ),
        Step(
            "accum_or_assign",
            lambda t: t.accum_or_assign(keys, given, xp.asarray(flags)),
            lambda r: _accum_or_assigned(r, keys, values, flags),
            keys,
        ),
        Step(
            "update",
            lambda t: UpdateStep([Update(t, _RULE, keys, given)], StepOptions(1.0, 1)).commit(),
            lambda r: _updated(_looked_up(r, keys) if inserts else r, keys, values),
            keys if inserts else none,
        ),
        Step("assign_scores", lambda t: t.assign_scores(keys, scores), dict, none),
        Step(
            "erase",
            lambda t: t.erase(keys),
            lambda r: _without(r, set(keys.tolist()).__contains__),
            none,
        ),
        Step(
            "erase_if",
            lambda t: t.erase_if(lambda entries: entries.keys % third == 0),
            lambda r: _without(r, lambda key: key % third == 0),
            none,
        ),
        Step(
            "expire",
            lambda t: t.expire(num_lookups=old),
            lambda r: _without(r, lambda key: stamps[key] <= now - old),
            none,
        ),
        Step(
            "erase_below",
            lambda t: t.erase_below(third * 10),
            lambda r: _without(r, lambda key: bool((abs(r[key][0]) < third * 10).all())),
            none,
        ),
        Step("reserve", lambda t: t.reserve(3 * n), dict, none),
        Step("export", lambda t: t.export(), dict, none),
        Step("statistics", lambda t: t.statistics(), dict, none),
        Step("snapshot", content.take, dict, none),
    ]
    if is_hybrid:
        steps += [
            Step(
                "lookup_and_evict",
                lambda t: t.lookup_and_evict(keys),
                lambda r: _looked_up(r, keys),
                keys,
            ),
            Step(
                "insert_and_evict",
                lambda t: t.insert_and_evict(keys, given),  # type: ignore[attr-defined]
                lambda r: _written(r, keys, values, True),
                keys,
            ),
            Step(
                "lookup_drawn",
                lambda t: t.lookup(keys, filter_ratio=0.5),
                lambda r: _looked_up(r, keys),
                keys,
            ),
        ]
    if dice.random() < 0.03:
        steps = [Step("clear", lambda t: t.clear(), lambda r: {}, none)]
    return dice.choice(steps)
