"""The tables of a `Variable` in the store of its layer, where Keras saves it; bridge/stored.py."""

from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from sok_lite.bridge.checkpoint import saved_dtypes
from sok_lite.bridge.stored import read_tensors, write_tensors

# Whether the other ranks save their tables as well.
all_ranks_save: ContextVar[bool] = ContextVar("all_ranks_save", default=False)


def save_rows(params: Any, store: MutableMapping[str, Any]) -> None:
    """Writes rows, states and status of a `Variable` to a store.

    Args:
      params: the variable.
      store: takes arrays by name.
    """
    for prefix, table in _tables(params).items():
        write_tensors(store, table.saved_tensors(), prefix)


def load_rows(params: Any, store: Mapping[str, Any]) -> None:
    """Makes a `Variable` what `save_rows` wrote. Other keys go.

    Raises:
      ValueError: something is missing or is not of such a variable; it is as it was.
    """
    tables = _tables(params)
    tensors = {
        prefix: read_tensors(store, _saved_dtypes(table), params.name, prefix)
        for prefix, table in tables.items()
    }
    for prefix, table in tables.items():
        table.restore_tensors(tensors[prefix])


def _tables(params: Any) -> dict[str, Any]:
    """Returns the tables of a variable, each by what its names begin with."""
    if not params.checkpoint:
        return {}
    policy = params.restrict_policy
    status = {} if policy is None else {"status_": policy.status.rows}
    return {"rows_": params.rows, **status}


def _saved_dtypes(table: Any) -> dict[str, tf.DType]:
    texts = {"texts": tf.string} if table.key_dtype == tf.string else {}
    return saved_dtypes(table.key_type, table.dtype) | texts
