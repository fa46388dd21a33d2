"""Dumps in the background: what is written is what the tables held when the dump began."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from sok_lite.comm import run_ranks
from sok_lite.engine.files.dump import dump, dump_in_background
from sok_lite.engine.files.load import load
from tests.engine.files.test_faults import (
    ONE,
    read_back,
    table_of,
    tables,
    version_at,
    write,
)
from tests.engine.files.test_increments import contents, no_warning
from tests.support.failing_calls import FailingCalls
from tests.support.filled_tables import KINDS, all_of, filled, held
from tests.support.helpers import new_table, sized
from tests.support.static_parts import assert_equal, everything, part_of

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written to a file of the background's until the event is set."""
    event, write, main = threading.Event(), os.write, threading.current_thread()

    def waiting(number, data):
        if threading.current_thread() is not main:
            assert event.wait(300)
        return write(number, data)

    monkeypatch.setattr(os, "write", waiting)
    yield event
    event.set()


def test_a_load_of_the_newest_save_waits_for_one_that_is_written(backend, tmp_path, gate):
    table, _ = filled(backend, 9, name="t")
    gate.set()
    dump(tmp_path / "step-0000000001", [table], ONE)
    table.insert_or_assign(np.array([77]), backend.from_host(np.ones((1, 3), np.float32)))
    gate.clear()
    begun = dump_in_background(tmp_path / "step-0000000002", [table], ONE)
    threading.Timer(0.1, gate.set).start()
    other = new_table(backend, 3, name="t")
    load(tmp_path, [other], ONE)
    assert begun.done and held(other) == held(table)


@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_meanwhile_is_not_written(backend, tmp_path, gate, kind):
    n = sized(backend, 500, 33)
    table, oracle = filled(backend, n, name="t", **KINDS[kind])
    table.lookup([91, 92])
    part = part_of(backend, ONE, everything(11))
    expected = part_of(backend, ONE, everything(11))
    before = all_of(table)
    begun = dump_in_background(tmp_path, [table, part], ONE, {"step": 1}, chunk_bytes=256)
    assert not begun.done and begun.path == str(tmp_path)
    keys = list(oracle)
    table.assign_state("m", keys[:5], np.full((5, 3), 9, np.float32))
    table.insert_or_assign(keys[5:9], backend.from_host(np.full((4, 3), 9, np.float32)))
    table.erase(keys[9:12])
    table.find_or_insert(np.arange(10_000, 10_000 + n))
    table.clear()
    part.columns["value"][:] = 0
    gate.set()
    begun.wait()
    begun.wait()
    assert begun.done
    other, same = (
        new_table(backend, 3, name="t", **KINDS[kind]),
        part_of(backend, ONE, everything(11, seed=1)),
    )
    assert load(tmp_path, [other, same], ONE) == {"step": 1}
    assert all_of(other) == before
    assert {key: row for key, row in held(other).items() if key in oracle} == oracle
    assert_equal(same, expected)


@pytest.mark.parametrize("then", ["dump", "background", "load"])
def test_what_comes_next_in_the_folder_waits(tmp_path, gate, then):
    begun = dump_in_background(tmp_path, [table_of(1)], ONE)
    threading.Timer(0.1, gate.set).start()
    link = tmp_path.parent / f"link to {tmp_path.name}"
    link.symlink_to(tmp_path)
    if then == "load":
        assert version_at(link) == 1
    elif then == "dump":
        dump(link, [table_of(2)], ONE)
    else:
        dump_in_background(link, [table_of(2)], ONE).wait()
    assert begun.done
    begun.wait()
    assert version_at(tmp_path) == (1 if then == "load" else 2)
    assert len(list(tmp_path.glob("data-*"))) == 1


def test_a_failure_is_raised_by_who_waits_and_gives_the_copy_back(tmp_path):
    dump(tmp_path, [table_of(1)], ONE)
    table = table_of(2, n=50_000)
    with pytest.MonkeyPatch.context() as patch:
        FailingCalls(patch, 5, errno.ENOSPC)
        tracemalloc.start()
        try:
            begun = dump_in_background(tmp_path, [table], ONE, chunk_bytes=4096)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left") as failure:
                    begun.wait()
            held, most = tracemalloc.get_traced_memory()  # the copy is given back
        finally:
            tracemalloc.stop()
    assert failure.value is begun._failure and held < most / 4
    assert version_at(tmp_path) == 1 and len(list(tmp_path.glob("data-*"))) == 1
    with pytest.MonkeyPatch.context() as patch:
        FailingCalls(patch, 5, errno.ENOSPC)
        dump_in_background(tmp_path, [table_of(2)], ONE, chunk_bytes=64)._thread.join()
    with pytest.raises(OSError, match="No space left"):
        dump(tmp_path, [table_of(3)], ONE)  # nobody has heard of it before
    dump(tmp_path, [table_of(3)], ONE)
    assert version_at(tmp_path) == 3


@pytest.mark.parametrize("has_old", [True, False])
def test_without_a_further_thread_the_caller_writes(tmp_path, has_old):
    if has_old:
        dump(tmp_path, [table_of(1)], ONE)
    old = threading.stack_size(1 << 46)  # which no thread can have
    try:
        with pytest.raises(RuntimeError):
            threading.Thread().start()
        begun = dump_in_background(tmp_path, [table_of(2)], ONE)
    finally:
        threading.stack_size(old)
    assert begun.done and version_at(tmp_path) == 2
    begun.wait()
    dump(tmp_path, [table_of(3)], ONE)
    assert version_at(tmp_path) == 3


