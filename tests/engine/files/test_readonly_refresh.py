"""Checkpoints that are refreshed while a trainer writes, against a dict of what was written."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.readonly import open_readonly
from sok_lite.engine.files.served_index import ServedIndex
from sok_lite.engine.owner import MOD, AlsoLocal
from tests.engine.files.test_readonly import as_given, assert_finds, flip
from tests.support.filled_tables import rows_of, some_keys
from tests.support.helpers import new_table

ONE = SingleCommunicator()
CPU = get_backend("cpu")
DIM = 5
ROOT = Path(__file__).resolve().parents[3]


def index_of(tables, name="t"):
    """The large index, whose object stays where increments alone are read."""
    return tables._checkpoint.snapshot.tables[name].index


@pytest.mark.pairs
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("logs", [True, False], ids=["removals are named", "not named"])
@pytest.mark.parametrize(
    ("key_type", "dtype"), [("int64", "float32"), ("uint64", "bfloat16"), ("int32", "int8")]
)
def test_a_refresh_gives_what_was_dumped(tmp_path, monkeypatch, key_type, dtype, logs, ranks):
    """Whole dumps and increments, with keys that come, change, go and come again."""
    everything, num_dumps, whole = some_keys(300, key_type), 12, (0, 7)
    made, add_newest = [], ServedIndex.add_newest  # of all keys
    monkeypatch.setattr(
        ServedIndex, "add_newest", lambda *args: made.append(args) or add_newest(*args)
    )
    written = [[{} for _ in range(ranks)] for _ in range(num_dumps)]

    def program(comm):
        random, rows, tables = np.random.default_rng(comm.rank), {}, None
        table = new_table(CPU, DIM, name="t", key_type=key_type, dtype=dtype)
        if logs:
            table.log_removals()
        engine_keys = table.key_dtype.to_int64(np, everything)
        mine = everything[table.owner.owners(engine_keys, comm.size) == comm.rank]
        for number in range(num_dumps):
            given = mine[random.random(mine.size) < (0.6 if number == 0 else 0.2)]
            its = rows_of(given.size, DIM, dtype, seed=number)
            table.insert_or_assign(given, its)
            rows.update(zip(given.tolist(), as_given(its, dtype), strict=True))
            there = np.array(sorted(rows), mine.dtype)
            gone = there[random.random(there.size) < 0.1 * (number % 3 > 0)]
            table.erase(gone)
            for key in gone.tolist():
                del rows[key]
            table.lookup([])
            written[number][comm.rank] = dict(rows)
            dump(tmp_path, [table], comm, chunk_bytes=64, incremental=number not in whole)
            if comm.rank == 0 and number != 4:  # then two increments come at once
                tables = check(tables, number)

    def check(tables, number):
        if tables is None:
            tables = open_readonly(tmp_path, check_rows=dtype == "float32")
            tables["t"].prepare()
        else:
            made.clear()
            assert tables.refresh()
            is_read_alone = logs or (number % 3 == 0 and number != 5)
            assert bool(made) == (number in whole or not is_read_alone)
        rows = {key: row for each in written[number] for key, row in each.items()}
        for opened in (tables, open_readonly(tmp_path)):
            assert_finds(opened["t"], everything, rows)
        assert not tables.refresh()
        return tables

    run_ranks(ranks, program)


def test_a_refresh_reads_what_is_new_and_no_more(tmp_path):
    """The rest is not as it was written, and nobody sees it."""
    keys, rows = np.arange(1, 400), rows_of(399, 4)
    table = new_table(CPU, 4, name="t")
    table.log_removals()
    table.insert_or_assign(keys, rows)
    table.lookup([])  # what was seen before did not change since
    dump(tmp_path, [table], ONE, chunk_bytes=64, incremental=True)
    tables = open_readonly(tmp_path)
    tables["t"].prepare()
    (base,) = tmp_path.glob("data-*/*.safetensors")
    table.insert_or_assign(keys[:9], rows[:9] + 1)
    table.erase(keys[20:30])
    dump(tmp_path, [table], ONE, chunk_bytes=64, incremental=True)
    flip(base, 1000)
    (shard,) = manifest.read(tmp_path).tables["t"].shards
    begin = 8 + int.from_bytes((tmp_path / shard.file).read_bytes()[:8], "little")
    assert shard.removed == 10 and shard.changed == 9
    for at in range(begin + 8 * 9 + 64, begin + 8 * shard.rows, 8):
        flip(tmp_path / shard.file, at)
    assert tables.refresh()
    expected = np.concatenate([rows[:9] + 1, rows[9:20], np.zeros((10, 4)), rows[30:]])
    np.testing.assert_array_equal(tables["t"].lookup(keys), expected)
    flip(tmp_path / shard.file, (tmp_path / shard.file).stat().st_size - 8)  # of the removed ones
    with pytest.raises(ValueError, match="'t', is corrupt: chunk"):
        open_readonly(tmp_path)["t"].prepare()


def test_a_key_on_several_ranks_is_that_of_the_lowest_after_a_refresh(tmp_path):
    """Increments say nothing of the row of another rank: all keys are read."""

    def program(comm):
        table = new_table(CPU, 2, name="t", owner=AlsoLocal(MOD))
        table.log_removals()
        tables = None
        # Which ranks write the key, and which have it then.
        steps = [((0,), (0,)), ((1,), (0, 1)), ((0, 1), (0, 1)), ((), (1,)), ((0,), (0, 1))]
        for number, (writing, has) in enumerate(steps):
            if comm.rank in writing:
                table.insert_or_assign([5, 10 + comm.rank], np.full((2, 2), comm.rank + 1, "f4"))
            elif comm.rank not in has:
                table.erase([5])
            table.lookup([])
            dump(tmp_path, [table], comm, incremental=number > 0)
            if comm.rank == 0:
                tables = tables or open_readonly(tmp_path)
                tables.refresh()
                for opened in (tables, open_readonly(tmp_path)):
                    found = opened["t"].lookup([5, 10, 11])[:, 0].tolist()
                    assert found == [has[0] + 1, 1, 2 * (number > 0)]

    run_ranks(2, program)


def test_what_cannot_be_opened_leaves_what_is_open(tmp_path):
    def write(dim=2, name="t", value=1.0, **options):
        table = new_table(CPU, dim, name=name, **options)
        table.insert_or_assign([1], np.full((1, dim), value, "f4"))
        dump(tmp_path, [table], ONE)

    write()
    tables = open_readonly(tmp_path)
    for other in ({"dim": 3}, {"name": "u"}, {"key_type": "uint64"}):
        write(**other)
        with pytest.raises(ValueError, match="must have table 't' as the one that is open"):
            tables.refresh()
        assert tables["t"].lookup(1).tolist() == [1, 1]
    write(value=2.0)
    (path,) = tmp_path.glob("data-*/*.safetensors")
    flip(path, 300)
    with pytest.raises(ValueError, match="is corrupt"):
        tables.refresh()
    os.unlink(tmp_path / "manifest.json")
    with pytest.raises(FileNotFoundError, match="has no manifest.json"):
        tables.refresh()
    assert tables["t"].lookup(1).tolist() == [1, 1]
    write(value=3.0)
    assert tables.refresh() and tables["t"].lookup(1).tolist() == [3, 3]


def test_what_is_looked_up_in_keeps_the_large_index_as_it_was(tmp_path):
    """While somebody has an older version, what is newer lies beside."""
    table = new_table(CPU, 2, name="t")

    def write(value, keys):
        table.insert_or_assign(keys, np.full((len(keys), 2), value, "f4"))
        table.lookup([])
        dump(tmp_path, [table], ONE, incremental=True)

    write(0, range(50))
    tables = open_readonly(tmp_path)
    tables["t"].prepare()
    checkpoint = tables._checkpoint
    held, checkpoint._compaction_timeout = [checkpoint.snapshot], 0.0
    index, keys = index_of(tables), np.arange(60)

    def held_rows():
        table = held[0].tables["t"]
        rows, found = np.empty((60, 2), "f4"), np.empty(60, bool)
        table.index.read(keys, table.delta, np.full(2, -1, "f4"), rows, found)
        return rows[:, 0].tolist()

    before = held_rows()
    assert before == [0] * 50 + [-1] * 10
    for value, some in ((1, [3, 55]), (2, [3, 4, 56])):
        write(value, some)
        assert tables.refresh() and held_rows() == before
        assert checkpoint.snapshot.tables["t"].delta is not None
    expected = [2 if key in (3, 4, 56) else 1 if key == 55 else 0 for key in range(50)]
    asked = tables["t"].lookup(keys, default=-1)[:, 0].tolist()
    assert asked[:50] == expected and asked[50:] == [-1] * 5 + [1, 2, -1, -1, -1]
    held.clear()
    assert not tables.refresh() and checkpoint.snapshot.tables["t"].delta is None
    assert tables["t"].lookup(keys, default=-1)[:, 0].tolist() == asked
    assert index_of(tables) is index


def test_many_new_keys_get_a_larger_index(tmp_path):
    table, rows = new_table(CPU, 2, name="t"), {}
    tables = None
    for number in range(30):
        table.lookup([])
        keys = np.arange(number * 40, number * 40 + 60)
        table.insert_or_assign(keys, np.full((60, 2), number, "f4"))
        rows |= {key: np.full(2, number, "f4") for key in keys.tolist()}
        dump(tmp_path, [table], ONE, incremental=True)
        tables = tables or open_readonly(tmp_path)
        tables.refresh()
        assert_finds(tables["t"], np.arange(-5, 1300), rows)


def test_files_stay_neither_open_nor_mapped_when_nobody_has_them(tmp_path):
    table = new_table(CPU, 2, name="t")

    def mapped():
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    for number in range(3):
        table.lookup([])
        table.insert_or_assign([number], np.ones((1, 2), "f4"))
        dump(tmp_path, [table], ONE, incremental=number == 1)
        if number == 0:
            before = len(os.listdir("/proc/self/fd"))
            tables = open_readonly(tmp_path)
        tables.refresh()
        assert tables["t"].lookup(number).tolist() == [1, 1]
        gc.collect()
        assert mapped() == (1, 2, 1)[number]
        assert len(os.listdir("/proc/self/fd")) == before
    following = tables.follow(every=0.001)
    dump(tmp_path, [new_table(CPU, 2, name="t")], ONE)
    while len(tables["t"]):  # until it has followed
        pass
    gone = weakref.ref(tables)
    del tables
    following._thread.join(60)
    gc.collect()
    assert not following._thread.is_alive() and gone() is None and mapped() == 0


@pytest.mark.parametrize("every", [0, -1, float("nan"), float("inf"), True, "10"])
def test_it_follows_every_so_many_seconds(tmp_path, every):
    dump(tmp_path, [new_table(CPU, 2, name="t")], ONE)
    error = TypeError if every is True or every == "10" else ValueError
    with pytest.raises(error, match="`every` must be"):
        open_readonly(tmp_path).follow(every=every)


TRAINER = """
import sys
import numpy as np
from sok_lite.backend import get_backend
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.files.manifest import is_whole
from tests.support.helpers import new_table

