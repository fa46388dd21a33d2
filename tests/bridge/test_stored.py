"""What some ranks have saved of a table is loaded by more of them, and by fewer."""

import numpy as np
import pytest
import tensorflow as tf

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.bridge.checkpoint import restore_tensors, saved_tensors
from sok_lite.bridge.stored import part_of_rank
from sok_lite.comm import run_ranks
from tests.support.filled_tables import KINDS, rows_of, some_keys
from tests.support.helpers import new_table
from tests.support.table_state import State

CPU = get_backend("cpu")


def joined(tables):
    """What tables hold and know of their keys, which they do not share."""
    states = [State.of(table) for table in tables]
    parts = [(state.rows, state.seen, state.pending) for state in states]
    whole = [{}, {}, {}]
    for part in parts:
        for known, more in zip(whole, part, strict=True):
            assert not known.keys() & more.keys()
            known |= more
    return whole, {(state.now, state.epoch) for state in states}


@pytest.mark.pairs
@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(1, 2), (3, 2), (3, 1), (2, 4)])
def test_every_rank_gets_its_keys(kind, ranks, key_type):
    keys = some_keys(45, key_type)
    rows, states = rows_of(45, 3), rows_of(45, 3, seed=1)

    def made():
        return new_table(CPU, 3, key_type=key_type, **KINDS[kind])

    def fill(comm):
        table = made()
        owners = table.owner.owners(table.key_dtype.to_int64(np, keys), comm.size, table.key_dtype)
        mine = np.flatnonzero(owners == comm.rank)
        mine, new = mine[:-3], keys[mine[-3:]]  # there are more than that
        table.insert_or_assign(keys[mine], rows[mine])
        table.find_or_insert(keys[mine[:3]])
        table.find_or_insert(new)  # with admission they are only seen
        if comm.rank != 2:  # that rank has no state
            ensure_state(table.store, "m", 0.25)
            table.assign_state("m", keys[mine], states[mine])
        return table

    def load(comm):
        table = made()
        table.find_or_insert(keys[:1])  # it goes
        dtypes = tf.as_dtype(key_type), tf.float32
        parts = [saved_tensors(each, *dtypes) for each in filled]
        restore_tensors(table, part_of_rank(parts, table, comm.rank, comm.size))
        held = table.key_dtype.to_int64(np, table.export()[0])
        assert (table.owner.owners(held, comm.size, table.key_dtype) == comm.rank).all()
        return table

    filled = run_ranks(ranks[0], fill)
    loaded = run_ranks(ranks[1], load)
    expected, found = joined(filled), joined(loaded)
    assert found == expected
    assert len(expected[0][0]) + len(expected[0][2]) == 45
