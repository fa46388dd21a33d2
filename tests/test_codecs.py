"""Every format of checkpoints, from one number of ranks to another, with a key that two had.

Such a key does not come of training: each has one owner, and dumps and commits refuse it. But files
of other programs, of jobs whose owners changed and of older versions may have one. What it gives is
each format's promise to files that there are.
`tf.train.Checkpoint` is not here: it takes no other number of ranks.
"""

import logging
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from scripts.bench.common.row_steps import ensure_state
from sok_lite import dynamic_embedding as de
from sok_lite.backend import get_backend
from sok_lite.bridge.checkpoint import restore_tensors, saved_tensors
from sok_lite.bridge.stored import part_of_rank
from sok_lite.cli.main import main
from sok_lite.comm import SingleCommunicator, run_ranks
from sok_lite.engine.files import commits as commits_module
from sok_lite.engine.files import dump as dump_module
from sok_lite.engine.files.commits import Commits
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.foreign_keys import ForeignKeysError
from sok_lite.kv_variable import saved_files, saved_table
from sok_lite.kv_variable.saved_table import SavedTable
from sok_lite.kv_variable.saved_tensors import TRAIN
from sok_lite.kv_variable.share import Share
from tests.support.helpers import new_table

DIM, REPEATED = 3, 7
KEYS = np.arange(-20, 40)
CPU, ONE = get_backend("cpu"), SingleCommunicator()


def row_of(key, rank):
    return [1000.0 * (rank + 1) + key] * DIM


def fill(table, rank, size, is_repeated):
    """Gives a table the keys of a rank, and one that is not its own."""
    keys = KEYS[KEYS % size == rank]
    if is_repeated and REPEATED % size != rank:
        keys = np.append(keys, REPEATED)
    rows = np.array([row_of(key, rank) for key in keys.tolist()], np.float32)
    table.insert_or_assign(keys, rows)
    ensure_state(table.store, "m", 0.5)
    table.assign_state("m", keys, -rows)
    return table


def held(table):
    """{key: (row, state)}."""
    keys, rows = table.export()
    states = table.read_state("m", keys)
    return dict(zip(keys.tolist(), zip(rows.tolist(), states.tolist(), strict=True), strict=True))


def made():
    return new_table(CPU, DIM, name="t")


class Codec(NamedTuple):
    """A format.

    Attributes:
      through: (folder, from, to, is_repeated) -> the tables of `to` ranks, each of which takes what
        is its own of what `from` ranks have saved.
      counts: which rank's row a key has that several had; None: it is an error.
      refuses: whether nothing is saved where several ranks have a key.
    """

    through: object
    counts: str | None
    refuses: bool = False


def by_dump(folder, size, to, is_repeated):
    tables = [fill(made(), rank, size, is_repeated) for rank in range(size)]
    run_ranks(size, lambda comm: dump(folder, [tables[comm.rank]], comm))
    return loaded(folder, to)


def loaded(folder, to):
    tables = [made() for _ in range(to)]
    run_ranks(to, lambda comm: load(folder, [tables[comm.rank]], comm))
    return tables


def by_reshard(folder, size, to, is_repeated):
    by_dump(folder / "from", size, size, is_repeated)
    assert main(["reshard", str(folder / "from"), str(folder / "to"), "--ranks", str(to)]) == 0
    return loaded(folder / "to", to)


def by_merge(folder, size, to, is_repeated):
    paths = [str(folder / str(rank)) for rank in range(size)]
    for rank, path in enumerate(paths):
        dump(path, [fill(made(), rank, size, is_repeated)], ONE)
    if size == 1:  # one is merged with itself
        paths *= 2
    assert main(["merge", *paths, str(folder / "to"), "--ranks", str(to)]) == 0
    return loaded(folder / "to", to)


def by_commit(folder, size, to, is_repeated, where=None):
    tables = [fill(made(), rank, size, is_repeated) for rank in range(size)]
    commits = [Commits([table], where) for table in tables]
    run_ranks(size, lambda comm: commits[comm.rank].make(comm, b""))
    tables = [*tables, made()][:to]
    commits = [*commits, Commits(tables[-1:], where)][:to]
    run_ranks(to, lambda comm: commits[comm.rank].restore(comm))
    return tables


def by_commit_on_disk(folder, size, to, is_repeated):
    return by_commit(folder, size, to, is_repeated, str(folder / "commits"))


