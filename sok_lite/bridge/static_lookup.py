"""A lookup over all ranks in static tables, whose rows are TensorFlow's own variables.

TensorFlow reads the rows, combines them and takes their gradients, as of any other variable. With
several ranks two operations are between: the first sends the keys and says which rows this rank is
asked for, the second takes those that TensorFlow has read to the ranks that asked, and its gradient
brings theirs back.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, get_backend
from sok_lite.bridge.collective_order import CollectiveCall, numbered
from sok_lite.bridge.host_call import refuse_replicas, refuse_xla
from sok_lite.bridge.keras.guard import refuse_custom_step
from sok_lite.bridge.lookup_arguments import Argument, RowBounds, TableSpec, tag_of
from sok_lite.bridge.lookup_gradient import note_gradient
from sok_lite.bridge.lookup_inputs import BatchOfInputs, inputs_of
from sok_lite.bridge.operation import Facts, OfGradient, Outputs, operation
from sok_lite.bridge.sparse_matrix import combine_segments
from sok_lite.bridge.tf_private import could_possibly_record
from sok_lite.bridge.type_spec import alive, live_tables
from sok_lite.comm import Communicator
from sok_lite.engine import static_lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.exchange import AllToAllPlan, return_rows, send_grads
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.work_counters import GRADIENTS, LOOKUPS


def look_up(comm: Communicator, arguments: Sequence[Argument], what: str) -> list[tf.Tensor]:
    """Looks up in the static tables of a call. Every rank must call it.

    Args:
      arguments: of all tables of the call, some of them static.
      what: names the call.

    Returns:
      For each static table (batch, dimension) of its rows' dtype, with gradients of the rows and of
      the weights.

    Raises:
      ValueError: there is no such row. Nothing has been read then.
    """
    static = [each for each in arguments if each.spec.is_static]
    refuse_replicas(what)
    if not tf.executing_eagerly():
        refuse_xla(what)  # it would read some other row for one that there is not
    if comm.is_alone:
        with _checked(static):
            # The copies wait for the check: TensorFlow's graph optimizers drop what else would.
            keys = [tf.identity(each.keys) for each in static]
            read = [_read(each.spec, its) for each, its in zip(static, keys, strict=True)]
            return [_combined(each, *its_rows) for each, its_rows in zip(static, read, strict=True)]
    rows = _rows_of_ranks(comm, static, [each.spec for each in arguments], what)
    with _known_after(comm, [returned for returned, _ in rows]):
        return [_combined(each, *its_rows) for each, its_rows in zip(static, rows, strict=True)]


def _known_after(comm: Communicator, came: list[tf.Tensor]) -> AbstractContextManager[Any]:
    """Returns a `with` block of what comes after an exchange: other ranks wait for this one.

    Eagerly, a failure fails them. In a graph what is wrong on this rank was said in the exchange.
    """
    return failure_known_to_all(comm) if tf.executing_eagerly() else tf.control_dependencies(came)


def _checked(static: Sequence[Argument]) -> AbstractContextManager[Any]:
    """Returns a `with` block that is reached where all rows are there, and matrices are right.

    Else the check of several ranks raises. In a graph it runs only where something may be wrong.
    """
    batches = BatchOfInputs([each.spec for each in static], get_backend("cpu"))
    tables = live_tables([each.spec.variable for each in static])
    inputs, numbers = inputs_of(static)

    def check(*arrays: Array) -> bool:
        static_lookup.check(batches.make(tables, batches.given(arrays)))
        return True

    if tf.executing_eagerly():
        check(*(each.numpy() for each in [*inputs, *numbers]))
        return nullcontext()
    is_wrong = tf.reduce_any(tf.concat([each for its in static for each in _wrong(its)], 0))
    asked = [*inputs, *numbers]
    checked = tf.cond(
        is_wrong, lambda: tf.numpy_function(check, asked, tf.bool), lambda: tf.constant(True)
    )
    return tf.control_dependencies([checked])


def _wrong(argument: Argument) -> Iterator[tf.Tensor]:
    """Yields vectors of booleans, of which one has True where something is wrong, or may be."""
    keys, weights = tf.cast(tf.reshape(argument.keys, [-1]), tf.int64), argument.weights
    yield (keys < 0) | (keys >= argument.spec.num_rows)
    yield from _wrong_rows(argument.rows, keys)
    if weights is not None:
        yield _differ(tf.size(keys), tf.size(weights))
    if argument.weight_rows is not None:
        yield from _wrong_rows(argument.weight_rows, weights)
        of_both = (_segments_of(argument.rows, keys), _segments_of(argument.weight_rows, weights))
        yield from map(_differ, *of_both)


def _wrong_rows(rows: RowBounds, items: tf.Tensor) -> Iterator[tf.Tensor]:
    """Does the same of row splits, or of the row numbers of a sparse matrix: they rise."""
    if rows.width is not None:
        return
    places, last = tf.cast(rows.places, tf.int64), tf.size(items, tf.int64)
    if rows.batch is not None:
        places, last = places[:, 0], rows.batch[0] - 1
    else:
        ends = tf.concat([places[:1], last - places[-1:]], 0)
        yield _differ(ends, tf.zeros([2], tf.int64))
    steps = tf.concat([[0], places, [last]], 0)
    yield steps[1:] < steps[:-1]


def _differ(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns where tensors differ, (n,); one True where they are of other shapes."""
    return tf.reshape(tf.raw_ops.NotEqual(x=x, y=y, incompatible_shape_error=False), [-1])


