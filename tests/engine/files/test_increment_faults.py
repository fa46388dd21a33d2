"""An increment that is killed, or fails anywhere, leaves all that was there before it."""

import errno
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.owner import MOD, AlsoLocal
from tests.conftest import QUICK
from tests.engine.files.test_faults import HYBRID
from tests.engine.files.test_increments import contents, no_warning
from tests.support.failing_calls import FailingCalls
from tests.support.helpers import new_table
from tests.support.table_state import State

ONE = SingleCommunicator()
CPU = get_backend("cpu")
KINDS = {"t": {}, "u": HYBRID}
# Rows have the number of the version in which they were last written: those of key k every k + 1.
NUM_KEYS = 40


def tables():
    """One of each kind. Every rank may have all of their keys."""
    owner = AlsoLocal(MOD)
    made = [new_table(CPU, 2, name=name, owner=owner, **its) for name, its in KINDS.items()]
    for table in made:
        for _ in range(2):  # of two sightings one is not enough
            table.lookup(np.arange(NUM_KEYS))
    return made


def write(some, version):
    keys = np.array([key for key in range(NUM_KEYS) if version % (key + 1) == 0])
    for table in some:
        table.insert_or_assign(keys, np.full((len(keys), 2), version, np.float32))
        table.erase([1000 + version - 1])
        for _ in range(2):
            table.lookup([1000 + version])


def read_back(path, comm=ONE):
    """The tables of a checkpoint and their version, of which all of their rows must be."""
    read = [new_table(CPU, 2, name=name, **options) for name, options in KINDS.items()]
    load(path, read, comm)
    for table in read:
        keys, rows = table.export()
        version = int(keys[-1]) - 1000
        np.testing.assert_array_equal(keys, [*range(NUM_KEYS), 1000 + version])
        expected = [version - version % (key + 1) for key in range(NUM_KEYS)]
        written = np.array(expected) > 0  # the others are as a lookup made them
        np.testing.assert_array_equal(rows[:NUM_KEYS, 0][written], np.array(expected)[written])
    return read, version


def test_any_call_may_fail(tmp_path):
    step = 6 if QUICK else 1
    number, num_failed = 1 - step, 0
    while True:
        number += step
        path, some = tmp_path / str(number), tables()
        for version in (1, 2):
            write(some, version)
            dump(path, some, ONE, incremental=True)
        write(some, 3)
        failed = False
        with pytest.MonkeyPatch.context() as patch:
            calls = FailingCalls(patch, number, errno.ENOSPC)
            try:
                with no_warning():
                    dump(path, some, ONE, chunk_bytes=200, incremental=True)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failed = True
            except RuntimeWarning:  # the manifest could not be read: all was dumped
                failed = calls.count < number
        num_failed += failed
        _, version = read_back(path)
        assert version in ({2, 3} if failed else {3})
        write(some, 4)
        if failed:  # the next one goes on from what is there
            with no_warning():
                dump(path, some, ONE, incremental=True)
            assert len(list(path.glob("data-*"))) == version + 1
        else:
            dump(path, some, ONE, incremental=True)
        read, version = read_back(path)
        assert version == 4
        assert [contents(table) for table in read] == [contents(table) for table in some]
        if calls.count < number:
            break
    assert num_failed > 30 // step


@pytest.mark.parametrize("failing", [0, 1])
def test_one_of_two_ranks_that_fails_fails_both(tmp_path, monkeypatch, failing):
    is_open = os.open

    def refusing(path, *args, **kwargs):
        if str(path).endswith(f"u-{failing:05d}-of-00002.safetensors"):
            raise OSError(errno.ENOSPC, "No space left", str(path))
        return is_open(path, *args, **kwargs)

    made = [tables(), tables()]

    def add(comm, version):
        write(made[comm.rank], version)
        dump(tmp_path, made[comm.rank], comm, incremental=True)

    def fail(comm):
        with pytest.raises(OSError, match=f"Rank {failing}: .*No space left"):
            add(comm, 2)

    run_ranks(2, lambda comm: add(comm, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        run_ranks(2, fail)
    assert len(list(tmp_path.glob("data-*"))) == 1
    # No rank keeps to its own keys here: each reads the file that it wrote.
    assert run_ranks(2, lambda comm: read_back(tmp_path, comm)[1]) == [1, 1]
    with no_warning():
        run_ranks(2, lambda comm: add(comm, 3))
    assert len(list(tmp_path.glob("data-*"))) == 2


# -------------------------------------------------------------------- kill -9

DUMPS = """
    import sys
    from pathlib import Path
    from sok_lite.comm.single import SingleCommunicator
    from sok_lite.engine.files.dump import dump
    from tests.engine.files.test_increment_faults import read_back, write

    some, version = read_back(sys.argv[1])
    while True:
        version += 1
        write(some, version)
        full = version % 10 == 0
        dump(sys.argv[1], some, SingleCommunicator(), chunk_bytes=64, incremental=not full)
        print(version, flush=True)
"""


def test_a_killed_increment_leaves_a_whole_checkpoint(tmp_path):
    rng, some = random.Random(0), tables()
    write(some, 1)
    dump(tmp_path, some, ONE)
    last, num_rounds, num_killed = 1, 0, 0
    # Some are to be killed among their files: when that is is up to chance, so it may go on longer.
    while num_rounds < (4 if QUICK else 20) or (num_killed == 0 and num_rounds < 500):
        num_rounds += 1
        child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(DUMPS), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        said = int(child.stdout.readline())  # it is up to speed, and went on from what was there
        assert said == last + 1
        time.sleep(rng.random() * 0.05)
        child.kill()
        rest = child.communicate()[0].split()
        finished = int(rest[-1]) if rest else said
        _, last = read_back(tmp_path)
        assert last in (finished, finished + 1)
        num_folders = last % 10 + 1 if last >= 10 else last
        num_killed += len(list(tmp_path.glob("data-*"))) > num_folders
    assert num_killed


# -------------------------------------------------------------------- files that are not as written


def test_no_flipped_or_missing_byte_is_loaded(tmp_path):
    some = tables()
    for version in (1, 2, 3):
        write(some, version)
        dump(tmp_path, some, ONE, chunk_bytes=64, incremental=True)
    expected = [contents(table) for table in some]
    files = [tmp_path / "manifest.json", *tmp_path.glob("data-*/*")]
    assert len(files) == 7
    rng, num_refused = random.Random(0), 0

    def refuses(file, missing=False):
        other = tables()
        before = [State.of(table) for table in other]
        try:
            load(tmp_path, other, ONE)
        except (FileNotFoundError, ValueError) as error:
            assert isinstance(error, FileNotFoundError) == missing
            assert file.name in str(error)
            assert missing or "corrupt" in str(error) or "must be a" in str(error)
            assert [State.of(table) for table in other] == before
            return True
        # What was replaced since is not read.
        assert [contents(table) for table in other] == expected
        return False

    for file in files:
        whole = file.read_bytes()
        places = [rng.randrange(len(whole)) for _ in range(10 if QUICK else 100)]
        for i in places:
            file.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
            num_refused += refuses(file)
            file.write_bytes(whole[:i])
            assert refuses(file)
        file.write_bytes(whole + b"\0")
        assert refuses(file)
        file.unlink()
        assert refuses(file, missing=True)
        file.write_bytes(whole)
    assert num_refused > len(files) * len(places) / 2
