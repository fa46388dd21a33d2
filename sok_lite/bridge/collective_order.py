"""The order of calls that ranks make together, in a graph of TF1.

A session runs what it has to in any order, so that ranks would meet each other in different calls.
Here rank 0 says which call comes next: the one that it has had longest. An asynchronous operation
submits its call and keeps no thread; one thread of the process makes the calls, and ends each one's
operation. So a session needs no thread for what waits.
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
# An attribute of graphs: the calls of their operations that wait here for their turn.
_CALLS = "_sok_lite_calls_in_order"

# Of each graph, how many calls of a name it has. Gradients are built in no order that ranks share,
# so each name has numbers of its own.
_counts: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()
# Of each name, the number of the graph among those that have such a call of several ranks.
_graphs: "dict[str, weakref.WeakKeyDictionary[Any, int]]" = {}
_num_graphs: Counter[str] = Counter()


def numbered(name: str) -> str:
    """Returns a name that is new in this graph, the same on all ranks that come to it as often."""
    if tf.executing_eagerly():
        return name
    counts = _counts.setdefault(tf.compat.v1.get_default_graph(), Counter())
    counts[name] += 1
    return f"{name}, {counts[name]}"


def _name_in_process(name: str) -> str:
    """Returns a name of a call of this graph that is new in the process.

    What ranks do alone does not count: a rank may build graphs that others do not build.
    """
    graph = tf.compat.v1.get_default_graph()
    numbers = _graphs.setdefault(name, weakref.WeakKeyDictionary())
    if graph not in numbers:
        numbers[graph] = _num_graphs[name]
        _num_graphs[name] += 1
    return f"{name} of graph {numbers[graph]}"


class CollectiveCall(NamedTuple):
    """A call that ranks make together.

    Attributes:
      comm: the ranks.
      name: what `numbered` gave to the call, or to the one that it is the gradient of; "": none.
    """

    comm: Communicator
    name: str = ""


class _Submitted(NamedTuple):
    """A call whose tensors are there: its number, what makes it, and what waits for it."""

    call: int
    run: Callable[[], None]
    running: Running


class CollectiveOrder:
    """The calls of this process that were submitted and not made yet, and the thread that does.

    A call may be submitted several times before it is made, as by two sessions in two threads.
    Which of them meets which of another rank's is left open: they are of one graph, and of the same
    tables.

    Args:
      comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._changed = threading.Condition()
        self._submitted: list[_Submitted] = []  # the oldest first
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, call: int, run: Callable[[], None], running: Running) -> None:
        """Notes that the tensors of a call are there, and returns at once.

        Args:
          call: its number, the same on all ranks.
          run: makes it, in a thread of its own; what it raises goes to the operation.
          running: the operation, which is ended after it.

        Raises:
          RuntimeError: the process ends.
        """
        with self._changed:
            if self._is_closed:
                raise _ended()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="sok_lite-collectives", daemon=True
                )
                self._thread.start()
            self._submitted.append(_Submitted(call, run, running))
            self._changed.notify_all()

    def close(self) -> None:
        """Has all calls fail that are not made yet, and takes no more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fail_all(_ended())

    def _work(self) -> None:
        """Makes calls, for ever."""
        try:
            while not self._is_closed:
                self._make_next()
        finally:  # another call starts another thread
            with self._changed:
                self._thread, left = None, self._submitted[:]
                del self._submitted[:]
            del left  # nobody makes them: they fail

    def _make_next(self) -> None:
        """Makes the call that is next, as soon as one is submitted."""
        with self._changed:
            self._changed.wait_for(lambda: self._submitted or self._is_closed)
            if self._is_closed:
                return
            oldest = self._submitted[0].call
        try:
            _, run, running = self._take(self._chosen(oldest))
        except BaseException as error:  # of what is submitted, nothing is made any more
            self._fail_all(error)
            return
        try:
            run()
            del run  # it owns memory of TensorFlow's, which goes on now
        except BaseException as error:  # it belongs to who waits for this call
            running.end(error)
        else:
            running.end()

    def _chosen(self, oldest: int) -> int:
        """Returns the call that rank 0 has had longest; on rank 0 the given one."""
        return int(self._comm.broadcast(np.array([oldest], np.int64), 0)[0])

    def _take(self, call: int) -> _Submitted:
        """Returns what was submitted first for a call, once there is something."""

        def places() -> list[int]:
            return [at for at, each in enumerate(self._submitted) if each.call == call]

        with self._changed:
            is_there = self._changed.wait_for(
                lambda: places() or self._is_closed, _SUBMIT_TIMEOUT_S
            )
            if not is_there:
                _refuse_to_wait(self._comm.rank)
            if self._is_closed:
                raise _ended()
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


def _ended() -> RuntimeError:
    return RuntimeError("The process ends, and other ranks' calls are not waited for any more.")


# By communicator: a process has one, unless it has connected anew.
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
    """Nobody can be asked any more: a session that waits would never end."""
    for order in list(_orders.values()):
        order.close()


def _begin_child() -> None:
    """A child has no thread of its parent's, and must not end what is the parent's."""
    global _making
    _making = threading.Lock()
    _orders_of_parent.append(dict(_orders))
    _orders.clear()


os.register_at_fork(after_in_child=_begin_child)


def needs_order(call: CollectiveCall) -> bool:
    """Whether a call of several ranks is built into a graph that orders nothing by itself."""
    if call.comm.size == 1 or tf.executing_eagerly() or tf.inside_function():
        return False
    # Of a loop several rounds may run at once, and no names tell them apart.
    return getattr(tf.compat.v1.get_default_graph(), CONTROL_FLOW)() is None


def in_turn(
    collective: CollectiveCall, what: str, run: Callable[[Frame], None]
) -> Callable[[Frame, Running], None]:
    """Returns what the asynchronous operation of a call of several ranks asks Python for.

    All ranks must build the same calls, those of one name in the same order, and graphs that have
    the same calls in the same order.

    Args:
      collective: the ranks.
      what: what the call does, for the error text.
      run: makes the call, when it is its turn: takes the frame, and writes all outputs.
    """
    name = _name_in_process(numbered(f"{what} ({collective.name})")).encode()
    # Two hashes of 31 bits: no name is taken for another, and none is negative.
    call = zlib.crc32(name) >> 1 << 31 | zlib.adler32(name) >> 1

    def submit(frame: Frame, running: Running) -> None:
        _order_of(collective.comm).submit(call, partial(run, frame), running)

    return submit
