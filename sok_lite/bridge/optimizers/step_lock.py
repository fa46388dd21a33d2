"""One optimizer step at a time, and checks of its dense part before rows change."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.host_call import at_place, in_order
from sok_lite.bridge.tf_private import graphs_around, kept_by

# One for all optimizers: TensorFlow starts a thread per mutex and never stops it.
_MUTEX = "sok_lite_optimizer_step"


class LockedStep:
    """A step that holds the lock.

    Attributes:
      last: append the step's last operations, in a graph: the next step waits for them.
      end: the operation that releases the lock; None in eager mode. A TF1 graph must run it.
    """

    def __init__(self) -> None:
        self.last: list[Any] = []
        self.end: Any = None


class StepLock:
    """Serializes the steps of an optimizer over threads, eager ones and those of graphs."""

    def __init__(self) -> None:
        # Not a Lock: a thread whose step was interrupted may enter again.
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: Any) -> "StepLock":
        return StepLock()

    @contextmanager
    def hold(self, handles: Sequence[tf.Tensor] = ()) -> Iterator[LockedStep]:
        """Waits for the lock; in a graph, operations made inside wait too.

        The lock is ordered with the operations on the step's tables, by their resources: a later
        step must not hold it while it waits for an earlier one.
        """
        step = LockedStep()
        if tf.executing_eagerly():
            with self._lock:
                yield step
            return
        with tf.device("CPU:0"):
            mutex = tf.raw_ops.MutexV2(container="", shared_name=_MUTEX)
            take = partial(tf.raw_ops.MutexLock, mutex=mutex)
            lock = in_order(lambda: at_place(handles, take))
        with tf.control_dependencies([lock]):
            yield step
        with tf.device("CPU:0"), tf.control_dependencies(step.last):
            step.end = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def dense_checks(pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns what must run before rows change, so that the dense step after them cannot fail.

    That is every gradient, and a check of shapes that are not static. Raises TypeError if a
    gradient is not numeric.
    """
    checks: list[Any] = []
    for grad, variable in pairs:
        if grad is None:
            continue
        row_dims = 0
        if isinstance(grad, tf.IndexedSlices):
            checks.append(grad.indices)
            grad, row_dims = grad.values, 1
        grad = tf.convert_to_tensor(grad)
        if not (grad.dtype.is_floating or grad.dtype.is_integer or grad.dtype.is_complex):
            # Keras would cast it, and fail while the graph runs.
            raise TypeError(
                f"The gradient of {variable.name!r} must be of numbers. "
                f"Received: {grad.dtype.name}."
            )
        checks.append(grad)
        expected = tf.TensorShape(variable.shape)[row_dims:]
        # The optimizer itself checks static shapes, while the graph is made.
        if expected.is_fully_defined() and not grad.shape[row_dims:].is_fully_defined():
            checks.append(_shape_check(grad, row_dims, expected.as_list(), variable))
    return checks


def _shape_check(grad: tf.Tensor, row_dims: int, expected: list[int], variable: Any) -> Any:
    # Padded, so that shapes of other ranks differ too.
    padding = [-1] * (len(expected) + 1)
    received = tf.shape(grad)[row_dims:]
    is_same = tf.equal(
        tf.concat([received, padding], 0)[: len(padding)], tf.constant([*expected, -1])
    )
    what = "rows" if row_dims else "shape"
    message = f"The gradient of {variable.name!r} must have {what} {expected}. Received:"
    return tf.debugging.Assert(tf.reduce_all(is_same), [message, received])


def keep_alive(optimizer: Any) -> None:
    """Keeps an optimizer, the owner of rows' states, alive as long as the current graph."""
    with tf.init_scope():
        outermost = tf.compat.v1.get_default_graph() if tf.executing_eagerly() else None
    for graph in itertools.takewhile(lambda graph: graph is not outermost, graphs_around()):
        kept_by(graph, "_sok_lite_optimizers", list).append(optimizer)
