"""Static tables whose rows are arrays of NumPy, as checkpoints take them."""

from functools import partial

import numpy as np

from sok_lite.engine.files.static_part import StaticPart
from sok_lite.engine.owner import MOD
from sok_lite.engine.static_table import StaticTable

DIM = 3


class Rows(StaticPart):
    """Rows in NumPy's arrays."""

    def __init__(self, table, columns):
        super().__init__(table, tuple(name for name in columns if name != "value") or None)
        self.columns = columns

    def row_reader(self):
        columns = {name: rows.copy() for name, rows in self.columns.items()}
        return lambda column, first, last: columns[column][first:last]

    def assignment(self, columns):
        return partial(self.columns.update, columns)


def everything(n, states=("m", "v"), seed=0):
    """The rows of all ranks."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(n, DIM)).astype(np.float32) for name in ("value", *states)}


def part_of(backend, comm, columns, owner=MOD, name="s"):
    """This rank's rows of what `everything` gave."""
    n = len(columns["value"])
    table = StaticTable(backend, n, DIM, name=name, owner=owner)
    if owner is MOD:
        mine = slice(comm.rank, None, comm.size)
    else:
        mine = slice(0, n if comm.rank == owner.only_rank else 0)
    return Rows(table, {name: rows[mine] for name, rows in columns.items()})


def assert_equal(part, expected):
    assert part.columns.keys() == expected.columns.keys()
    for name, rows in expected.columns.items():
        np.testing.assert_array_equal(part.columns[name], rows)
