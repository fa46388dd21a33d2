"""Some rows of a table as a dense variable, and back: static and dynamic mode.

In static mode the variable is what any tf.Variable of shape [n, dimension] is: row i is that of the
i-th of its n keys. TensorFlow's own optimizers and operators read and write an
inner variable, whose handle the table's variable then shows. Back in dynamic mode the rows are
written to the table by key. Meanwhile the table is not to be used by key: what it holds of those
rows is old, and would be overwritten.

A mode belongs to where it was entered: to eager mode, or to one graph. So a tf.function that enters
and leaves it does so in each call, and a trace that fails leaves no mode behind.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.backend.publish import plan_set, publish
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.inference import AS_USUAL
from sok_lite.bridge.refusals import READS, WRITES, refuse_step
from sok_lite.bridge.table_call import table_call, to_rows
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.bridge.tf_private import (
    LOOKUP_IN_A_LIST,
    ResourceVariable,
    callers,
    graphs_around,
    kept_by,
)
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.dedup import unique
from sok_lite.engine.table import EmbeddingTable

# An attribute of graphs: the rows of variables that are static in it, by the variables' numbers.
# The rows refer to tensors of the graph, so a variable that kept them would keep the graph.
_STATIC = "_sok_lite_static"

# What a dense variable does and a table refuses: in static mode the inner variable does it, but for
# what is of TF1 alone.
_OF_TF1 = {"count_up_to", "load", "initialized_value"}
DENSE = {*READS, *WRITES, "read_value_no_copy", "_dense_var_to_tensor"} - _OF_TF1


class _Static(NamedTuple):
    """The keys and rows of a variable while it is static.

    Attributes:
      keys: (n,) integers.
      rows: the inner variable, (n, dimension).
    """

    keys: tf.Tensor
    rows: Any


def by_row_number(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that is, in static mode, that of a tf.Variable of the same name."""

    @functools.wraps(method)
    def either(self: "WithStaticRows", *args: Any, **kwargs: Any) -> Any:
        rows = self.static_rows
        if rows is None:
            return method(self, *args, **kwargs)
        result = getattr(rows, method.__name__)(*args, **kwargs)
        return self if result is rows else result

    return either