def test_a_dump_that_is_interrupted_before_it_starts_is_in_nobodys_way(tmp_path, monkeypatch):
    dump(tmp_path, [table_of(1)], ONE)

    def interrupt(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupt)
        dump_in_background(tmp_path, [table_of(2)], ONE)
    with pytest.raises(RuntimeError, match="was interrupted"):
        dump(tmp_path, [table_of(3)], ONE)
    assert version_at(tmp_path) == 1 and len(list(tmp_path.glob("data-*"))) == 1
    dump(tmp_path, [table_of(3)], ONE)
    assert version_at(tmp_path) == 3


def test_no_memory_for_the_copy_is_said_at_once(tmp_path, monkeypatch):
    dump(tmp_path, [table_of(1)], ONE)
    table = table_of(2)

    def none(*args):
        raise MemoryError("no memory")

    monkeypatch.setattr(table.store, "read", none)
    with pytest.raises(MemoryError, match="no memory"):
        dump_in_background(tmp_path, [table], ONE)
    assert len(list(tmp_path.glob("data-*"))) == 1
    dump_in_background(tmp_path, [table_of(3)], ONE).wait()
    assert version_at(tmp_path) == 3


# -------------------------------------------------------------------- ranks


def test_ranks_work_on_and_agree_when_they_wait(tmp_path):
    def program(comm):
        begun = dump_in_background(tmp_path, [table_of(1 + comm.rank)], comm, {"step": 1})
        for _ in range(50):
            comm.barrier("in between")
        assert not (tmp_path / "manifest.json").exists()  # not all have said so
        comm.barrier("all have looked")
        begun.wait()
        assert load(tmp_path, [table_of(0)], comm) == {"step": 1}
        again = dump_in_background(tmp_path, [table_of(5)], comm)
        begun.wait()  # it was over
        table = table_of(0)
        load(tmp_path, [table], comm)
        assert again.done
        return set(table.export()[1].ravel().tolist())

    assert run_ranks(2, program) == [{5}, {5}]


@pytest.mark.parametrize("ranks", [1, 2])
def test_increments_of_the_background_go_on_after_failures(tmp_path, gate, monkeypatch, ranks):
    made, is_open, refused = [tables() for _ in range(ranks)], os.open, []

    def refusing(path, flags, *args, **kwargs):
        is_refused = refused and flags & os.O_ACCMODE != os.O_RDONLY
        if str(path).endswith(f"u-{ranks - 1:05d}-of-{ranks:05d}.safetensors") and is_refused:
            raise OSError(errno.EACCES, "Permission denied", str(path))
        return is_open(path, flags, *args, **kwargs)

    def add(comm, version):
        write(made[comm.rank], version)
        before = [contents(table) for table in made[comm.rank]]
        with no_warning() if comm.rank == 0 else nullcontext():  # only one thread may set filters
            begun = dump_in_background(tmp_path, made[comm.rank], comm, incremental=True)
        write(made[comm.rank], version + 1)
        comm.barrier("nothing is written yet")
        gate.set()
        if refused:
            with pytest.raises(OSError, match="Permission denied"):
                begun.wait()
        else:
            begun.wait()
        return before

    monkeypatch.setattr(os, "open", refusing)
    there = []
    for version in range(1, 14, 2):
        gate.clear()
        refused[:] = [version] if version in (5, 9, 11) else []
        before = run_ranks(ranks, lambda comm: add(comm, version))  # noqa: B023
        if not refused:
            there.append((version, before))
        read = run_ranks(ranks, lambda comm: read_back(tmp_path, comm))
        assert {number for _, number in read} == {there[-1][0]}
        assert [[contents(table) for table in some] for some, _ in read] == there[-1][1]
        assert len(list(tmp_path.glob("data-*"))) == len(there)
    assert [version for version, _ in there] == [1, 3, 7, 13]


# -------------------------------------------------------------------- the end of the process

BEGINS = """
    import os, sys, time
    from functools import partial
    from threading import Thread
    from sok_lite.backend import get_backend
    from sok_lite.comm import run_ranks
    from sok_lite.comm.single import SingleCommunicator
    from sok_lite.engine.files.dump import dump_in_background
    from tests.engine.files.test_faults import table_of

    path, how = sys.argv[1:]
    write = os.write
    def slow(number, data):
        # "kill": it must not be done before the process is killed.
        time.sleep(600 if how == "kill" else 0.01)
        return write(number, data)
    os.write = slow
    if how == "ranks":
        kept = []
        def begin(comm):
            kept.append(comm)
            dump_in_background(path, [table_of(2)], comm)
        run_ranks(2, begin)
    else:
        arguments = path, [table_of(2, n=500)], SingleCommunicator()
        begin = partial(dump_in_background, *arguments, chunk_bytes=512)
        thread = Thread(target=begin, daemon=how == "daemon")
        thread.start()
        thread.join()
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "raise":
            raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["end", "daemon", "raise", "kill", "ranks"])
def test_the_end_of_the_process(tmp_path, how):
    dump(tmp_path, [table_of(1)], ONE)
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BEGINS), str(tmp_path), how],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == {"raise": 3, "kill": -9}.get(how, 0), ended.stderr
    if how in ("end", "daemon", "raise"):
        assert version_at(tmp_path, n=500) == 2 and ended.stderr == ""
    else:
        assert version_at(tmp_path) == 1
    if how == "ranks":
        assert ended.stderr.count("the ranks have not agreed") == 2
        assert str(tmp_path) in ended.stderr and "wait()" in ended.stderr


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path, gate):
    begun = dump_in_background(tmp_path, [table_of(1)], ONE)
    child = os.fork()
    if child == 0:
        try:
            begun.wait()
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gate.set()
    begun.wait()
    assert version_at(tmp_path) == 1
