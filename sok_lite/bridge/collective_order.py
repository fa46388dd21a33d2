"""Orders collective calls of ranks in a TF1 graph.

A session runs ready operations in any order, so ranks could meet in different calls. Rank 0
therefore names the next call: its oldest. An asynchronous operation submits its call and holds no
thread; one thread per process makes the calls and completes their operations.
"""

import atexit
import os
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.bridge.tf_private import CONTROL_FLOW
from sok_lite.comm import Communicator
from sok_lite.native.callbacks import Frame, Running

_SUBMIT_TIMEOUT_S = 300.0
# Attribute of graphs: submitted calls of their operations.
_CALLS = "_sok_lite_calls_in_order"

# Calls of each name in a graph. Ranks may build gradients in different orders, so each name is
# counted by itself.
_counts: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()
# Name -> number of a graph among those with such a collective call.
_graphs: "dict[str, weakref.WeakKeyDictionary[Any, int]]" = {}
_num_graphs: Counter[str] = Counter()


def numbered(name: str) -> str:
    """Returns a name that is unique in this graph and equal on all ranks that count alike."""
    if tf.executing_eagerly():
        return name
    counts = _counts.setdefault(tf.compat.v1.get_default_graph(), Counter())
    counts[name] += 1
    return f"{name}, {counts[name]}"


def _name_in_process(name: str) -> str:
    """Returns a name that is unique in this process; only graphs with collectives have numbers."""
    graph = tf.compat.v1.get_default_graph()
    numbers = _graphs.setdefault(name, weakref.WeakKeyDictionary())
    if graph not in numbers:
        numbers[graph] = _num_graphs[name]
        _num_graphs[name] += 1
    return f"{name} of graph {numbers[graph]}"


class CollectiveCall(NamedTuple):
    """A call of all ranks; `name` is from `numbered`, for it or the call whose gradient it is."""

    comm: Communicator
    name: str = ""


class _Submitted(NamedTuple):
    """A submitted call: its number, its function, and the operation to complete."""

    call: int
    run: Callable[[], None]
    running: Running


class CollectiveOrder:
    """The submitted calls of this process, and the thread that makes them.

    Two sessions in two threads may submit a call twice before it is made. Any of them may meet any
    of another rank's: they belong to one graph and the same tables.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._changed = threading.Condition()
        self._submitted: list[_Submitted] = []  # the oldest first
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, call: int, run: Callable[[], None], running: Running) -> None:
        """Queues a call whose input tensors are ready, and returns at once.

        `call` is equal on all ranks; `run` makes it, in the thread of this object; then `running`
        is completed. Raises RuntimeError when the process is exiting.
        """
        with self._changed:
            if self._is_closed:
                raise _exit_error()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="sok_lite-collectives", daemon=True
                )
                self._thread.start()
            self._submitted.append(_Submitted(call, run, running))
            self._changed.notify_all()

    def close(self) -> None:
        """Fails all submitted calls and rejects new ones."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fail_all(_exit_error())

    def _work(self) -> None:
        """Makes calls until closed."""
        try:
            while not self._is_closed:
                self._make_next()
        finally:  # the next call starts another thread
            with self._changed:
                self._thread, left = None, self._submitted[:]
                del self._submitted[:]
            del left  # dropped calls fail

    def _make_next(self) -> None:
        """Waits for a submitted call and makes the one that rank 0 names."""
        with self._changed:
            self._changed.wait_for(lambda: self._submitted or self._is_closed)
            if self._is_closed:
                return
            oldest = self._submitted[0].call
        try:
            _, run, running = self._take(self._broadcast_next(oldest))
        except BaseException as error:  # nothing submitted can be made any more
            self._fail_all(error)
            return
        try:
            run()
            del run  # it owns TensorFlow's memory, which TensorFlow now uses again
        except BaseException as error:  # the error belongs to whoever waits for this call
            running.end(error)
        else:
            running.end()

    def _broadcast_next(self, oldest: int) -> int:
        """Returns rank 0's oldest call; on rank 0 that is `oldest`."""
        return int(self._comm.broadcast(np.array([oldest], np.int64), 0)[0])

    def _take(self, call: int) -> _Submitted:
        """Removes and returns the oldest submission of a call, once there is one."""

        def places() -> list[int]:
            return [at for at, each in enumerate(self._submitted) if each.call == call]

        with self._changed:
            is_there = self._changed.wait_for(
                lambda: places() or self._is_closed, _SUBMIT_TIMEOUT_S
            )
            if not is_there:
                _refuse_to_wait(self._comm.rank)
            if self._is_closed:
                raise _exit_error()
            return self._submitted.pop(places()[0])

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            failed = self._submitted[:]
            del self._submitted[:]
        for each in failed:
            each.running.end(error)


def _refuse_to_wait(rank: int) -> NoReturn:
    raise TimeoutError(
        f"Rank 0 makes a call that rank {rank} has not come to for {_SUBMIT_TIMEOUT_S:g} s. Run "
        "the same fetches on all ranks."
    )


def _exit_error() -> RuntimeError:
    return RuntimeError("The process ends, and other ranks' calls are not waited for any more.")


# One by communicator; a process has several only after reconnecting.
_orders: dict[Communicator, CollectiveOrder] = {}
_orders_of_parent: list[Any] = []
_making = threading.Lock()


def _order_of(comm: Communicator) -> CollectiveOrder:
    with _making:
        if comm not in _orders:
            _orders[comm] = CollectiveOrder(comm)
        return _orders[comm]


@atexit.register
def _close_all() -> None:
    """Fails waiting calls: otherwise their sessions would never return."""
    for order in list(_orders.values()):
        order.close()


def _begin_child() -> None:
    """Forgets the parent's orders in a forked child, which lacks their threads."""
    global _making
    _making = threading.Lock()
    _orders_of_parent.append(dict(_orders))
    _orders.clear()


os.register_at_fork(after_in_child=_begin_child)


def needs_order(call: CollectiveCall) -> bool:
    """Whether this is a collective call in a TF1 graph, which orders nothing by itself."""
    if call.comm.size == 1 or tf.executing_eagerly() or tf.inside_function():
        return False
    # Iterations of a loop may run at once, and no name distinguishes them.
    return getattr(tf.compat.v1.get_default_graph(), CONTROL_FLOW)() is None


def submit_in_turn(
    collective: CollectiveCall, what: str, run: Callable[[Frame], None]
) -> Callable[[Frame, Running], None]:
    """Returns what submits a collective call: the callback of its asynchronous operation.

    All ranks must build the same calls: those of one name in the same order, and graphs with the
    same calls in the same order. `run` makes the call and writes all outputs of its frame.
    """
    name = _name_in_process(numbered(f"{what} ({collective.name})")).encode()
    # Two hashes of 31 bits: distinct for distinct names, and never negative.
    call = zlib.crc32(name) >> 1 << 31 | zlib.adler32(name) >> 1

    def submit(frame: Frame, running: Running) -> None:
        _order_of(collective.comm).submit(call, partial(run, frame), running)

    return submit
