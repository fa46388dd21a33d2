"""Checkpoints at addresses: what is marked there is whole, whatever ends an upload."""

import errno
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack

import numpy as np
import pytest

from sok_lite.comm import run_ranks
from sok_lite.engine.files import manifest, store
from sok_lite.engine.files.dump import dump, dump_in_background
from sok_lite.engine.files.load import load
from sok_lite.engine.files.readonly import open_readonly
from sok_lite.engine.files.store import Store
from tests.engine.files.test_faults import CPU, ONE, table_of, version_at
from tests.support.helpers import new_table
from tests.support.object_stores import PACKAGES, s3_server, sftp_server
from tests.support.own_process import run_program

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.usefixtures("stores_here")


@pytest.fixture(scope="module", params=["memory", "s3", "sftp"])
def server(request, tmp_path_factory):
    """The address of a folder of a server, which serves the tests of this file."""
    lacking = [name for name in PACKAGES[request.param] if not importlib.util.find_spec(name)]
    if lacking:
        pytest.skip(f"{lacking[0]} is not installed")
    with ExitStack() as stack:
        if request.param == "memory":
            yield "memory://tests"
        elif request.param == "s3":
            yield stack.enter_context(s3_server())
        else:
            yield stack.enter_context(sftp_server(tmp_path_factory.mktemp("served")))


@pytest.fixture
def address(server):
    """An address where nothing is."""
    return f"{server}/{uuid.uuid4().hex}/c"


def files_at(address):
    """What is at an address, as fsspec sees it: the sizes of files by their names."""
    system, path = fsspec.url_to_fs(address, skip_instance_cache=True)
    start = f"/{path.lstrip('/')}/"
    found = system.find(path, detail=True).items()
    return {f"/{name.lstrip('/')}".removeprefix(start): about["size"] for name, about in found}


def data_at(address):
    return {name.split("/")[0] for name in files_at(address) if name != "manifest.json"}


KILLED = """
import os, signal, sys
import numpy as np
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.store import Store
from tests.engine.files.test_faults import ONE, table_of

address, number, calls = sys.argv[1], int(sys.argv[2]), []
where, name = Store, "_put"
if number < 0:  # in the middle of a file
    from paramiko import SFTPFile
    where, name, number = SFTPFile, "write", -number
original = getattr(where, name)

def counted(*args):
    calls.append(args)
    if len(calls) > number:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

setattr(where, name, counted)
dump(address, [table_of(2), table_of(2, "u", 20000)], ONE)
"""


def test_what_is_dumped_is_loaded(address):
    table = table_of(1)
    dump(address, [table], ONE, {"a": 1})
    first = data_at(address)
    assert len(first) == 1 and version_at(address) == 1
    table.insert_or_assign(np.arange(40), np.full((40, 2), 2, np.float32))
    begun = dump_in_background(address, [table], ONE, {"a": 2}, incremental=True)
    assert "lite" not in begun.path  # a password
    begun.wait()
    assert begun.done and data_at(address) > first and len(data_at(address)) == 2
    assert load(address, [new_table(CPU, 2, name="t")], ONE) == {"a": 2}
    assert version_at(address) == 2
    dump(address, [table_of(3)], ONE)  # what is replaced goes
    assert version_at(address) == 3 and len(data_at(address)) == 1
    assert not data_at(address) & first


@pytest.mark.parametrize("name", ["c/inside", "c/" + "a" * 300])
def test_a_dump_brings_nothing_of_an_address_below(name, stores_here):
    above = f"memory://{uuid.uuid4().hex}"
    for rows in (1, 2):
        dump(f"{above}/{name}", [table_of(rows)], ONE)
    # As by another machine since.
    at = f"{above}/{name}/manifest.json"
    fsspec.filesystem("memory").pipe(at, b"newer")
    there = files_at(above)
    dump(f"{above}/c", [table_of(3)], ONE)
    assert fsspec.filesystem("memory").cat(at) == b"newer"
    assert len(files_at(above)) == len(there) + 2 and version_at(f"{above}/c") == 3


