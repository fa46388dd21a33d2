"""A dump that is killed, or fails anywhere, leaves a whole checkpoint: the old one or the new."""

import errno
import os
import random
import re
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.files.readonly import open_readonly
from sok_lite.engine.owner import MOD, AlsoLocal
from tests.conftest import QUICK
from tests.support.failing_calls import FailingCalls
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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("has_old", [True, False])
def test_any_call_may_fail(tmp_path, code, has_old):
    step = 6 if QUICK else 1
    number, num_failed = 1 - step, 0
    while True:
        path = tmp_path / str(number)
        if has_old:
            dump(path, [table_of(1), table_of(1, "u", **HYBRID)], ONE)
        tables = [table_of(2), table_of(2, "u", **HYBRID)]
        number += step
        with pytest.MonkeyPatch.context() as patch:
            calls = FailingCalls(patch, number, code)
            failed = False
            try:
                dump(path, tables, ONE, chunk_bytes=200)
            except OSError as error:
                assert error.errno == code
                failed = True
        num_failed += failed
        expected = {1, 2} if failed and has_old else {2}
        if (path / "manifest.json").exists():
            assert version_at(path) == version_at(path, "u") in expected
        else:
            assert failed and not has_old
        dump(path, tables, ONE)
        assert version_at(path) == 2
        assert len(list(path.glob("data-*"))) == 1
        if calls.count < number:
            break
    assert num_failed > 30 // step


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


def test_a_manifest_is_replaced_and_not_written_over(tmp_path):
    dump(tmp_path, [table_of(1)], ONE)
    old = (tmp_path / "manifest.json").read_bytes()
    os.link(tmp_path / "manifest.json", tmp_path / "old")
    dump(tmp_path, [table_of(2)], ONE)
    assert (tmp_path / "old").read_bytes() == old != (tmp_path / "manifest.json").read_bytes()


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


def test_a_file_system_that_is_full(tmp_path):
    dump(tmp_path, [table_of(1)], ONE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            dump(tmp_path, [table_of(2, n=200)], ONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert version_at(tmp_path) == 1
    assert len(os.listdir(tmp_path)) == 2  # the manifest and the files of the old checkpoint


def test_a_folder_in_which_nobody_may_write():
    for path in ("/proc/checkpoint", "/dev/null/checkpoint"):
        with pytest.raises(OSError, match="checkpoint"):
            dump(path, [table_of(1)], ONE)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_of_two_ranks_that_fails_fails_both(tmp_path, monkeypatch, failing):
    def write(comm, version):
        dump(tmp_path, [table_of(version)], comm)

    run_ranks(2, lambda comm: write(comm, 1))
    is_open = os.open

    def refusing(path, *args, **kwargs):
        if str(path).endswith(f"-{failing:05d}-of-00002.safetensors"):
            raise OSError(errno.ENOSPC, "No space left", str(path))
        return is_open(path, *args, **kwargs)

    def fail(comm):
        with pytest.raises(OSError, match="No space left") as caught:
            write(comm, 2)
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        (said,) = set(run_ranks(2, fail))
    assert said.startswith(f"Rank {failing}: ")
    assert len(list(tmp_path.glob("data-*"))) == 1

    def read(comm):
        table = new_table(CPU, 2, name="t")
        load(tmp_path, [table], comm)
        return set(table.export()[1].ravel().tolist())

    assert run_ranks(2, read) == [{1}, {1}]


# -------------------------------------------------------------------- kill -9

DUMPS = """
    import sys
    from pathlib import Path
    from sok_lite.comm.single import SingleCommunicator
    from sok_lite.engine.files.dump import dump_in_background
    from sok_lite.engine.files.dump import dump
    from tests.engine.files.test_faults import table_of

    version, in_background = int(sys.argv[2]), sys.argv[3] == "in the background"
    while True:
        version += 1
        tables = [table_of(version, n=2000), table_of(version, "u", n=2000)]
        if in_background:
            begun = dump_in_background(sys.argv[1], tables, SingleCommunicator(), chunk_bytes=512)
            tables[0].clear()
            begun.wait()
        else:
            dump(sys.argv[1], tables, SingleCommunicator(), chunk_bytes=512)
        print(version, flush=True)
"""


@pytest.mark.parametrize("how", ["at once", "in the background"])
def test_a_killed_dump_leaves_a_whole_checkpoint(tmp_path, how):
    rng = random.Random(0)
    last = 1
    dump(tmp_path, [table_of(last, n=2000), table_of(last, "u", n=2000)], ONE)
    num_rounds, num_killed = 0, 0
    # Some are to be killed among their files: when that is is up to chance, so it may go on longer.
    while num_rounds < (4 if QUICK else 20) or (num_killed == 0 and num_rounds < 500):
        num_rounds += 1
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DUMPS), str(tmp_path), str(last), how],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        said = int(child.stdout.readline())  # it is up to speed
        assert said == last + 1
        time.sleep(rng.random() * 0.05)
        child.kill()
        rest = child.communicate()[0].split()
        finished = int(rest[-1]) if rest else said
        last = version_at(tmp_path, n=2000)
        assert last == version_at(tmp_path, "u", n=2000)
        assert last in (finished, finished + 1)
        num_killed += len(list(tmp_path.glob("data-*"))) > 1
    assert num_killed
    dump(tmp_path, [table_of(0)], ONE)
    assert version_at(tmp_path) == 0
    assert len(list(tmp_path.glob("data-*"))) == 1


# -------------------------------------------------------------------- files that are not as written


@pytest.mark.parametrize("options", [{}, HYBRID])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_no_flipped_or_missing_byte_is_loaded(tmp_path, options, chunk_bytes):
    def made(version):
        table = table_of(version, n=5, **options)
        table.lookup([100, 101, 3])
        ensure_state(table.store, "m", 0.5)
        table.assign_state("m", [1, 2], np.ones((2, 2), np.float32))
        return table

    dump(tmp_path, [made(1)], ONE, chunk_bytes=chunk_bytes)
    other = made(2)
    before = State.of(other)
    (data,) = tmp_path.glob("data-*/*")
    for file in (tmp_path / "manifest.json", data):
        whole = file.read_bytes()
        step = 7 if QUICK else 1
        cuts = [whole[:i] for i in range(0, len(whole), 5 * step)]
        flips = [
            whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :]
            for i in range(0, len(whole), step)
        ]
        for bad in [*cuts, *flips, whole + b"\0", b"", bytes(len(whole))]:
            file.write_bytes(bad)
            with pytest.raises(ValueError, match="corrupt|must be a") as caught:
                load(tmp_path, [other], ONE)
            assert file.name in str(caught.value)
            if file == data:
                assert "table 't'" in str(caught.value) and "chunk" in str(caught.value)
        file.write_bytes(whole)
    assert State.of(other) == before
    data.unlink()
    with pytest.raises(FileNotFoundError, match=r"t-00000-of-00001\.safetensors"):
        load(tmp_path, [other], ONE)
    assert State.of(other) == before
