"""Lookups of rows in this rank's table, with gradients: `tf.nn.embedding_lookup` and similar."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge import lookup_gradient  # noqa: F401 it registers the gradient
from sok_lite.bridge.access import accessed
from sok_lite.bridge.checks import checked_keys, refuse_partitions
from sok_lite.bridge.inference import (
    AS_USUAL,
    MissingKeyPolicy,
    checked_missing,
    checked_training,
    pipeline_of_trace,
)
from sok_lite.bridge.native_lookup import are_native, part_of
from sok_lite.bridge.operation import EagerOperation, Facts, Outputs, Run, operation
from sok_lite.bridge.serving.mode import dispatch_lookup, is_exporting
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.counters import Count
from sok_lite.engine.table.find import continue_lookup
from sok_lite.engine.work_counters import GRADIENTS, LOOKUPS
from sok_lite.native.plans import LookupPlan


def local_lookup(
    variable: Any, keys: Any, policy: MissingKeyPolicy = AS_USUAL, counts: Any = None
) -> tf.Tensor:
    """Returns the rows of keys in this rank's table. No communication.

    Args:
      keys: integers of any shape.
      counts: int64 of the keys' shape, occurrences of each key; None: 1.

    Returns:
      keys.shape + [dimension], of the rows' dtype. The gradient is an IndexedSlices of the flat
      keys, with float32 rows.

    Raises:
      TypeError: keys are not integers.
      ValueError: a key does not fit the key type, or the variable is one of a list.
    """
    refuse_partitions(variable)
    checked = checked_training(policy.training), checked_missing(policy.missing)
    policy = MissingKeyPolicy(*checked, *policy[2:])
    if counts is None and tf.executing_eagerly() and not is_exporting():
        keys = checked_keys(variable, keys)
        run = variable.kept.get_or_make(
            (policy, variable.trainable), partial(_eager_lookup, variable, policy)
        )
        return run(accessed([variable]), [keys])[0]
    others = [] if counts is None else [tf.convert_to_tensor(counts, tf.int64)]
    look_up, plan = _build_lookup(variable, policy, has_counts=counts is not None)

    def live(keys: tf.Tensor) -> Sequence[tf.Tensor]:
        return _operation(variable, look_up, [keys, *others], [variable.dtype], [], plan)

    reference = weakref.ref(variable)

    def plain(tables: Any, keys: tf.Tensor) -> Sequence[tf.Tensor]:
        return tables.read(alive(reference), keys, policy)[:1]

    keys = checked_keys(variable, keys)
    (rows,) = dispatch_lookup(_name_of(variable), live, plain, [keys])
    return rows


def _name_of(variable: Any) -> str:
    return f"A lookup in {variable.name!r}"


def _build_lookup(
    variable: Any, policy: MissingKeyPolicy, has_counts: bool
) -> tuple[Callable[..., None], LookupPlan | None]:
    """Returns a lookup in Python and its native plan, for `_operation`. Neither holds a table."""
    dim, pipeline = variable.dimension, pipeline_of_trace()

    def look_up(table: EmbeddingTable, outputs: Outputs, keys: Array, *counts: Array) -> None:
        insert, missing = policy.now([table], pipeline)
        rows = outputs.empty(0, (*keys.shape, dim)).reshape(-1, dim)
        begun = outputs.begun((1, len(Count)), int(keys.size), table.backend)
        if begun is not None:
            continue_lookup(table, keys.reshape(-1), rows, begun, missing)
            return
        counted = {"counts": counts[0].reshape(-1)} if counts and insert else {}
        table.lookup(keys.reshape(-1), out=rows, insert=insert, missing=missing, **counted)

    table = variable.table
    if has_counts or not are_native([table]):
        return look_up, None
    part = part_of(table, variable.key_type)
    works, now = (LOOKUPS, GRADIENTS), policy.planned(pipeline)
    return look_up, LookupPlan(table.backend, False, *works, now, (part,))


def _eager_lookup(variable: Any, policy: MissingKeyPolicy) -> EagerOperation:
    """Returns a lookup of rows in eager mode, for reuse."""
    look_up, plan = _build_lookup(variable, policy, has_counts=False)
    run, facts = _run(variable, look_up, 1), Facts.of_variables([variable])
    of_run = (run, [variable.dtype], variable.table.backend, _name_of(variable), facts, LOOKUPS)
    return EagerOperation("sok_lookup", *of_run, plan=plan)


def local_lookup_and_evict(variable: Any, keys: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Looks up like `local_lookup`; also returns (m,) evicted keys and (m, dimension) rows."""
    dim, dtype, key_type = variable.dimension, variable.dtype, variable.key_type
    pipeline = pipeline_of_trace()

    def look_up(table: EmbeddingTable, outputs: Outputs, keys: Array) -> None:
        insert, missing = AS_USUAL.now([table], pipeline)
        rows, flat = outputs.empty(0, (*keys.shape, dim)).reshape(-1, dim), keys.reshape(-1)
        if insert:
            _, (evicted_keys, evicted_rows, _) = table.lookup_and_evict(flat, out=rows)
            outputs.give(1, evicted_keys)
            outputs.give(2, evicted_rows)
        else:
            table.lookup(flat, out=rows, insert=insert, missing=missing)
            outputs.empty(1, (0,))
            outputs.empty(2, (0, dim))

    keys = checked_keys(variable, keys)
    dtypes, shapes = [dtype, key_type, dtype], [[None], [None, dim]]
    rows, evicted_keys, evicted_rows = _operation(variable, look_up, [keys], dtypes, shapes)
    return rows, evicted_keys, evicted_rows


def _operation(
    variable: Any,
    look_up: Callable[..., None],
    inputs: Sequence[tf.Tensor],
    dtypes: list[tf.DType],
    other_shapes: list[list[int | None]],
    plan: LookupPlan | None = None,
) -> list[tf.Tensor]:
    """Adds a lookup: keys.shape + [dimension] rows, which have a gradient, and more outputs.

    `look_up` takes the engine's table, the outputs, and the inputs as arrays; keys come first.
    `dtypes` are of all outputs, `other_shapes` of those after the rows.
    """
    outputs: list[tf.Tensor] = operation(
        "sok_lookup",
        accessed([variable]),
        _run(variable, look_up, len(inputs)),
        [*inputs, *variable.ready_inputs()],
        dtypes,
        variable.table.backend,
        _name_of(variable),
        Facts.of_variables([variable]),
        LOOKUPS,
        plan=plan,
    )
    if not tf.executing_eagerly():
        shapes = [inputs[0].shape.concatenate([variable.dimension]), *other_shapes]
        for output, shape in zip(outputs, shapes, strict=True):
            output.set_shape(shape)
    return outputs


def _run(variable: Any, look_up: Callable[..., None], num_inputs: int) -> Run:
    """Returns the callback of an operation, which passes its first inputs to `look_up`."""
    reference = weakref.ref(variable)

    def run(outputs: Outputs, arrays: list[Array]) -> None:
        look_up(alive(reference).table, outputs, *arrays[:num_inputs])

    return run