def test_what_another_job_has_removed_is_not_marked(monkeypatch, stores_here):
    address = f"memory://{uuid.uuid4().hex}/c"
    original = Store.upload

    def slow(self, *args):
        original(self, *args)
        monkeypatch.setattr(Store, "upload", original)
        with monkeypatch.context() as patch:  # another machine's
            patch.setenv("SOK_LITE_STORES", str(stores_here / "other"))
            dump(address, [table_of(2)], ONE)

    monkeypatch.setattr(Store, "upload", slow)
    with pytest.raises(OSError, match=r"/c/data-.* must have .* bytes.* no such file\. Anoth"):
        dump(address, [table_of(1)], ONE)
    assert version_at(address) == 2


def test_a_rename_by_copies_begins_anew(monkeypatch, stores_here):
    monkeypatch.setattr(store, "PAUSES", [0.01])
    address, system = f"memory://{uuid.uuid4().hex}", fsspec.filesystem("memory")
    names = ["saved_model.pb", "variables/variables.index"]
    for name in names:
        system.pipe(f"{address}/2/{name}", b"x")
    copy, calls = type(system).copy, []

    def failing(self, *args, **kwargs):
        copy(self, *args, **kwargs)
        calls.append(args)
        if len(calls) == 1:
            raise ConnectionError("cut off")

    monkeypatch.setattr(type(system), "copy", failing)
    Store(address).move("2", "2.withdrawn", first=names[0])
    assert len(calls) == 2 and sorted(files_at(address)) == [f"2.withdrawn/{n}" for n in names]


def test_a_full_disk_where_copies_are_is_told(stores_here):
    address = f"memory://{uuid.uuid4().hex}/c"
    dump(address, [table_of(1)], ONE)
    open_readonly(address)
    (copy,) = (stores_here / "copies").rglob("*.safetensors")
    copy.unlink()
    part = copy.with_name(f"{copy.name}.part")
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space.*a copy of memory://.*SOK_LITE_STORES") as caught:
        load(address, [new_table(CPU, 2, name="t")], ONE)
    assert caught.value.errno == errno.ENOSPC and not os.path.lexists(part)


def test_what_is_read_stays_until_it_was(stores_here):
    address = f"memory://{uuid.uuid4().hex}/c"
    dump(address, [table_of(1)], ONE)

    def refreshing(extra):
        dump(address, [table_of(2)], ONE)
        assert open_readonly(address)["t"].lookup([3]).tolist() == [[2, 2]]

    table = new_table(CPU, 2, name="t")
    load(address, [table], ONE, accept=refreshing)
    assert np.unique(table.export()[1]).tolist() == [1]
    assert version_at(address) == 2
    dump(address, [table_of(3)], ONE)
    assert version_at(address) == 3
    assert len(list((stores_here / "copies").rglob("*.safetensors"))) == 1


def test_nobody_waits_for_a_refresh_of_a_store_that_is_away(monkeypatch, stores_here, caplog):
    address = f"memory://{uuid.uuid4().hex}/c"
    dump(address, [table_of(1)], ONE)
    read, calls, has_failed = open_readonly(address), [], threading.Event()

    def away(*args):
        calls.append(args)
        has_failed.set()
        raise ConnectionError("away")

    monkeypatch.setattr(store, "PAUSES", [300])
    monkeypatch.setattr(store, "_SECONDS_OF_TRIES", 1000)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", away)
    with read.follow(every=0.01):
        has_failed.wait()
        assert read["t"].lookup([3]).tolist() == [[1, 1]]  # the first, which makes the index
    assert len(calls) == 1 and not caplog.records


def test_a_load_waits_for_saves_below_its_address(stores_here):
    address = f"memory://{uuid.uuid4().hex}"
    begun = dump_in_background(f"{address}/step-0000000001", [table_of(1)], ONE)
    assert version_at(address) == 1 and begun.done