folder, comm = sys.argv[1], SingleCommunicator()
table = new_table(get_backend("cpu"), 8, name="t")
table.log_removals()
number = 0
if is_whole(folder):
    number = load(folder, [table], comm)["number"]
while True:
    number += 1
    table.lookup([])
    table.insert_or_assign(np.arange(500), np.full((500, 8), number, "f4"))
    if number % 2:
        table.erase(np.arange(400, 500))
    dump(folder, [table], comm, {"number": number}, incremental=number % 20 != 0)
    print(number, flush=True)
"""
FOLLOWER = """
import sys, time
import numpy as np
import sok_lite as sok

tables = sok.open_readonly(sys.argv[1])
tables.follow(every=0.001)
keys, newest = np.arange(500), 0
for line in sys.stdin:  # the number that it is to reach
    while newest < int(line):
        rows, is_there = tables["t"].find(keys, default=-1)
        number = int(rows[0, 0])
        assert newest <= number and (rows[:400] == number).all()
        assert (rows[400:] == (-1 if number % 2 else number)).all()
        assert is_there.tolist() == [True] * 400 + [number % 2 == 0] * 100
        newest = number
    print(newest, flush=True)
"""


def process(program, folder):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def reached(follower, number):
    """Has a follower go on until it serves a dump, and returns which it does."""
    follower.stdin.write(f"{number}\n")
    follower.stdin.flush()
    return int(follower.stdout.readline())


def killed(some):
    """Kills a process; returns the last number that it has said."""
    some.send_signal(signal.SIGKILL)
    said = some.stdout.read().split()
    some.wait()
    return int(said[-1]) if said else 0


def test_trainers_and_followers_may_be_killed(tmp_path):
    processes = []

    def begin(program):
        processes.append(process(program, tmp_path))
        return processes[-1]

    try:
        trainer = begin(TRAINER)
        said = int(trainer.stdout.readline())
        followers = [begin(FOLLOWER), begin(FOLLOWER)]
        said = max(reached(follower, said + 30) for follower in followers)
        killed(followers[0])
        said = reached(followers[1], said + 30)
        said = max(said, killed(trainer))  # somewhere in a dump
        assert reached(followers[1], said) in (said, said + 1)
        again = begin(FOLLOWER)
        assert reached(again, said) in (said, said + 1)
        begin(TRAINER)
        for follower in (followers[1], again):
            assert reached(follower, said + 30) >= said + 30
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
            each.communicate()