def by_keras_file(folder, size, to, is_repeated):
    parts = [
        saved_tensors(fill(made(), rank, size, is_repeated), tf.int64, tf.float32)
        for rank in range(size)
    ]
    tables = [made() for _ in range(to)]
    for rank, table in enumerate(tables):
        restore_tensors(table, part_of_rank(parts, table, rank, to))
    return tables


def by_tfra_files(folder, size, to, is_repeated):
    def variable(rank, size):
        saver = de.FileSystemSaver(proc_size=size, proc_rank=rank, save_path=folder)
        return de.Variable(dim=DIM, name="v", kv_creator=de.CuckooHashTableCreator(saver=saver))

    for rank in range(size):
        saved = variable(rank, size)
        fill(saved.rows.table, rank, size, is_repeated)
        path = tf.train.Checkpoint(it=saved).write(str(folder / "c"))
    variables = [variable(rank, to) for rank in range(to)]
    for each in variables:
        ensure_state(each.rows.table.store, "m", 0.5)
        tf.train.Checkpoint(it=each).read(path).assert_consumed()
    return [each.rows.table for each in variables]


def by_kv_saver(folder, size, to, is_repeated):
    options = {"init_capacity": 64, "evict_strategy": "kLfu", "enter_threshold": 1}

    def table():
        return new_table(CPU, DIM, "hybrid", name="v", **options)

    def rank_of(patch, rank, size):
        for module in (saved_files, saved_table):
            patch.setattr(module, "ranks", lambda: (rank, size))

    def path_of(rank):
        return str(folder / (f"c.rank-{rank}-of-{size}" if size > 1 else "c"))

    for rank in range(size):
        with pytest.MonkeyPatch.context() as patch:
            rank_of(patch, rank, size)
            saved = SavedTable(fill(table(), rank, size, is_repeated), "v")
            (arrays,) = saved.saved([Share()], TRAIN, is_full=True, is_logged=False)
        names = [f"{saved.prefix('v', Share())}-{name}" for name in arrays]
        values = [tf.constant(value) for value in arrays.values()]
        tf.raw_ops.SaveV2(
            prefix=path_of(rank),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=values,
        )
    tables = [table() for _ in range(to)]
    for rank, each in enumerate(tables):
        with pytest.MonkeyPatch.context() as patch:
            rank_of(patch, rank, to)
            SavedTable(each, "v").restore(path_of(0), "v", is_logged=False)
    return tables


CODECS = {
    "dump and load": Codec(by_dump, "first", True),
    "sok-lite reshard": Codec(by_reshard, "first", True),
    "sok-lite merge": Codec(by_merge, "last"),
    "elastic commits": Codec(by_commit, "first", True),
    "elastic commits on a disk": Codec(by_commit_on_disk, "first", True),
    "Keras' files": Codec(by_keras_file, None),
    "TFRA's files": Codec(by_tfra_files, "last"),
    "TFPlus' Saver": Codec(by_kv_saver, None),
}


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize(("size", "to"), [(1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", CODECS)
def test_every_rank_takes_its_own_and_one_row_of_a_repeated_key(
    tmp_path, caplog, monkeypatch, name, size, to, is_repeated
):
    codec = CODECS[name]
    if is_repeated and size == 1:
        pytest.skip("one rank has every key once")
    if is_repeated and codec.counts is None:
        with pytest.raises(ValueError, match=rf"is corrupt: its parts have {size - 1} keys in com"):
            codec.through(tmp_path, size, to, is_repeated)
        return
    if is_repeated and codec.refuses:
        with pytest.raises(ForeignKeysError, match=r"must have each key once.*key 7, of rank 1"):
            codec.through(tmp_path / "refused", size, to, is_repeated)
        for module in (dump_module, commits_module):  # files that older versions wrote
            monkeypatch.setattr(module, "refuse_keys_on_several_ranks", lambda *_: None)
    with caplog.at_level(logging.WARNING, "sok_lite"):
        tables = codec.through(tmp_path, size, to, is_repeated)
    owner = {key: key % size for key in KEYS.tolist()}
    if is_repeated:
        owner[REPEATED] = 0 if codec.counts == "first" else size - 1
    for rank, table in enumerate(tables):
        rows = {key: row_of(key, owner[key]) for key in owner if key % to == rank}
        negated = {key: (row, [-number for number in row]) for key, row in rows.items()}
        assert held(table) == negated
    says = f"{size - 1} keys more than once: of each the {codec.counts} one counts"
    # A merge is for keys of several, and says nothing.
    assert (says in caplog.text) == (is_repeated and name != "sok-lite merge")