def _combined(argument: Argument, rows: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Returns rows (u, dim) combined row by row of the batch.

    Args:
      number: (n,) which of them is that of each key.
    """
    spec, weights = argument.spec, argument.weights
    if spec.width == 1 and weights is None:
        result = tf.gather(rows, number)
    else:
        segments, batch = _segments_of(argument.rows, argument.keys)
        if weights is None:
            result = _COMBINE[spec.combiner](rows, number, segments, num_segments=batch)
        else:
            each = tf.gather(rows, number)
            result = combine_segments(each, weights, segments, batch, spec.combiner)
    return tf.ensure_shape(tf.cast(result, spec.dtype), [argument.batch, spec.dim])


# They sum in a fixed order on a GPU too.
_COMBINE = {
    "sum": tf.sparse.segment_sum,
    "mean": tf.sparse.segment_mean,
    "sqrtn": tf.sparse.segment_sqrt_n,
}


def _segments_of(rows: RowBounds, items: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns of which row of the batch each item is, (n,) int64, and how many rows it has."""
    count = tf.size(items, tf.int64)
    if rows.width is not None:
        return tf.range(count) // rows.width, count // rows.width
    places = tf.cast(rows.places, tf.int64)
    if rows.batch is not None:
        return places[:, 0], rows.batch[0]
    # TensorFlow's repeat takes the memory of a batch whose rows are all as long as the longest.
    segments = tf.searchsorted(places[1:], tf.range(count), "right", tf.int64)
    return segments, tf.size(places, tf.int64) - 1


def _read(spec: TableSpec, places: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns rows of this rank's variable, float32, and which is that of each place.

    Each is read once: so the gradient has it once.

    Args:
      places: integers of any shape.
    """
    variable = alive(spec.variable)
    refuse_custom_step([variable])
    if not tf.executing_eagerly():
        variable.free_with_its_variable()
    distinct, number = tf.unique(tf.cast(tf.reshape(places, [-1]), tf.int64), tf.int64)
    rows = tf.cast(tf.gather(variable, distinct), tf.float32)
    # The gradient of a reshape is dense, which that of a variable wants, and not slices.
    return tf.reshape(rows, [-1, spec.dim]), number


def _rows_of_ranks(
    comm: Communicator, static: Sequence[Argument], of_call: list[TableSpec], what: str
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns of each table rows, which any rank may have, and which is that of each key."""
    specs, count = [each.spec for each in static], len(static)
    exchange = _Exchange(comm, specs, of_call, what)
    inputs, numbers = inputs_of(static)
    facts = Facts.of_static([alive(spec.variable) for spec in specs])
    *asked, order, told = operation(
        "sok_static_places",
        None,
        exchange.ask,
        inputs,
        [tf.int64] * (2 * count + 1),
        exchange.backend,
        what,
        facts,
        numbers=numbers,
        num_told=1,
        collective=exchange.collective,
    )
    with _known_after(comm, asked):
        rows = [tf.gather(*_read(*each)) for each in zip(specs, asked[:count], strict=True)]
    dtypes, gradient = [tf.float32] * count, exchange.gradient
    returned = operation(
        "sok_static_rows",
        None,
        exchange.answer,
        [*rows, order],
        dtypes,
        exchange.backend,
        what,
        facts,
        LOOKUPS,
        numbers=[told],
        gradient=gradient,
        collective=exchange.collective,
    )
    if tf.executing_eagerly() and could_possibly_record():
        note_gradient(returned, gradient)
    returned = [tf.reshape(its, [-1, spec.dim]) for its, spec in zip(returned, specs, strict=True)]
    return list(zip(returned, asked[count:], strict=True))


class _Exchange:
    """What the operations of one call on several ranks run. Holds no tensor, keeps no table alive.

    Args:
      static: the static tables of the call.
      of_call: all of them, which ranks have to agree on before anything is sent.
    """

    def __init__(
        self, comm: Communicator, static: list[TableSpec], of_call: list[TableSpec], what: str
    ) -> None:
        self._comm, self._static, self._of_call, self._what = comm, static, of_call, what
        self.backend = self._tables(static)[0].backend
        self.collective = CollectiveCall(comm, numbered(what))
        self._batches = BatchOfInputs(static, self.backend)
        self._tag = tag_of(what, of_call)

    @property
    def gradient(self) -> OfGradient:
        """What the gradient of the rows runs: it has this object, which must not have it."""
        of_run = (self.take_back, [tf.float32] * len(self._static), self.backend, GRADIENTS)
        return OfGradient(self._what, *of_run, self.collective)

    def ask(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Sends keys.

        Args:
          outputs: of each table the places (m,) of the rows that this rank has to read, then of
            each which of the rows that return is that of each key, and the order of the
            `AllToAllPlan`; told: the rest of it.
          arrays: what `inputs_of` gave.
        """
        comm = self._comm
        with shared_failure(comm):
            of_call = self._tables(self._of_call)
        agree(comm, self._tag, of_call, [spec.combiner for spec in self._of_call])
        with shared_failure(comm):
            batch = self._batches.make(self._tables(self._static), self._batches.given(arrays))
        asked = static_lookup.ask(self.backend, comm, batch, self._tag)
        with failure_known_to_all(comm):
            outputs.give_several(0, [*asked.places, *asked.numbers, asked.plan.order])
            outputs.tell(0, asked.plan.numbers)

    def answer(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Sends rows to the ranks that asked for them, in the format of their table.

        Args:
          outputs: of each table (u, dim), the rows that this rank asked for.
          arrays: of each table (m, dim), those that it was asked for; order and numbers of the
            route.
        """
        xp = self.backend.xp
        with failure_known_to_all(self._comm):
            *rows, order, told = arrays
            plan = self._plan(order, told)
            formats = [table.row_dtype for table in self._tables(self._static)]
            stored = [f.to_storage(xp, each) for f, each in zip(formats, rows, strict=True)]
        returned = return_rows(plan, stored)
        with failure_known_to_all(self._comm):
            pairs = zip(formats, returned, strict=True)
            outputs.give_several(0, [f.to_float32(xp, each) for f, each in pairs])

    def take_back(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Sends gradients the other way.

        Args:
          outputs, arrays: as of `answer`, of gradients, each in place of the other.
        """
        with failure_known_to_all(self._comm):
            *grads, order, told = arrays
            plan = self._plan(order, told)
        received = send_grads(plan, grads)
        with failure_known_to_all(self._comm):
            outputs.give_several(0, received)

    def _plan(self, order: Array, told: Array) -> AllToAllPlan:
        none = np.zeros(len(self._static), np.int64)  # on one rank nobody counts
        return AllToAllPlan.restore(self.backend, self._comm, told, order.astype(np.int32), none)

    def _tables(self, specs: list[TableSpec]) -> list[Any]:
        return live_tables([spec.variable for spec in specs])
