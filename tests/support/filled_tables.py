"""Tables of every kind with keys, rows and a state, and what a checkpoint is to keep of them."""

import numpy as np

from scripts.bench.common.row_steps import ensure_state
from tests.support.helpers import new_table
from tests.support.index_entries import entries_of
from tests.support.table_state import State

HYBRID = {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 4096}
KINDS = {
    "hbm": {"var_type": "hbm"},
    "kLru": HYBRID | {"evict_strategy": "kLru"},
    "kEpochLfu": HYBRID | {"evict_strategy": "kEpochLfu"},
    "sightings": HYBRID | {"evict_strategy": "kLfu", "enter_threshold": 2},
}


def some_keys(n, key_type="int64", seed=0):
    """Distinct keys in no order, among them those that an index marks slots with."""
    limits = np.iinfo(key_type)
    marks = [limits.max, limits.min, limits.max - 1, 0, 1]
    more = np.random.default_rng(seed).integers(2, limits.max - 2, 2 * n, limits.dtype)
    keys = np.unique(np.concatenate([np.array(marks, limits.dtype), more]))
    marked = np.isin(keys, np.array(marks, limits.dtype))
    keys = np.concatenate([keys[marked], keys[~marked]])[:n]
    return np.random.default_rng(seed + 1).permutation(keys)


def rows_of(n, dim, dtype="float32", seed=0):
    """Rows in the format in which they are kept."""
    rng = np.random.default_rng(seed)
    if dtype == "bfloat16":
        return rng.integers(0, 0x7F80, (n, dim), np.uint16)
    if np.dtype(dtype).kind == "i":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, (n, dim), dtype, endpoint=True)
    return rng.standard_normal((n, dim)).astype(dtype)


def filled(backend, n, dtype="float32", key_type="int64", seed=0, dim=3, **options):
    """A table with n keys and a state, and {key: (row, state)}."""
    table = new_table(backend, dim, dtype=dtype, key_type=key_type, **options)
    keys, rows = some_keys(n, key_type, seed), rows_of(n, dim, dtype, seed)
    states = rows_of(n, dim, seed=seed + 7)
    for part in np.array_split(np.arange(n), 3):
        table.insert_or_assign(keys[part], backend.from_host(rows[part]))
    ensure_state(table.store, "m", 0.25)
    table.assign_state("m", keys, backend.from_host(states))
    return table, held_by(keys, rows, states)


def held_by(keys, rows, states):
    parts = zip(keys.tolist(), rows, states, strict=True)
    return {key: (row.tobytes(), state.tobytes()) for key, row, state in parts}


def held(*tables):
    """{key: (row, state)} of tables that have no key in common."""
    found = {}
    for table in tables:
        keys, rows = map(table.backend.to_host, table.export())
        states = table.backend.to_host(table.read_state("m", keys))
        more = held_by(keys, rows, states)
        assert not found.keys() & more.keys()
        found |= more
    return found


def all_of(table, with_places=True):
    """What a checkpoint is to keep of a table; among as many ranks as before the slots of its keys
    too.

    Else several threads insert them anew, and which comes first to a slot is chance.
    """
    state = State.of(table)
    is_regular = getattr(table.index, "is_regular", False)
    slots = entries_of(table).slots.tolist() if is_regular else []
    kept = (state.rows, state.seen, state.pending, state.now, state.epoch, table.clock.spans)
    return (*kept, slots) if with_places else kept
