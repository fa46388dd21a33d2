"""What writes into a folder is there alone: of other processes, of threads, of what was forked."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump, dump_in_background
from sok_lite.engine.files.key_value_files import make_layout, write_shard
from sok_lite.engine.files.key_value_names import ShardPlace
from sok_lite.engine.files.load import load
from sok_lite.engine.files.lock import Lock
from sok_lite.engine.files.source import checkpoint_sources
from sok_lite.engine.files.source_writer import write_checkpoint
from tests.support.helpers import new_table

ONE = SingleCommunicator()
ROOT = Path(__file__).parents[3]
# Is in the middle of a dump until it is told to go on.
PROGRAM = """
import sys
from sok_lite.backend import get_backend
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from tests.support.helpers import new_table

def wait(*_):
    if not told:
        told.append(print("writing", flush=True))
        sys.stdin.readline()

told, table = [], new_table(get_backend("cpu"), 2, name="t")
table.find_or_insert([1, 2, 3])
dump(sys.argv[1], [table], SingleCommunicator(), report=wait)
"""


@pytest.fixture
def other(tmp_path):
    """A process that dumps three keys into tmp_path / "c"."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "c")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def table_of(keys):
    table = new_table(get_backend("cpu"), 2, name="t")
    table.find_or_insert(keys)
    return table


def keys_in(folder, comm=ONE):
    table = table_of([])
    load(folder, [table], comm)
    return sorted(table.export()[0].tolist())


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_second_process_is_refused_and_changes_nothing(other, tmp_path):
    folder, before = tmp_path / "c", files_in(tmp_path)
    dump(tmp_path / "source", [table_of([7])], ONE)
    before += files_in(tmp_path / "source")
    text = rf"another process writes \(pid {other.pid} on host {re.escape(socket.gethostname())}\)"
    writers = [
        lambda: dump(folder, [table_of([8])], ONE),
        lambda: dump(folder, [table_of([8])], ONE, incremental=True),
        lambda: dump_in_background(folder, [table_of([8])], ONE),
        lambda: write_checkpoint(folder, checkpoint_sources(tmp_path / "source")),
    ]
    for write in writers:
        with pytest.raises(BlockingIOError, match=text):
            write()
    shutil.rmtree(tmp_path / "source")

    def program(comm):  # all ranks alike
        with pytest.raises(OSError, match=rf"Rank 0: .* \(pid {other.pid} on host"):
            dump(folder, [table_of([8 + comm.rank])], comm)

    run_ranks(2, program)
    assert files_in(folder) == [name[2:] for name in before if name.startswith("c/")]
    other.communicate("go on\n")
    assert other.returncode == 0 and keys_in(folder) == [1, 2, 3]
    dump(folder, [table_of([8])], ONE)
    assert keys_in(folder) == [8] and len(list(folder.iterdir())) == 2


def test_what_a_killed_process_has_left_is_taken_over(other, tmp_path):
    other.send_signal(signal.SIGKILL)
    other.wait()
    dump(tmp_path / "c", [table_of([8])], ONE)
    assert keys_in(tmp_path / "c") == [8] and len(list((tmp_path / "c").iterdir())) == 2


def test_a_second_thread_is_refused(tmp_path):
    begun, over = threading.Event(), threading.Event()

    def wait(*_):
        begun.set()
        assert over.wait(300)

    arguments = (tmp_path, [table_of([1])], ONE)
    thread = threading.Thread(target=dump, args=arguments, kwargs={"report": wait})
    thread.start()
    assert begun.wait(300)
    try:
        with pytest.raises(BlockingIOError, match=rf"this process writes \(pid {os.getpid()} "):
            dump(tmp_path, [table_of([2])], ONE)
    finally:
        over.set()
        thread.join()
    assert keys_in(tmp_path) == [1]


def test_ranks_that_are_connected_anew_go_on(tmp_path):
    """A dump that the ranks before them have not waited for is in nobody's way."""
    begun = {}

    def program(comm):
        begun[comm.rank] = dump_in_background(tmp_path, [table_of([comm.rank])], comm)
        while not begun[comm.rank].done:
            time.sleep(0.01)

    run_ranks(2, program)
    dump(tmp_path, [table_of([7])], ONE)
    assert keys_in(tmp_path) == [7] and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(RuntimeError, match="was given up: other ranks"):
        begun[0].wait()
    assert keys_in(tmp_path) == [7]


def test_a_dump_that_fails_leaves_no_lock(tmp_path):
    def fail():
        raise OSError("no space")

    for function in (dump, dump_in_background):
        with pytest.raises(OSError, match="no space") as held:
            function(tmp_path, [table_of([1])], ONE, prepare=fail)
        assert list(tmp_path.iterdir()) == [] and held is not None
    dump(tmp_path, [table_of([2])], ONE)
    assert keys_in(tmp_path) == [2]


def test_a_forked_process_does_not_keep_it(tmp_path):
    reading, writing = os.pipe()
    lock = Lock(str(tmp_path / "lock"), "It")
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        lock.release()
        Lock(str(tmp_path / "lock"), "It").release()
        assert list(tmp_path.iterdir()) == []
    finally:
        os.write(writing, b"0")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_file_of_another_program_stays(tmp_path):
    (tmp_path / "manifest.json.lock").write_text("mine")
    with pytest.raises(FileExistsError, match="is no lock of sok_lite"):
        dump(tmp_path, [table_of([1])], ONE)
    assert (tmp_path / "manifest.json.lock").read_text() == "mine"
    assert files_in(tmp_path) == ["manifest.json.lock"]


def test_files_of_keys_and_values_have_one_writer(tmp_path):
    layout, inside = make_layout("v", "int64", "float32", 2), []

    def pieces(keys):
        rows = np.ones((len(keys), 2), np.float32)
        yield np.array(keys), rows
        if not inside:
            inside.append(True)
            with pytest.raises(BlockingIOError, match="v_mht_1of1_rank0_size1' must have one"):
                write_shard(str(tmp_path), layout, ShardPlace(), pieces([9]))

    for append in (False, True):
        inside.clear()
        count = write_shard(
            str(tmp_path), layout, ShardPlace(), pieces([1, 2]), append_to_file=append
        )
    assert count == 4 and len(list(tmp_path.iterdir())) == 3
    (keys,) = tmp_path.glob("*-keys")
    assert np.fromfile(keys, np.int64).tolist() == [1, 2, 1, 2]
