"""Optimizer states by key: read, set for keys that have a row, made before the first update."""

import numpy as np
import pytest

from sok_lite.engine.initializer import Initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.update import make_states

DIM = 3


@pytest.fixture(params=["hbm", "hybrid"])
def table(request, backend):
    made = make_table(
        request.param, backend, DIM, initializer=Initializer("constant", 1.0), name="states"
    )
    made.find_or_insert(backend.from_host(np.arange(40)))
    make_states([made], [{"accumulator": (made.dim, 0.25)}], None)
    return made


def test_a_state_of_a_key_without_a_row_is_refused(table):
    backend = table.backend
    keys = backend.from_host(np.array([1, 50, 51, 50]))
    ones = backend.from_host(np.ones((4, DIM), np.float32))
    with pytest.raises(ValueError, match="cannot be set for 2 of 3 keys"):
        table.assign_state("accumulator", keys, ones)
    with pytest.raises(ValueError, match=r"shape \(4, 3\).*Received: shape \(4, 2\)"):
        table.assign_state("accumulator", keys, ones[:, :2])
    read = backend.to_host(table.read_state("accumulator", backend.from_host(np.arange(40))))
    np.testing.assert_array_equal(read, np.full((40, DIM), 0.25))


class Optimizer:
    pass


def test_states_of_several_tables_are_made_for_each_optimizer(backend):
    tables = [
        make_table("hbm", backend, DIM, initializer=Initializer("constant", 1.0), name=name)
        for name in "ab"
    ]
    owner, other = Optimizer(), Optimizer()
    kinds = [{"m": (DIM, 0.0), "v": (DIM, 0.0)}] * 2
    make_states(tables[1:], kinds[1:], owner)
    make_states(tables, kinds, other)
    its = ["m (2)", "v (2)"]
    assert [table.store.state_names for table in tables] == [["m", "v"], ["m", "v", *its]]
    make_states(tables, kinds, owner)
    assert [table.store.state_names for table in tables] == [["m", "v", *its]] * 2
