"""A dump that is killed, or fails anywhere, leaves a whole checkpoint: the old one or the new."""

import errno
import itertools
import os
import random
import re
import subprocess
import sys
import traceback
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump, dump_in_background
from sok_lite.engine.files.load import load
from sok_lite.engine.files.readonly import open_readonly
from sok_lite.engine.owner import MOD, AlsoLocal
from tests.conftest import QUICK
from tests.engine.files.test_increments import contents, no_warning
from tests.support.failing_calls import CALLS, FailingCalls, is_reading
from tests.support.helpers import new_table
from tests.support.table_state import State

ONE = SingleCommunicator()
HYBRID = {
    "var_type": "hybrid",
    "init_capacity": 16,
    "max_capacity": 256,
    "evict_strategy": "kLfu",
    "enter_threshold": 2,
}
CPU = get_backend("cpu")


def table_of(version, name="t", n=40, **options):
    """A table whose rows say of which version they are. Every rank may have all of its keys."""
    table = new_table(CPU, 2, name=name, owner=AlsoLocal(MOD), **options)
    table.insert_or_assign(np.arange(n), np.full((n, 2), version, np.float32))
    return table


def version_at(path, name="t", n=40):
    """The version of a table in a checkpoint, all of whose rows must be of the same."""
    table = new_table(CPU, 2, name=name)
    load(path, [table], ONE)
    keys, rows = table.export()
    np.testing.assert_array_equal(keys, np.arange(n))
    (version,) = np.unique(rows)
    return int(version)


# -------------------------------------------------------------------- calls that fail


class FullDisk:
    """Lets no file of a name have more than so many bytes, as a full disk does."""

    def __init__(self, monkeypatch, name, room):
        self._name, self._room = name, room
        for call in ("write", "pwrite"):
            monkeypatch.setattr(os, call, self._limited(getattr(os, call)))

    def _limited(self, call):
        def write(number, data, *at):
            if self._name in os.path.basename(os.readlink(f"/proc/self/fd/{number}")):
                data = bytes(data)[: self._room - os.fstat(number).st_size]
                if not data:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(number, data, *at)

        return write


@pytest.mark.parametrize(
    "name, room, told",
    [
        ("u-0", 4, r"a file of table 'u' needs ([\d,]+) bytes; 4 are .*; all .* need ([\d,]+)"),
        ("manifest.json.tmp", 4, r"the manifest needs ([\d,]+) bytes; 4 are written"),
        ("manifest.json.lock", 0, r"a lock needs ([\d,]+) bytes; 0 are written"),
    ],
)
def test_a_full_disk_is_told_with_file_table_and_bytes(tmp_path, name, room, told):
    tables, whole = [table_of(1), table_of(1, "u")], tmp_path / "whole"
    dump(whole, tables, ONE)
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, name, room)
        with pytest.raises(OSError, match="No space left on device: ") as raised:
            dump(tmp_path / "c", tables, ONE)
    error = raised.value
    assert error.errno == errno.ENOSPC and name in error.filename
    found = re.search(f"{told}; [\\d,]+ bytes are free: '/", str(error))
    assert found, str(error)
    needed, *of_all = (int(number.replace(",", "")) for number in found.groups())
    if name == "u-0":
        (size,) = (path.stat().st_size for path in whole.glob("**/u-0*"))
        assert needed == size and 2 * size > of_all[0] > size
    dump(tmp_path / "c", tables, ONE)  # no lock was left
    assert version_at(tmp_path / "c") == 1


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_place_of_the_manifest_is_not_followed(tmp_path, link):
    """Whoever may write to the folder could else have any file of the program's user replaced."""
    other, folder = tmp_path / "other", tmp_path / "c"
    other.write_text("precious")
    folder.mkdir()
    link(other, folder / "manifest.json.tmp")
    dump(folder, [table_of(1)], ONE)
    assert other.read_text() == "precious"
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["data", "manifest.json"]


def place_pipe(path):
    os.mkfifo(path)


def place_device(path):
    os.symlink("/dev/zero", path)


@pytest.mark.parametrize("place", [place_pipe, place_device])
def test_what_may_have_no_end_is_not_read(tmp_path, place):
    dump(tmp_path, [table_of(1)], ONE)
    (data,) = tmp_path.glob("data-*/*.safetensors")
    for path in (data, tmp_path / "manifest.json"):
        path.unlink()
        place(path)
        for read in (version_at, open_readonly):
            with pytest.raises(OSError, match="Not a regular file"):
                read(tmp_path)
    with pytest.raises(OSError, match="Not a regular file"):
        dump(tmp_path, [table_of(2)], ONE)


