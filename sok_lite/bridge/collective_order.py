"""The order of calls that ranks make together, in a graph of TF1.

A session runs what it has to in any order, so that ranks would meet each other in different calls.
Here rank 0 says which call comes next. A call has three operations: one submits its tensors, one
tells when all ranks have submitted theirs, and one waits for the result. Whichever of these is
waiting does the work of the call that rank 0 names, its own or another, so that no call needs a
thread that others keep.

Only Horovod can tell, without keeping a thread, when all ranks have submitted. With MPI a call that
rank 0 names may wait for a thread, of which sessions then have more: TensorFlow reads from an
environment variable how many, when the first one is made.
"""

import itertools
import os
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.bridge.tf_private import CONTROL_FLOW
from sok_lite.comm import Communicator

_SUBMIT_TIMEOUT_S = 300.0
_THREADS_VARIABLE, _NUM_THREADS = "TF_NUM_INTEROP_THREADS", "64"

_Run = Callable[[], Sequence[tf.Tensor]]
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


class _CollectiveOrder:
    """The calls of this process that were submitted and are not done yet.

    A call may be submitted several times before it is done, as by two sessions in two threads: each
    time has a ticket of its own, and its own result. Which of them meets which of another rank's is
    left open: they are of one graph, and of the same tables.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_working = False  # whether a thread takes part in collectives
        self._tickets = itertools.count()
        self._submitted: dict[int, dict[int, _Run]] = {}  # by call and ticket
        self._done: dict[int, Sequence[tf.Tensor] | BaseException] = {}  # by ticket

    def submit(self, call: int, run: _Run) -> int:
        """Notes that the tensors of a call are there; returns the ticket."""
        with self._changed:
            ticket = next(self._tickets)
            self._submitted.setdefault(call, {})[ticket] = run
            self._changed.notify_all()
        return ticket

    def result(self, call: int, ticket: int, comm: Communicator) -> Sequence[tf.Tensor]:
        """Returns the result of a call, once it is done."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: ticket in self._done or not self._is_working)
                if ticket in self._done:
                    result = self._done.pop(ticket)
                    break
                self._is_working = True
            try:
                self._work(call, ticket, comm)
            finally:
                with self._changed:
                    self._is_working = False
                    self._changed.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self, call: int, ticket: int, comm: Communicator) -> None:
        """Does the call that is next: on rank 0 this one."""
        chosen = int(comm.broadcast(np.array([call], np.int64), 0)[0])
        with self._changed:
            if not self._changed.wait_for(lambda: self._submitted.get(chosen), _SUBMIT_TIMEOUT_S):
                _refuse_to_wait(comm.rank)
            submitted = self._submitted[chosen]
            # The last one: a run that failed may have left an older one behind.
            worked = ticket if ticket in submitted else next(reversed(submitted))
            run = submitted.pop(worked)
        try:
            result: Sequence[tf.Tensor] | BaseException = run()
        except BaseException as error:  # it belongs to who waits for this call
            result = error
        with self._changed:
            self._done[worked] = result


def _refuse_to_wait(rank: int) -> NoReturn:
    raise TimeoutError(
        f"Rank 0 makes a call that rank {rank} has not come to for {_SUBMIT_TIMEOUT_S:g} s. Run "
        "the same fetches on all ranks, and start them with horovodrun, or give the session more "
        f"threads than it has lookups: set {_THREADS_VARIABLE} before the first session, whose "
        "threads all sessions share, or give this one ConfigProto(use_per_session_threads=True, "
        "inter_op_parallelism_threads=...)."
    )


_order = _CollectiveOrder()


def needs_order(call: CollectiveCall) -> bool:
    """Whether a call of several ranks is built into a graph that orders nothing by itself."""
    if call.comm.size == 1 or tf.executing_eagerly() or tf.inside_function():
        return False
    # Of a loop several rounds may run at once, and no names tell them apart.
    return getattr(tf.compat.v1.get_default_graph(), CONTROL_FLOW)() is None


def in_collective_order(
    collective: CollectiveCall,
    place: Callable[..., Any],
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[Any],
    output_dtypes: Sequence[tf.DType],
    what: str,
) -> Any:
    """Returns the result of a call of several ranks, as operations of a TF1 graph.

    All ranks must build the same calls, those of one name in the same order, and graphs that have
    the same calls in the same order.

    Args:
      collective: the ranks.
      place: makes a py_function of a function, inputs and dtypes.
      function: takes eager tensors, returns a sequence of eager tensors.
      inputs: tensors.
      output_dtypes: one per output.
      what: what the call does, for the error text.
    """
    comm = collective.comm
    name = _name_in_process(numbered(f"{what} ({collective.name})")).encode()
    # Two hashes of 31 bits: no name is taken for another, and none is negative.
    call = zlib.crc32(name) >> 1 << 31 | zlib.adler32(name) >> 1

    def submit(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        return (tf.constant(_order.submit(call, lambda: function(*tensors)), tf.int64),)

    def take(_: tf.Tensor, ticket: tf.Tensor) -> Sequence[tf.Tensor]:
        return _order.result(call, int(ticket), comm)

    (submitted,) = place(submit, inputs, [tf.int64])
    submitted.set_shape([])
    submitted_by_all = comm.submitted_by_all(submitted, f"sok_lite.{call}")
    if submitted_by_all is submitted:
        os.environ.setdefault(_THREADS_VARIABLE, _NUM_THREADS)
    return place(take, [submitted_by_all, submitted], output_dtypes)
