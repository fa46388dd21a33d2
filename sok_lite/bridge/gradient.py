"""The gradient of `lookup_sparse` as something that has gradients itself, of every order.

An output is C(P(E), w): P brings the rows E of keys to the ranks that asked, C multiplies them with
weights w, sums and divides. Of a gradient G of the outputs the lookup makes R, by rows, and W, by
weights. What arrives for those two, r and v, makes one number,

  <R, r> + <W, v>  =  <G, C(P(r), w) + derivative of C(P(E), w) by w, in the direction v>

whose derivatives by G, w and E are what is asked for. Written in TensorFlow's own operators around
P and its transpose, it can be derived as often as one likes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from sok_lite.bridge.graph_gradient import custom_gradient
from sok_lite.bridge.lookup_arguments import Facts
from sok_lite.bridge.tf_private import could_possibly_record

Tensors = Sequence[tf.Tensor]


class Items(NamedTuple):
    """What one table's part of a batch is made of.

    Attributes:
      inverse: (n,) int64, which of the distinct keys each item asks for.
      batch_rows: (n,) int64, the row of the batch that it belongs to.
      source: (u, dim) float32, the rows of the distinct keys; None where there are no weights.
    """

    inverse: tf.Tensor
    batch_rows: tf.Tensor
    source: tf.Tensor | None


class Trips(Protocol):
    """The way of a lookup's keys, as the host knows it: see `engine.trips`.

    Attributes:
      tables: what is known of them.
      carried: tensors that are needed to call the host. A derivative may lie in another graph than
        what it derives, and knows of that only what went through `tf.custom_gradient`.
    """

    tables: list[Facts]
    carried: list[tf.Tensor]

    def carrying(self, carried: Tensors) -> "Trips":
        """Returns the same way with these for `carried`."""
        ...

    def spread(self, rows: Tensors) -> Tensors: ...

    def collect(self, rows: Tensors) -> Tensors: ...

    def items(self) -> list[Items]: ...

    def source(self, table: int) -> Any:
        """Returns what a gradient tape knows the rows of a table by."""
        ...

    def gradient(self, table: int, rows: tf.Tensor) -> Any:
        """Returns the gradient of a source, of (k, dim) rows."""
        ...


def with_gradients(
    trips: Trips, out_grads: Tensors, weights: Tensors, gradients: Tensors
) -> list[tf.Tensor]:
    """Returns the gradients of a lookup as they are, but such that they have gradients.

    Args:
      trips: the way of its keys.
      out_grads: (batch, dim) float32 per table, what the gradients were made of.
      weights: (n,) float32 for each table that has them.
      gradients: row gradients of all tables, then weight gradients of those that have weights.
    """
    if tf.executing_eagerly() and not could_possibly_record():
        return list(gradients)  # no tape would see it, and it takes 100 microseconds
    num_tables, weighted = len(trips.tables), _weighted(trips)

    def derive(trips: Trips, *inputs: Any) -> Any:
        out_grads, weights = inputs[:num_tables], inputs[num_tables:][: len(weighted)]

        def second(*arrived: tf.Tensor) -> Any:
            spread = _spread(trips, arrived[:num_tables])
            items = trips.items()
            rows = _source_rows(trips, items, spread)
            known = [*out_grads, *weights, *rows]
            with tf.GradientTape() as tape:
                tape.watch(known)
                numbers = []
                for i, table in enumerate(trips.tables):
                    n = weighted.index(i) if table.has_weights else None
                    weight = None if n is None else weights[n]
                    pooling = _Pooling(items[i], weight, table.combiner, out_grads[i])
                    direction = pooling.of(spread[i])
                    if n is not None:
                        direction += pooling.by_weights(rows[n], arrived[num_tables + n])
                    numbers.append(tf.reduce_sum(out_grads[i] * direction))
                number = tf.add_n(numbers)
            found = tape.gradient(number, known, unconnected_gradients="zero")
            found = _all_dense(found, known)
            num_dense = num_tables + len(weighted)
            return *found[:num_dense], *_by_sources(trips, found[num_dense:], spread)

        return gradients, second

    # Without weights a gradient does not depend on the rows.
    sources = [trips.source(i) for i in weighted]
    return _with_gradient(trips, derive, [*out_grads, *weights, *sources])


def _weighted(trips: Trips) -> list[int]:
    """Returns the numbers of the tables that have weights."""
    return [i for i, table in enumerate(trips.tables) if table.has_weights]


def _with_gradient(
    trips: Trips, function: Callable[..., Any], inputs: Sequence[Any]
) -> list[tf.Tensor]:
    """Returns the tensors that `function(trips, *inputs)` gives.

    Args:
      function: gives tensors and a function from what arrives for them, dense, to the gradients of
        the inputs.
    """
    num_carried = len(trips.carried)

    @custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        # Tensors of their own: TensorFlow hands on what was given, tensors of another graph among
        # it; and of one that is given twice, a tape would know the sum of both gradients alone.
        tensors = tuple(x if x.dtype == tf.resource else tf.identity(x) for x in tensors)
        carried, inputs = tensors[:num_carried], tensors[num_carried:]
        results, grad = function(trips.carrying(carried), *inputs)

        def gradients(*arrived: Any) -> Any:
            return (*[None] * num_carried, *grad(*_all_dense(arrived, results)))

        return tuple(results), gradients

    return list(run(*trips.carried, *inputs))


class _Pooling:
    """C of a batch in TensorFlow's operators: `of` rows, and its derivative by the weights.

    As in the kernels, what is divided by 0 is 0.
    """

    def __init__(
        self, items: Items, weights: tf.Tensor | None, combiner: str, out_grads: tf.Tensor
    ) -> None:
        self._items, self._combiner = items, combiner
        self._weights = tf.ones_like(items.inverse, tf.float32) if weights is None else weights
        self._batch = tf.shape(out_grads, tf.int64)[0]
        self._divisor = self._root() if combiner == "sqrtn" else self._sum(self._weights)

    def of(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns (batch, dim) of (u, dim) rows."""
        return self._divided(self._sum(self._weights[:, None] * self._of_items(rows)))

    def by_weights(self, rows: tf.Tensor, direction: tf.Tensor) -> tf.Tensor:
        """Returns how `of(rows)` changes with the weights, in a direction (n,)."""
        change = self._sum(direction[:, None] * self._of_items(rows))
        if self._combiner == "sum":
            return change
        if self._combiner == "mean":
            slope = self._sum(direction)
        else:
            slope = tf.math.divide_no_nan(self._sum(self._weights * direction), self._divisor)
        return self._divided(change - slope[:, None] * self.of(rows))

    def _of_items(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.gather(rows, self._items.inverse)

    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(values, self._items.batch_rows, self._batch)

    def _divided(self, rows: tf.Tensor) -> tf.Tensor:
        if self._combiner == "sum":
            return rows
        return tf.math.divide_no_nan(rows, self._divisor[:, None])

    def _root(self) -> tf.Tensor:
        squares = self._sum(self._weights**2)
        # The root has no derivative at 0, where TensorFlow would make a NaN of it.
        is_some = squares > 0
        return tf.where(is_some, tf.sqrt(tf.where(is_some, squares, 1.0)), 0.0)


# ---- the trips, each the other's gradient --------------------------------------------------------


def _spread(trips: Trips, rows: Tensors) -> list[tf.Tensor]:
    def spread(trips: Trips, *rows: tf.Tensor) -> Any:
        return trips.spread(rows), lambda *arrived: _collect(trips, arrived)

    return _with_gradient(trips, spread, rows)


def _collect(trips: Trips, rows: Tensors) -> list[tf.Tensor]:
    def collect(trips: Trips, *rows: tf.Tensor) -> Any:
        return trips.collect(rows), lambda *arrived: _spread(trips, arrived)

    return _with_gradient(trips, collect, rows)


def _source_rows(trips: Trips, items: Sequence[Items], spread: Tensors) -> list[tf.Tensor]:
    """Returns the rows of the tables with weights, which tapes know to come from their sources.

    Args:
      spread: (u, dim) for every table, of which only the shapes count.
    """
    if not _weighted(trips):
        return []
    rows = [items[i].source for i in _weighted(trips)]

    def read(trips: Trips, *sources_and_spread: Any) -> Any:
        spread = sources_and_spread[len(rows) :]

        def grad(*arrived: tf.Tensor) -> Any:
            return (*_by_sources(trips, arrived, spread), *[None] * len(spread))

        return rows, grad

    sources = [trips.source(i) for i in _weighted(trips)]
    return _with_gradient(trips, read, [*sources, *spread])


def _by_sources(trips: Trips, by_rows: Tensors, spread: Tensors) -> list[Any]:
    """Returns the gradients of the sources of the tables with weights.

    Args:
      by_rows: (u, dim) for each of those.
      spread: as of `_source_rows`.
    """
    if not _weighted(trips):
        return []
    rows = dict(zip(_weighted(trips), by_rows, strict=True))
    travelling = [rows.get(i, tf.zeros_like(like)) for i, like in enumerate(spread)]
    collected = _collect(trips, travelling)
    return [trips.gradient(i, collected[i]) for i in _weighted(trips)]


def _all_dense(arrived: Sequence[Any], likes: Tensors) -> list[tf.Tensor]:
    return [_dense(x, like) for x, like in zip(arrived, likes, strict=True)]


def _dense(gradient: Any, like: tf.Tensor) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        size = tf.shape(like, tf.int64)[0]
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, size)
    return gradient
