"""A lookup over all ranks in static tables, whose rows TensorFlow reads.

The rows are in TensorFlow's variables, which only TensorFlow's operations read without a copy of
all of them. So such a lookup is two host calls: the first sends the keys and says which rows this
rank is asked for; the second is given them. What TensorFlow reads has TensorFlow's own gradient,
so optimizers see the gradient of any other variable.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.host_numbers import HostNumbers
from sok_lite.bridge.joined import Numbers, cut, joined_weights
from sok_lite.bridge.keras.guard import refuse_custom_step
from sok_lite.bridge.lookup_arguments import Argument, TableSpec, joined_inputs
from sok_lite.bridge.pooled_call import PooledCall
from sok_lite.bridge.static_host import StaticHost
from sok_lite.bridge.type_spec import alive
from sok_lite.comm import Communicator
from sok_lite.engine.failure import failure_known_to_all


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
    of_call = [each.spec for each in arguments]
    host = StaticHost(comm, [each.spec for each in static], of_call, what)
    inputs, batches = joined_inputs(static)
    dtypes = [tf.int64, tf.int64, tf.int32] + [tf.int64] * (comm.size > 1)
    weights = [each.weights for each in static if each.weights is not None]
    items = [HostNumbers(inputs[0]), *inputs[1:], *joined_weights(weights)]
    lengths, places, *told = host_call(
        host.locate,
        items,
        dtypes,
        host.backend,
        host.what,
        collective=host.collective,
        counts=len(static),
    )
    if not tf.executing_eagerly():
        lengths.set_shape([len(static)])
        for each in (places, *told):
            each.set_shape([None])
    # Eagerly, the other ranks wait for the rows already; in a graph nothing is read yet.
    known = failure_known_to_all(comm) if tf.executing_eagerly() else contextlib.nullcontext()
    with known:
        pieces = zip(host.tables, cut(places, lengths, len(static)), strict=True)
        rows = [_read_rows(spec, piece) for spec, piece in pieces]
    return _StaticLookup(rows, told, host, static, inputs, batches).outputs()


def _read_rows(spec: TableSpec, places: tf.Tensor) -> tf.Tensor:
    variable = alive(spec.variable)
    refuse_custom_step(variable)
    if not tf.executing_eagerly():
        variable.free_with_its_variable()
    rows = tf.gather(variable, places)
    rows.set_shape([None, spec.dim])
    return rows


class _StaticLookup(PooledCall):
    """A call for static tables: the gradients are by the rows that were read, in their order.

    Args:
      rows: of each table, those.
      told: what else the host's `locate` gave for its `forward`.
      call: see PooledCall.
    """

    def __init__(self, rows: list[tf.Tensor], told: Sequence[tf.Tensor], *call: Any) -> None:
        super().__init__(*call)
        self._rows, self._told = rows, told

    def sources(self) -> list[tf.Tensor]:
        return self._rows

    def beside(self, sources: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        number, *sent = self._told
        return [*sent, number, *sources]

    def by_sources(
        self, lengths: Numbers, row_grads: Sequence[tf.Tensor], more: Sequence[tf.Tensor]
    ) -> list[Any]:
        pairs = zip(self.tables, row_grads, strict=True)
        return [tf.cast(grads, table.dtype) for table, grads in pairs]

    def rows_behind(self, number: int, source: tf.Tensor) -> tuple[Any, Callable[[], Any] | None]:
        return source, None
