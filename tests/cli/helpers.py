"""Checkpoints to try commands on, and what a real table makes of them."""

import contextlib
import io

import numpy as np

from sok_lite.backend import get_backend
from sok_lite.cli.main import main
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.optimizer_states import acquire_states
from tests.support.filled_tables import filled
from tests.support.helpers import new_table

CPU = get_backend("cpu")
ONE = SingleCommunicator()
NAMES = ("user", "it/em, ä\n")


def run(*arguments):
    """Runs a command in this process; returns its status, its output and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


def fine(*arguments):
    """Runs a command that must succeed, and returns what it wrote to stdout."""
    status, out, err = run(*arguments)
    assert (status, err) == (0, ""), (status, out, err)
    return out


def dumped(path, n=33, seed=0, names=NAMES, extra=None, **options):
    """A checkpoint of one rank; returns {name: {key: (row, state)}}."""
    made = {
        name: filled(CPU, n, seed=seed + i, name=name, **options) for i, name in enumerate(names)
    }
    dump(path, [table for table, _ in made.values()], ONE, extra, chunk_bytes=200)
    return {name: rows for name, (_, rows) in made.items()}


class Optimizer:
    """What states belong to."""


def optimized(path, keys, number, ranks=1):
    """A checkpoint of a table with the states of two optimizers, "m" and "v", and a free "s"."""

    def program(comm):
        table = new_table(CPU, 3)
        mine = keys[table.owner.owners(keys, comm.size) == comm.rank]
        table.insert_or_assign(mine, np.full((mine.size, 3), number, np.float32))
        optimizers = [Optimizer(), Optimizer()]
        # The second rank has them the other way round: the states are named by their kinds.
        kinds = [{"m": (3, 0.0), "v": (1, 0.5)}, {"acc": (3, 1.0)}][:: 1 - 2 * (comm.rank % 2)]
        for optimizer, kind in zip(optimizers, kinds, strict=True):
            (states,) = acquire_states([table], [kind], [optimizer])
            for name, column in states.items():
                rows = np.full((mine.size, kind[name][0]), number + len(name) / 4, np.float32)
                table.assign_state(column.name, mine, rows)
        dump(path, [table], comm, {"iterations": [number]})

    run_ranks(ranks, program)


def loaded(path, name, ranks=1, **options):
    """What ranks that load a checkpoint hold: {key: (row, state)}, and what came with it."""

    def program(comm):
        table = new_table(CPU, 3, name=name, **options)
        table.insert_or_assign([comm.rank], np.zeros((1, 3), table.row_dtype.storage))
        extra = load(path, [table], comm)
        keys, rows = table.export()
        kept = table.key_dtype.to_int64(np, keys)
        assert (table.owner.owners(kept, comm.size, table.key_dtype) == comm.rank).all()
        states = table.read_state("m", keys) if keys.size else np.empty((0, 3), np.float32)
        parts = zip(keys.tolist(), rows, states, strict=True)
        return {key: (row.tobytes(), state.tobytes()) for key, row, state in parts}, extra

    parts = run_ranks(ranks, program)
    joined = {key: row for held, _ in parts for key, row in held.items()}
    assert len(joined) == sum(len(held) for held, _ in parts)
    return joined, parts[0][1]
