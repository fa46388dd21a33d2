"""Lookups in the tables of all ranks, and their gradients, for TensorFlow."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge import static_lookup
from sok_lite.bridge.access import accessed
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.local_lookup import local_lookup
from sok_lite.bridge.lookup_arguments import Argument, TableSpec, checked_arguments
from sok_lite.bridge.lookup_inputs import inputs_of
from sok_lite.bridge.operation import EagerOperation, Facts, operation
from sok_lite.bridge.pooled_lookup import PooledLookup
from sok_lite.bridge.serving.mode import dispatch_lookup, is_exporting
from sok_lite.bridge.serving.pooled import look_up_served, tensors_of
from sok_lite.bridge.sparse_matrix import clipped, combine_rows, values_of
from sok_lite.bridge.type_spec import alive
from sok_lite.comm import Communicator
from sok_lite.engine.work_counters import LOOKUPS


def look_up(
    comm: Communicator, arguments: list[Argument], policy: MissingKeyPolicy
) -> list[tf.Tensor]:
    """Looks up and combines rows of the tables of all ranks. Every rank must call it.

    One operation forward and one backward. Static tables come first, by TensorFlow's own
    operations; on several ranks they have two and one of ours.

    Args:
      arguments: one per table, at least one.

    Returns:
      One (batch, dimension) tensor per table, of its rows' dtype, with gradients of tables and
      weights.
    """
    tables = tuple([argument.spec for argument in arguments])
    are_static = [table.is_static for table in tables]
    if tf.executing_eagerly() and not is_exporting() and True not in are_static:
        return _run_lookup(comm, arguments, tables, policy)
    what, batches = _name_of(tables), [argument.batch for argument in arguments]

    def live(*_: tf.Tensor) -> list[tf.Tensor]:
        if True not in are_static:
            return _add_lookup(comm, arguments, policy, what)
        # Before any table changes: a static lookup raises for a missing row.
        static = static_lookup.look_up(comm, arguments, what)
        growing = [argument for argument in arguments if not argument.spec.is_static]
        with tf.control_dependencies([] if tf.executing_eagerly() else static):
            others = _add_lookup(comm, growing, policy, what) if growing else []
        of_static, of_growing = iter(static), iter(others)
        return [next(of_static if is_static else of_growing) for is_static in are_static]

    def plain(served: Any, *tensors: tf.Tensor) -> list[tf.Tensor]:
        return look_up_served(served, tables, batches, policy, comm.size > 1, *tensors)

    return list(dispatch_lookup(what, live, plain, tensors_of(arguments)))


def _name_of(tables: Sequence[TableSpec]) -> str:
    return f"lookup_sparse in {', '.join(repr(table.name) for table in tables)}"


def _add_lookup(
    comm: Communicator, arguments: list[Argument], policy: MissingKeyPolicy, what: str
) -> list[tf.Tensor]:
    """Adds the operation of `look_up` for dynamic tables."""
    tables = [argument.spec for argument in arguments]
    variables = [alive(table.variable) for table in tables]
    inputs, numbers = inputs_of(arguments)
    lookup = PooledLookup(comm, tables, policy, what)
    outputs = operation(
        "sok_lookup",
        accessed(variables),
        lookup.forward,
        [*inputs, *(each for variable in variables for each in variable.ready_inputs())],
        lookup.dtypes,
        lookup.backend,
        what,
        Facts.of_variables(variables),
        LOOKUPS,
        numbers=numbers,
        num_told=1,
        gradient=lookup.gradient,
        collective=lookup.collective,
        plan=lookup.plan,
    )
    return lookup.pooled(outputs, [argument.batch for argument in arguments])


def _eager_lookup(
    comm: Communicator, tables: Sequence[TableSpec], policy: MissingKeyPolicy
) -> tuple[PooledLookup, EagerOperation]:
    """Returns a lookup in eager mode, for reuse. The operation holds it, never the reverse."""
    what = _name_of(tables)
    lookup = PooledLookup(comm, tables, policy, what)
    facts = Facts.of_variables([alive(table.variable) for table in tables])
    of_run = (lookup.forward, lookup.dtypes, lookup.backend, what, facts, LOOKUPS, 1)
    return lookup, EagerOperation("sok_lookup", *of_run, plan=lookup.plan)


def _run_lookup(
    comm: Communicator,
    arguments: list[Argument],
    tables: tuple[TableSpec, ...],
    policy: MissingKeyPolicy,
) -> list[tf.Tensor]:
    """Runs `look_up` in eager mode, for dynamic tables."""
    variables = [alive(table.variable) for table in tables]
    lookup, run = variables[0].kept.get_or_make(
        (comm, tables, policy), partial(_eager_lookup, comm, tables, policy)
    )
    outputs = run(accessed(variables), *inputs_of(arguments))
    return lookup.pooled(outputs, ())


def look_up_each(
    comm: Communicator | None, variable: Any, ids: Any, policy: MissingKeyPolicy, counts: Any = None
) -> tf.Tensor:
    """Returns the rows of keys in the tables of all ranks. Every rank must call it.

    Args:
      comm: the ranks; None: look up in this rank's table only.
      ids: integers of any shape.
      counts: only without `comm`, int64 of the ids' shape, occurrences of each id; None: 1.

    Returns:
      ids.shape + [dimension] of the rows' dtype, with a gradient of the variable.
    """
    if comm is None:
        return local_lookup(variable, ids, policy, counts)
    ids = checked_keys(variable, ids)
    arguments = checked_arguments([variable], [tf.reshape(ids, [-1])], None, "sum", comm.size)
    rows = look_up(comm, arguments, policy)[0]
    result = tf.reshape(rows, tf.concat([tf.shape(ids), [variable.dimension]], 0))
    return tf.ensure_shape(result, ids.shape.concatenate([variable.dimension]))


def look_up_combined(
    comm: Communicator,
    variable: Any,
    matrix: Any,
    weights: Any,
    combiner: str,
    policy: MissingKeyPolicy,
    max_norm: float | None,
    read: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Looks up the keys of a sparse matrix and combines the rows of each matrix row.

    Args:
      variable: a table, which combines the rows itself if it can; None: it cannot.
      matrix: keys (batch, None), ragged or sparse.
      weights: a matrix with rows of the same lengths; None: all are 1.
      combiner: "mean", "sqrtn" or "sum".
      max_norm: norm to which rows are clipped before they are combined; None: no clipping.
      read: maps keys (n,) to rows; used where the table does not combine them.

    Returns:
      (batch, dimension), float32 for rows of float16 and bfloat16; zeros for a row without keys.
    """
    # 16-bit rows are combined in float32; a table would round the result.
    if variable is None or max_norm is not None or variable.dtype != tf.float32:
        rows = clipped(read(values_of(matrix)), max_norm)
        return combine_rows(rows, matrix, weights, combiner)
    arguments = checked_arguments([variable], [matrix], weights, combiner, comm.size)
    return look_up(comm, arguments, policy)[0]