def test_files_are_on_the_disk_before_the_manifest_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(number):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    def noted_replace(source, target):
        done.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    dump(tmp_path, [table_of(1)], ONE)
    (data,) = tmp_path.glob("data-*")
    file = "t-00000-of-00001.safetensors"
    assert done == [file, data.name, "manifest.json.tmp", "replace", tmp_path.name]


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: max(1, len(data) // 2)]))
    dump(tmp_path, [table_of(3)], ONE)
    assert version_at(tmp_path) == 3


def test_a_folder_in_which_nobody_may_write():
    for path in ("/proc/checkpoint", "/dev/null/checkpoint"):
        with pytest.raises(OSError, match="checkpoint"):
            dump(path, [table_of(1)], ONE)


# -------------------------------------------------------------------- in every way to write

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


def begin_and_wait(*arguments, **options):
    dump_in_background(*arguments, **options).wait()


WAYS = {
    "at once": dump,
    "in the background": begin_and_wait,
    "as an increment": partial(dump, incremental=True),
}


def data_in(path):
    return len(list(path.glob("data-*")))


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_any_call_may_fail(tmp_path, way, has_old):
    step, num_failed = 7 if QUICK else 3, 0
    for number in itertools.count(1, step):
        path, some, code = tmp_path / str(number), tables(), (errno.ENOSPC, errno.EIO)[number % 2]
        for version in (1, 2):
            write(some, version)
            if has_old:
                dump(path, some, ONE, incremental=True)
        write(some, 3)
        failed = False
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where no manifest is found, all is dumped
            calls = FailingCalls(patch, number, code)
            try:
                WAYS[way](path, some, ONE, chunk_bytes=200)
            except OSError as error:
                assert error.errno == code
                failed = True
        num_failed += failed
        version = 0
        if (path / "manifest.json").exists():
            _, version = read_back(path)
            assert version in ({2, 3} if failed and has_old else {3})
        else:
            assert failed and not has_old
        write(some, 4)
        with no_warning() if version or way != "as an increment" else nullcontext():
            WAYS[way](path, some, ONE)  # an increment goes on from what is there
        assert data_in(path) >= (version + 1 if way == "as an increment" and has_old else 1)
        assert way == "as an increment" or data_in(path) == 1
        read, version = read_back(path)
        assert version == 4
        assert [contents(table) for table in read] == [contents(table) for table in some]
        if calls.count < number:
            break
    assert num_failed > 15 // step


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_one_of_two_ranks_that_fails_fails_both(tmp_path, monkeypatch, way, failing):
    is_open, made = os.open, [tables(), tables()]

    def refusing(path, *args, **kwargs):
        if str(path).endswith(f"u-{failing:05d}-of-00002.safetensors"):
            raise OSError(errno.ENOSPC, "No space left", str(path))
        return is_open(path, *args, **kwargs)

    def add(comm, version):
        write(made[comm.rank], version)
        WAYS[way](tmp_path, made[comm.rank], comm)

    def fail(comm):
        with pytest.raises(OSError, match=f"^Rank {failing}: .*No space left") as caught:
            add(comm, 2)
        return str(caught.value)

    run_ranks(2, lambda comm: add(comm, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        assert len(set(run_ranks(2, fail))) == 1
    assert data_in(tmp_path) == 1
    # No rank keeps to its own keys here: each reads the file that it wrote.
    assert run_ranks(2, lambda comm: read_back(tmp_path, comm)[1]) == [1, 1]
    with no_warning():
        run_ranks(2, lambda comm: add(comm, 3))
    assert data_in(tmp_path) == (2 if way == "as an increment" else 1)


def run_forked(call, *arguments):
    """The status of a child that calls a function, where no kernel has started threads yet."""
    child, status = os.fork(), 99
    if child == 0:
        try:
            status = call(*arguments, SingleCommunicator())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def begin(path, comm):
    some = tables()
    write(some, 1)
    dump(path, some, comm)
    return 0


def dump_and_die(path, way, number, comm):
    """Kills itself before the N-th call of the operating system."""
    (some, version), calls = read_back(path, comm), []

    def counted(call):
        def wrapped(*args, **kwargs):
            calls.extend([call] * (not is_reading(call, args)))
            if len(calls) == number:
                os.kill(os.getpid(), 9)
            return call(*args, **kwargs)

        return wrapped

    write(some, version + 1)
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    WAYS[way](path, some, comm, chunk_bytes=200)
    return 0


def kill_everywhere(folder, way, step):
    path, last, has_both = Path(folder), 1, 0
    assert run_forked(begin, path) == 0
    for number in itertools.count(2, int(step)):
        ended = run_forked(dump_and_die, path, way, number)
        before, last = last, run_forked(lambda comm: read_back(path, comm)[1])
        assert ended in (0, -9) and last - before in ((0, 1) if ended else (1,))
        num_folders = last if way == "as an increment" else 1
        has_both += data_in(path) > num_folders
        if not ended:
            break
    assert has_both and data_in(path) == num_folders


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_dump_leaves_a_whole_checkpoint(tmp_path, way):
    program = "import sys; from tests.engine.files.test_faults import kill_everywhere as k; "
    command = [sys.executable, "-W", "error", "-c", program + "k(*sys.argv[1:])"]
    command += [str(tmp_path), way, "5" if QUICK else "2"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_no_flipped_or_missing_byte_is_loaded(tmp_path):
    some = tables()
    ensure_state(some[0].store, "m", 0.5)
    for version in (1, 2, 3):
        write(some, version)
        dump(tmp_path, some, ONE, chunk_bytes=64, incremental=True)
    expected, other = [contents(table) for table in some], tables()
    files = [tmp_path / "manifest.json", *tmp_path.glob("data-*/*")]
    assert len(files) == 7
    rng, num_refused, before = random.Random(0), 0, [State.of(table) for table in other]

    def refuses(file, missing=False):
        try:
            load(tmp_path, other, ONE)
        except (FileNotFoundError, ValueError) as error:
            text = str(error)
            assert isinstance(error, FileNotFoundError) == missing and file.name in text
            assert missing or "corrupt" in text or "must be a" in text
            assert missing or file is files[0] or f"table '{file.name[0]}'" in text
            assert [State.of(table) for table in other] == before
            return True
        # What was replaced since is not read.
        assert [contents(table) for table in other] == expected
        other[:] = tables()
        return False

    for file in files:
        whole = file.read_bytes()
        places = [rng.randrange(len(whole)) for _ in range(4 if QUICK else 20)]
        for i in places:
            file.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
            num_refused += refuses(file)
            file.write_bytes(whole[:i])
            assert refuses(file)
        for bad in (whole + b"\0", b"", bytes(len(whole))):
            file.write_bytes(bad)
            assert refuses(file)
        file.unlink()
        assert refuses(file, missing=True)
        file.write_bytes(whole)
    assert num_refused > len(files) * len(places) / 2
