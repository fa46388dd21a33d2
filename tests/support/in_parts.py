"""A checkpoint whose rows are in several files: a whole dump and three increments."""

import numpy as np

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from tests.support.filled_tables import rows_of, some_keys
from tests.support.helpers import new_table


def dump_in_parts(path, ranks=1, dim=3, chunk_bytes=16, at_once=None, **options):
    """Dumps a table, `at_once` also in one file; returns all keys there ever were, {key: row}."""
    keys = some_keys(61)

    def program(comm):
        table = new_table(get_backend("cpu"), dim, **options)
        mine = keys[table.owner.owners(keys, comm.size) == comm.rank]
        rows = {}

        def give(some, seed):
            given = rows_of(some.size, dim, seed=seed)
            for _ in range(2):  # of two sightings one is not enough where they count
                table.insert_or_assign(some, given)
            rows.update(zip(some.tolist(), given, strict=True))

        def erase(some):
            table.erase(some)
            for key in some.tolist():
                del rows[key]

        def write():
            table.lookup([])
            dump(path, [table], comm, {"step": 4}, chunk_bytes, incremental=True)

        give(mine[3:], 0)
        write()
        ensure_state(table.store, "m", 0.25)
        table.assign_state("m", mine[7:10], np.full((3, dim), 7, np.float32))
        give(mine[5:9], 1)
        erase(mine[9:12])
        write()
        if comm.rank == 0:
            give(mine[:3], 2)  # other ranks have an increment without rows
            give(mine[10:11], 3)  # which was erased
            erase(mine[8:9])
        write()
        give(mine[6:7], 4)
        write()
        if at_once is not None:
            dump(at_once, [table], comm, {"step": 4})
        return rows

    rows = {key: row for each in run_ranks(ranks, program) for key, row in each.items()}
    (facts,) = manifest.read(path).tables.values()
    assert all(len(shard.before) == 3 for shard in facts.shards)
    return keys, rows
