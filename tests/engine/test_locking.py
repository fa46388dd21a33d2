"""Who may use a table when: threads, and children that are forked while others use it."""

import contextlib
import ctypes
import gc
import os
import threading

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.table.locking import (
    mutate,
    table_versions,
    with_lock,
    with_locks,
    with_locks_since,
)
from sok_lite.engine.update_rows import Update
from tests.support.helpers import new_table
from tests.support.own_process import in_child, run_limited
from tests.support.steps import apply_updates
from tests.support.table_audit import assert_lock_is_free, audit, audit_insides
from tests.support.tripwire import AtEveryLine

BACKEND = get_backend("cpu")  # a forked child has no GPU


@contextlib.contextmanager
def held_by_another_thread(lock):
    taken, done = threading.Event(), threading.Event()

    def keep():
        with lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_both(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_children_forked_while_threads_change_a_table_have_it_whole_or_are_told(var_type):
    options = {"max_capacity": 1 << 14} if var_type == "hybrid" else {}
    table = new_table(BACKEND, 4, var_type, **options)
    table.find_or_insert(np.arange(2000))
    stop = threading.Event()

    def change(number):
        rng = np.random.default_rng(number)
        while not stop.is_set():
            keys = rng.integers(2000, 6000, 500)
            table.lookup(keys)
            table.erase(keys[::2])

    def look():
        audit_insides(table)
        table.lookup(np.arange(10_000, 10_050))
        audit_insides(table)
        return bool((table.lookup(np.arange(2000)).values[:, 0] == np.arange(2000) % 1000).all())

    threads = [threading.Thread(target=change, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        texts = [in_child(look) for _ in range(10)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    told = "RuntimeError: This process was forked while a table was in use"
    assert all(text == "True" or text.startswith(told) for text in texts)
    assert in_child(look) == "True"
    assert not table.contains(np.arange(10_000, 10_050)).any()
    audit(table)


def test_a_child_is_told_of_a_table_that_another_thread_was_using():
    table, other = new_table(BACKEND), new_table(BACKEND)
    with held_by_another_thread(table.lock):
        assert "forked while a table was in use" in in_child(lambda: table.lookup([1]))
        assert in_child(lambda: other.lookup([1]).num_without_row) == "0"
    table.lookup([1])
    assert_lock_is_free(table)


def test_a_child_may_go_on_with_the_table_that_its_thread_has():
    table = new_table(BACKEND)
    table.lookup([1])

    def go_on():
        assert table.lock._is_owned()
        return int(table.lookup([1, 2]).num_without_row), table.record.is_settled

    with table.lock:
        assert in_child(go_on) == "(0, 1)"
    assert_lock_is_free(table)

    def fork_and_leave():
        with table.lock:
            child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        is_free = table.lock.state == 0 and table.lookup([3]).num_without_row == 0
        os._exit(5 if is_free else 6)

    assert fork_and_leave() == 5


def test_native_code_may_not_use_a_table_that_a_child_must_not():
    table = new_table(BACKEND)
    table.lookup([1])
    assert in_child(lambda: table.record.is_settled) == "1"
    child = mutate(table, os.fork)
    if child == 0:
        os._exit(table.record.is_settled)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert table.record.is_settled

    def try_it():
        before = table.record.is_settled
        with contextlib.suppress(RuntimeError):
            table.lookup([1])
        return before, table.record.is_settled, table.lock.state

    with held_by_another_thread(table.lock):
        assert in_child(try_it) == "(0, 0, 0)"


# -------------------------------------------------------------------- the record


def test_a_table_is_settled_between_calls_and_not_within(backend):
    tables = [new_table(backend) for _ in range(3)]
    seen = []

    def look():
        seen.append([table.record.is_settled for table in tables])

    look()
    for table in tables:
        table.lookup([1])
    look()
    with_locks(tables[:2], look)
    look()
    with_lock(tables[2], look)
    with pytest.raises(ZeroDivisionError):
        with_lock(tables[2], lambda: (look(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        with_locks(tables[1:], lambda: (look(), 1 / 0))
    look()
    assert seen == [[0] * 3, [1] * 3, [0, 0, 1], [1] * 3, [1, 1, 0], [1, 1, 0], [1, 0, 0], [1] * 3]


def test_a_native_call_is_a_change_as_one_of_python_is(backend):
    tables = [new_table(backend) for _ in range(3)]
    changes = []
    seen = []

    def prepare():
        changes[:] = [table_versions(tables)]

    def look():
        with_locks_since(tables, changes[0], seen.append)

    with_locks(tables, prepare)
    look()
    with_locks(tables, prepare)
    tables[1].record.num_native += 1
    look()
    with_locks(tables, prepare)
    tables[2].lookup([1])
    look()
    with_locks(tables, prepare)
    look()
    assert seen == [True, False, False, True]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_table_whose_lock_is_taken_stays_until_it_is_given_back(in_a_cycle):
    """Native code may be in it, which does not keep it."""
    table = new_table(BACKEND)
    table.lookup([1])
    record, lock = table.record, table.lock
    generation, tables, order = record.generation, [table], []

    class Part:
        def __del__(self):
            order.append(("its parts go", record.generation > generation))

    table.part = Part()
    if in_a_cycle:
        table.itself = table
    del table
    taken, done = threading.Event(), threading.Event()

    def use():
        with lock:
            taken.set()
            done.wait()
            order.append(("given back", record.generation > generation))

    def drop():
        tables.clear()
        gc.collect()

    threads = [threading.Thread(target=each) for each in (use, drop)]
    threads[0].start()
    taken.wait()
    threads[1].start()
    threads[1].join(0.1)  # for one that does not wait
    done.set()
    for thread in threads:
        thread.join()
    assert order == [("given back", False), ("its parts go", True)]
    assert record.is_settled == 0
    assert record.lock.state == 0


def test_a_finalizer_of_what_holds_a_table_finds_it_whole():
    class Model:
        def __init__(self, table):
            self.table, self.itself = table, self

        def __del__(self):
            others.append(new_table(BACKEND))  # it gets a record of a table that is gone
            others[0].lookup([5])
            self.table.lookup([1, 2])
            found.append((self.table.clock.now, self.table.size, self.table.counters.found))
            kept.append(self.table)

    others, found, kept = [], [], []
    model = Model(new_table(BACKEND))
    model.table.lookup([1])
    model.table.lookup([1])
    record = model.table.record
    del model
    gc.collect()
    assert found == [(3, 2, 2)]
    assert record.allows == 0, "native code is done with it"
    assert record is not others[0].record and others[0].clock.now == 1
    address = ctypes.addressof(record)
    kept.clear()
    while ctypes.addressof(others[-1].record) != address:
        others.append(new_table(BACKEND))
        assert len(others) < 10_000
    assert others[-1].clock.now == 0


# -------------------------------------------------------------------- calls within calls


TABLES = {
    "hbm": {"var_type": "hbm"},
    "full": {"var_type": "hybrid", "max_capacity": 32, "on_refused": "ignore"},
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_change_within_a_change_is_refused(kind):
    table, other = (new_table(BACKEND, name="t", **TABLES[kind]) for _ in range(2))
    refused = []

    def change():
        with contextlib.suppress(RuntimeError):
            table.lookup([5000 + len(refused)])
            return
        refused.append("lookup")
        with pytest.raises(RuntimeError, match="in another call of one of its tables"):
            apply_updates([Update(table, SGD(), np.array([1]), np.ones((1, 4), np.float32))], 1, 1)

    def only_within(frame=None):
        if table.is_changing:
            change()

    tracer = AtEveryLine(only_within)
    for keys in (np.arange(20), np.arange(10, 60)):
        tracer.run(lambda keys=keys: table.lookup(keys))
        other.lookup(keys)
        audit(table)
    assert len(refused) > 100
    for mine, theirs in zip(table.export(), other.export(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_predicate_may_use_the_table_and_raise(backend):
    table = new_table(backend)
    table.lookup(np.arange(10))
    with pytest.raises(ZeroDivisionError):
        table.erase_if(lambda entries: 1 / 0)
    assert not table.is_changing and table.record.is_settled
    assert_lock_is_free(table)
    assert table.erase_if(lambda entries: table.lookup(entries.keys).values[:, 0] > 4) == 5
    assert table.size == 5
    audit(table)


def test_a_child_cannot_write_the_rows_of_its_parents_far_file(tmp_path):
    options = {"max_capacity": 1 << 10, "max_hbm_for_vectors": 16 * 16 / 2**30}
    table = new_table(BACKEND, 4, "hybrid", far_path=str(tmp_path), **options)
    table.lookup(np.arange(500))
    before = table.export()[1].copy()
    zeros = np.zeros((500, 4), np.float32)
    for work in (
        lambda: table.insert_or_assign(np.arange(500), zeros),
        lambda: table.lookup([1]),
        lambda: apply_updates([Update(table, SGD(), np.arange(500), zeros + 1)], 1.0, 1),
    ):
        assert "far_path, a file of the process that made it" in in_child(work)
    np.testing.assert_array_equal(table.export()[1], before)
    # What a child makes itself it may use.
    assert in_child(lambda: new_table(BACKEND).lookup([1]).num_without_row) == "0"


@pytest.mark.parametrize("count", [1, 2, 15, 16, 300])
def test_locks_of_many_tables_are_held_and_given_back(count):
    tables = [new_table(BACKEND) for _ in range(count)]

    def work():
        assert all(table.lock._is_owned() for table in tables)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with_locks([*tables, tables[0]], work)
    for table in tables if count < 40 else tables[::17]:
        assert_lock_is_free(table)
    assert with_locks([], lambda: 5) == 5


def test_a_call_within_one_of_several_tables_is_part_of_it():
    tables = [new_table(BACKEND) for _ in range(3)]

    def work():
        for table in tables:
            assert table.is_changing
            table.contains([1])
        with pytest.raises(RuntimeError, match="while this thread was in another call"):
            with_locks(tables[:1], list)
        with pytest.raises(RuntimeError, match="while this thread was changing the same table"):
            tables[1].lookup([1])
        return "done"

    assert with_locks(tables, work) == "done"
    for table in tables:
        assert_lock_is_free(table)
        table.lookup([1])


def test_updates_of_the_same_tables_in_other_orders_do_not_wait_for_each_other():
    tables = [new_table(BACKEND) for _ in range(20)]
    for table in tables:
        table.lookup([1])
    grads = np.ones((1, 4), np.float32)

    def train(order):
        for _ in range(30):
            apply_updates([Update(table, SGD(), np.array([1]), grads) for table in order], 1.0, 1)

    run_both(lambda: train(tables), lambda: train(tables[::-1]))
    assert all(table.lookup([1]).values[0, 0] == 1 - 60 for table in tables)


# -------------------------------------------------------------------- what is corrupt


def test_a_full_index_is_reported_and_not_searched_for_ever(backend):
    table = new_table(backend)
    index = table.index
    keys = backend.from_host(np.arange(1000))
    rows = backend.from_host(np.arange(1000, dtype=np.uint32))
    assert index.capacity == 64
    with pytest.raises(RuntimeError, match="find no slot, though only 0 of 64 are in use"):
        index.insert(keys, rows, 1)
    assert not index.entries().keys.size
    index.insert_launch(keys, rows, 1)()
    index.record.size += len(keys)
    with pytest.raises(RuntimeError, match="is corrupt: 936 keys found no free slot"):
        index.check()
    found = backend.to_host(index.find(backend.from_host(np.arange(5000))).rows)
    assert (found != 0xFFFFFFFF).sum() == 64
    index.erase(index.entries().keys)
    with pytest.raises(RuntimeError, match="is corrupt"):
        index.clean()


def test_a_far_file_that_somebody_cuts_is_an_error(tmp_path):
    # SIGBUS would end the process.
    program = """
        import os, sys
        import numpy as np
        from sok_lite.backend import get_backend
        from tests.support.helpers import new_table

        path = sys.argv[1]
        table = new_table(
            get_backend("cpu"), 64, "hybrid", max_capacity=1 << 14, far_path=path,
            max_hbm_for_vectors=64 * 256 / 2**30,
        )
        table.lookup(np.arange(5000))
        os.truncate(path, 4096)
        for work in (lambda: table.lookup(np.arange(5000)), lambda: table.export()):
            try:
                work()
            except OSError as error:
                print("told" if "was cut short by another program" in str(error) else error)
    """
    assert run_limited(program, tmp_path / "rows") == ["told", "told"]
