"""Rows of a KvVariable are read: its methods."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge import job
from sok_lite.bridge.checks import check_cutoff
from sok_lite.bridge.graph_gradient import custom_gradient
from sok_lite.bridge.lookup import look_up_each
from sok_lite.bridge.row_gradient import gradient_shape
from sok_lite.bridge.table_call import array_call, method_call
from sok_lite.engine.table import EmbeddingTable
from sok_lite.kv_variable.saved_tensors import CUTOFF

if TYPE_CHECKING:
    from sok_lite.kv_variable.kv_variable_ops import KvVariable


def sparse_read(
    variable: "KvVariable",
    indices: Any,
    name: str | None = None,
    training: bool | None = None,
    missing: str | None = None,
) -> tf.Tensor:
    """Returns the rows of keys, indices.shape + [dim]; see the class.

    Args:
      indices: integers of any shape.
      training: whether new keys are inserted; None: see the class.
      missing: what a key without a row gives, "initial" or "zeros"; None: where keys are
        inserted "initial", else "zeros".
    """
    return look_up_each(job.other_ranks(), variable, indices, variable.policy(training, missing))


def sparse_read_with_counts(
    variable: "KvVariable",
    indices: Any,
    counts: Any,
    name: str | None = None,
    training: bool | None = None,
) -> tf.Tensor:
    """Returns the rows of keys, each of which counts as seen several times.

    Args:
      indices: integers of any shape.
      counts: integers of that shape, from 1 on.

    Raises:
      NotImplementedError: in a job of several ranks.
    """
    if job.other_ranks() is not None:
        raise NotImplementedError(
            f"sparse_read_with_counts of {variable.name!r} works on one rank: counts do not travel "
            "with keys. Use sparse_read, which counts a key once for each rank that has it."
        )
    counts = tf.cast(counts, tf.int64)
    return look_up_each(None, variable, indices, variable.policy(training), counts)


def value(variable: "KvVariable") -> tf.Tensor:
    """Returns all rows, (n, dim), those of ascending keys, with a gradient."""
    dim = variable.dimension  # no closure holds the variable: a graph would keep it
    dtypes, shapes = [variable.key_type, variable.dtype], [[None], [None, dim]]
    what, share, ready = f"The value of {variable.name!r}", variable.share, variable.ready_inputs()

    def run(table: EmbeddingTable, *_: Array) -> tuple[Array, Array]:
        return share.exported(table, None)

    @custom_gradient
    def read(source: tf.Tensor) -> Any:
        keys, rows = array_call(variable, what, run, ready, dtypes, shapes)

        def grad(row_grads: tf.Tensor) -> tf.IndexedSlices:
            values = tf.cast(row_grads, tf.float32)
            return tf.IndexedSlices(values, keys, gradient_shape(dim))

        return rows, grad

    return read(variable.gradient_source())


def export(
    variable: "KvVariable", name: str | None = None, cutoff: float | None = CUTOFF
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all keys, ascending, and their rows: (n,) of the key type, (n, dim).

    Args:
      cutoff: keys are left out of whose row now every |element| is below it; None: none.
    """
    check_cutoff(cutoff)
    share = variable.share
    keys, rows = method_call(
        variable,
        "export",
        lambda table: share.exported(table, cutoff),
        [],
        [variable.key_type, variable.dtype],
        [[None], [None, variable.dimension]],
    )
    return keys, rows