# The second file of two, the manifest, and of SFTP a piece of a file.
@pytest.mark.parametrize(
    ("server", "number"), [("s3", 1), ("s3", 2), ("sftp", -6), ("sftp", 2)], indirect=["server"]
)
def test_a_killed_upload_leaves_what_was_there(address, number):
    dump(address, [table_of(1), table_of(1, "u")], ONE)
    there = files_at(address)
    command = [sys.executable, "-c", KILLED, address, f"{number}"]
    assert subprocess.run(command, timeout=400).returncode == -signal.SIGKILL
    assert files_at(address).keys() >= there.keys()
    assert number == 1 or len(files_at(address)) > len(there)
    assert version_at(address) == version_at(address, "u") == 1
    dump(address, [table_of(3)], ONE)
    assert version_at(address) == 3 and len(files_at(address)) == 2


def test_a_reader_brings_what_is_new_alone(address, stores_here):
    table = table_of(1)
    with pytest.raises(FileNotFoundError, match="no manifest.json: there is nothing"):
        open_readonly(address)
    dump(address, [table], ONE)
    read = open_readonly(address)
    assert read["t"].lookup([3]).tolist() == [[1, 1]] and not read.refresh()
    assert read.published == pytest.approx(os.stat(read.path).st_mtime, abs=120)
    (before,) = (stores_here / "copies").rglob("*.safetensors")
    inode = before.stat().st_ino
    table.insert_or_assign(np.arange(3), np.full((3, 2), 2, np.float32))
    dump(address, [table], ONE, incremental=True)
    assert read.refresh() and read["t"].lookup([2, 3]).tolist() == [[2, 2], [1, 1]]
    assert before.stat().st_ino == inode
    dump(address, [table_of(3)], ONE)
    assert read.refresh() and read["t"].lookup([2]).tolist() == [[3, 3]]
    assert len(list((stores_here / "copies").rglob("*.safetensors"))) == 1


def test_other_numbers_of_ranks(stores_here):
    address = f"memory://{uuid.uuid4().hex}"

    def write(comm):
        table = new_table(CPU, 2, name="t")
        keys = np.arange(comm.rank, 40, comm.size)
        table.insert_or_assign(keys, np.stack([keys, keys], 1).astype(np.float32))
        dump_in_background(address, [table], comm).wait()
        table.insert_or_assign(keys[:1], np.full((1, 2), -1, np.float32))
        dump(address, [table], comm, incremental=True)

    def read(comm):
        table = new_table(CPU, 2, name="t")
        load(address, [table], comm)
        keys, rows = table.export()
        return dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))

    run_ranks(2, write)
    assert len(data_at(address)) == 2
    expected = {key: float(key) if key > 1 else -1.0 for key in range(40)}
    for size in (1, 2, 3):
        parts = run_ranks(size, read)
        assert all(key % size == rank for rank, part in enumerate(parts) for key in part)
        assert {key: row for part in parts for key, row in part.items()} == expected


def test_an_upload_goes_on_when_the_server_is_there_again(tmp_path, monkeypatch, stores_here):
    pytest.importorskip("asyncssh")
    monkeypatch.setattr(store, "PAUSES", [0.01] * 3)
    with sftp_server(tmp_path) as address:
        dump(f"{address}/c", [table_of(1)], ONE)
        with pytest.raises(PermissionError, match="Cannot read sftp://sok@.*Authentication"):
            dump(f"{address}/c".replace(":lite@", ":other@"), [table_of(1)], ONE)
    port = int(address.rpartition(":")[2].partition("/")[0])
    with pytest.raises(OSError, match="It was tried 4 times"):
        dump(f"{address}/c", [table_of(2)], ONE)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="It was tried once"):
        patch.setattr(store, "_SECONDS_OF_TRIES", 0)
        dump(f"{address}/c", [table_of(2)], ONE)
    with ExitStack() as stack:

        class Starting(logging.Handler):
            def emit(self, record):
                if "Trying again" in record.getMessage() and not self.is_started:
                    self.is_started = True
                    stack.enter_context(sftp_server(tmp_path, port))

        handler, logger = Starting(), logging.getLogger("sok_lite")
        handler.is_started = False
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        dump(f"{address}/c", [table_of(3)], ONE)
        assert handler.is_started and version_at(f"{address}/c") == 3