class WithStaticRows(TableVariable):
    """A variable of a table with a static mode; see the head of this file."""

    _eager_static: _Static | None = None

    def is_static(self) -> bool:
        """Whether the variable stands for the dense rows of some keys now."""
        return self.static_rows is not None

    def to_static(self, indices: Any) -> Any:
        """Makes the variable a dense one of shape [n, dimension]: the rows of n keys, in order.

        Any TensorFlow optimizer may then train rows 0 to n - 1, and `tf.gather`, `value` and the
        like read them, until `to_dynamic` writes them back. Keys without a row are inserted, as by
        a lookup. What goes by key raises meanwhile. Nothing is communicated: the keys are those of
        this rank's part. Within a tf.function or a graph of TF1 call both there: the mode is that
        of the function. In a graph of TF1, what uses the rows has to wait for the operation.

        Args:
          indices: (n,) integer keys; none may repeat.

        Returns:
          None in eager mode, the operation in a graph.

        Raises:
          RuntimeError: it is static already.
          TypeError: keys are no integers.
          ValueError: a key repeats or does not fit the key type, or they have another shape.
            Nothing has changed.
        """
        if self.is_static():
            raise RuntimeError(
                f"to_static() must be called in dynamic mode. {self.name!r} is static already: "
                "call to_dynamic() first."
            )
        keys = checked_keys(self, indices)
        if keys.shape.rank not in (1, None):
            raise ValueError(
                f"to_static() of {self.name!r} takes keys of shape (n,). "
                f"Received: shape {keys.shape}."
            )
        keys = tf.ensure_shape(keys, [None]) if keys.shape.rank is None else keys
        (rows,) = table_call(
            self,
            f"to_static() of {self.name!r}",
            _row_reader(self.dtype),
            inputs=[keys],
            dtypes=[self.dtype],
            shapes=[[keys.shape[0], self.dimension]],
        )
        self._is_ever_static = True
        if tf.executing_eagerly():
            dense = tf.Variable(rows, trainable=self.trainable, name=_STATIC[1:])
            # TensorFlow's eager operators read `_handle` without asking this class.
            publish(plan_set(self, _eager_static=_Static(keys, dense), _handle=dense.handle))
            return None
        dense = self._rows_of_graph()
        assigned = dense.assign(rows, read_value=False)
        of_graph = kept_by(tf.compat.v1.get_default_graph(), _STATIC, dict)
        of_graph[self._trace_id] = _Static(keys, dense)
        return assigned

    def to_dynamic(self) -> Any:
        """Writes the rows back to the table, by key, and ends the static mode.

        No row is lost: a key that was evicted meanwhile is inserted again. What a "hybrid" table
        does with keys that it has no room for is said by its option `on_refused`.

        Returns:
          None in eager mode, the operation in a graph: it reads the rows when it runs, so let it
          wait for what changes them (a tf.function does so by itself).

        Raises:
          RuntimeError: it is not static, or was made so elsewhere: in eager mode, in another
            tf.function or graph.
          MemoryError: no memory for keys that are inserted. It is static as before.
        """
        if tf.executing_eagerly():
            static = self._eager_static
            if static is None:
                raise RuntimeError(f"to_dynamic() must be called in static mode. {self._advice()}")
            on_device(self._table.backend, _write, self._table, static.keys, static.rows.value())
            publish(plan_set(self, _eager_static=None, _handle=self._refusing_handle))
            # A function that was traced meanwhile keeps the inner variable: it is to find no row.
            nothing = tf.zeros([0, self.dimension], self.dtype)
            tf.raw_ops.AssignVariableOp(resource=static.rows.handle, value=nothing)
            return None
        of_graph = getattr(tf.compat.v1.get_default_graph(), _STATIC, {})
        static = of_graph.pop(self._trace_id, None)
        if static is None:
            raise RuntimeError(f"to_dynamic() must be called in static mode. {self._advice()}")
        try:
            what = f"to_dynamic() of {self.name!r}"
            return table_call(self, what, _write, [static.keys, static.rows.read_value()])
        except BaseException:
            of_graph[self._trace_id] = static
            raise

    def _advice(self) -> str:
        return (
            f"Call to_static(keys) of {self.name!r} before, and both in eager mode or both in the "
            "same tf.function or graph."
        )

    def _rows_of_graph(self) -> Any:
        """Makes the inner variable of a graph, which takes rows of any number."""
        with tf.init_scope():
            in_v1_graph = not tf.executing_eagerly()
            # Neither trained nor saved by those who go through the collections of a TF1 graph.
            return ResourceVariable(
                functools.partial(tf.zeros, [0, self.dimension], self.dtype),
                trainable=self.trainable and not in_v1_graph,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES] if in_v1_graph else None,
                name=_STATIC[1:],
                dtype=self.dtype,
                shape=[None, self.dimension],
            )

    # ---------------------------------------------------------------- what the mode changes

    @property
    def static_rows(self) -> Any:
        """The inner variable while the variable is static, else None."""
        static = self._static()
        return None if static is None else static.rows

    @property
    def static_keys(self) -> tf.Tensor | None:
        """The keys while the variable is static, (n,), else None."""
        static = self._static()
        return None if static is None else static.keys

    def _static(self) -> _Static | None:
        if not self._is_ever_static:
            return None
        if not tf.executing_eagerly():
            for graph in graphs_around():
                found: _Static | None = getattr(graph, _STATIC, {}).get(self._trace_id)
                if found is not None:
                    return found
        return self._eager_static

    @property
    def table(self) -> EmbeddingTable:
        """The engine's table. Whatever goes by key asks for it, and is refused in static mode."""
        if self._is_ever_static and self.is_static():
            raise RuntimeError(
                f"{self.name!r} is in static mode: its rows are known by their number, not by key, "
                "and the table has old ones. Call to_dynamic() before anything that goes by key; "
                "tf.gather(variable, numbers) reads rows by number."
            )
        return self._table

    @property
    def handle(self) -> tf.Tensor:
        """The resource that tapes and graphs know the table, or the dense rows, by."""
        rows = self.static_rows
        if rows is None:
            refuse_step(self.name, self.kind)
            return super().handle
        return rows.handle

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dimension]; [n, dimension] in static mode, as far as it is known."""
        rows = self.static_rows
        if rows is None:
            refuse_step(self.name, self.kind)
            return tf.TensorShape([None, self.dimension])
        return rows.shape

    def __getitem__(self, slice_spec: Any) -> Any:
        rows = self.static_rows
        if rows is None:
            self._refuse_dense("__getitem__")
        return rows[slice_spec]

    def sparse_read(
        self,
        indices: Any,
        name: str | None = None,
        training: bool | None = None,
        missing: str | None = None,
    ) -> tf.Tensor:
        rows = self.static_rows
        if rows is None:
            return super().sparse_read(indices, name, training, missing)
        if training is not None or missing is not None or _is_embedding_lookup():
            _ = self.table  # raises
        return rows.sparse_read(indices, name)

    sparse_read.__doc__ = TableVariable.sparse_read.__doc__


for _name in DENSE:
    setattr(WithStaticRows, _name, by_row_number(getattr(TableVariable, _name)))


def _is_embedding_lookup() -> bool:
    """Whether `tf.nn.embedding_lookup` calls: its ids are meant as keys, not as row numbers."""
    nearest = itertools.islice(callers(), 1, 17)
    return any(frame.f_code.co_name == LOOKUP_IN_A_LIST[1] for frame in nearest)


def _row_reader(dtype: tf.DType) -> Callable[..., Sequence[tf.Tensor]]:
    def run(table: EmbeddingTable, key_tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        backend, name = table.backend, table.name
        keys = to_array(key_tensor, backend)
        n = int(keys.size)
        as_int64 = table.key_dtype.to_int64(backend.xp, keys, f"keys of table {name!r}")
        num_distinct = int(unique(backend, as_int64).unique_keys.size)
        if num_distinct != n:
            raise ValueError(
                f"to_static() of table {name!r} takes each key once: its row would else be there "
                f"several times, and be trained apart. Received: {n} keys, of which {num_distinct} "
                "are distinct. Give tf.unique(keys).y, and train the rows of its idx."
            )
        rows = empty((n, table.dim), dtype, backend)
        # Never zeros: they would be written back.
        table.lookup(keys, out=rows, unique_keys=True, insert=AS_USUAL.now()[0])
        return (to_tensor(rows, dtype, backend),)

    return run


def _write(table: EmbeddingTable, keys: tf.Tensor, rows: tf.Tensor) -> Sequence[tf.Tensor]:
    table.insert_or_assign(to_array(keys, table.backend), to_rows(rows, table))
    return ()