# Uploads when the interpreter ends, by a connection of its own.
PROGRAM = """
import threading
import numpy as np
from sok_lite.engine.files.dump import dump_in_background
from sok_lite.engine.files.store import Store
from tests.engine.files.test_faults import ONE, table_of

upload, ends = Store.upload, threading.Event()

def late(store, *args):
    ends.wait()
    store._opened, store._has_failed = None, True
    upload(store, *args)

Store.upload = late
dump_in_background(ADDRESS, [table_of(7)], ONE)
threading._register_atexit(ends.set)
"""


@pytest.mark.full_only("starts an interpreter")
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_a_program_ends_when_all_is_there(address):
    run_program(PROGRAM.replace("ADDRESS", repr(address)))
    assert version_at(address) == 7


def test_an_interrupt_waits_for_what_is_being_written(monkeypatch):
    place, over = Store("memory://tests/c"), []
    monkeypatch.setattr(place, "_class", type("Threaded", (), {"async_impl": True}))

    def write(name):
        if name == "a":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)  # with the wait it may take any time
            over.append(name)

    with pytest.raises(KeyboardInterrupt):
        place._for_each(["a", "b"], write)
    assert over == ["a"]


def test_messages_name_the_address(monkeypatch, stores_here, caplog, capsys):
    address, shown = f"MEMORY://me:secret@{uuid.uuid4().hex}/c", r"memory://me@[0-9a-f]+/c"
    begun = dump_in_background(address, [table_of(1)], ONE)
    begun.wait()
    assert re.fullmatch(shown, begun.path) and version_at(address) == 1
    with manifest.lock(Store(address).staging(0, 1)):
        with pytest.raises(BlockingIOError, match=f"The checkpoint at {shown} must have one"):
            dump(address, [table_of(2)], ONE)
    read, has_failed = open_readonly(address), threading.Event()
    monkeypatch.setattr(store, "PAUSES", [])
    monkeypatch.setattr(logging.getLogger("sok_lite"), "filter", lambda _: has_failed.set() or True)
    fsspec.filesystem("memory").rm(Store(address)._root, recursive=True)
    with read.follow(every=0.01):
        has_failed.wait()
    assert re.match(f"{shown} stays as it was", caplog.messages[0])


def test_a_folder_for_stores_that_cannot_be_made_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("SOK_LITE_STORES", f"{tmp_path}/file/inside")
    for call in (dump, load):
        with pytest.raises(OSError, match="Have SOK_LITE_STORES name one"):
            call("memory://tests/missing", [new_table(CPU, 2, name="t")], ONE)


def test_what_cannot_be_such_an_address_is_told(monkeypatch, stores_here):
    for package, missing, text in (
        ("gcsfs", "gs://bucket/c", r"`path` is an address of gs://.*object-store\]' gcsfs"),
        ("fsspec", "s3://bucket/c", r"Run: pip install 'sok_lite\[object-store\]' s3fs"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ValueError, match=text):
                dump(missing, [table_of(1)], ONE)
    with pytest.raises(ValueError, match=r"that fsspec knows.*'ram://c'"):
        load("ram://c", [table_of(1)], ONE)
    with pytest.raises(
        ValueError, match=r"without '\.' and '\.\.'\. Received: 'memory://a/\.\./c'"
    ):
        open_readonly("memory://a/../c")
    for name in ("run?", "lr=[1e-3]", "*/c"):
        with pytest.raises(
            ValueError, match=r"without '\*', '\?' and '\['\. Received: 'memory://g/"
        ):
            dump(f"memory://g/{name}", [table_of(1)], ONE)
    fsspec.filesystem("memory").pipe("/other/manifest.json", b"{}")
    with pytest.raises(FileExistsError, match=r"memory://other/manifest\.json is no manifest"):
        dump("memory://other", [table_of(1)], ONE)
    assert not stores_here.exists() or not list(stores_here.rglob("*.safetensors"))
