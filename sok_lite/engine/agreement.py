"""Checks that all ranks have equal tables and make equal calls, once for each call."""

import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_lite.comm.protocol import Communicator, RanksDifferError, allgather_texts
from sok_lite.engine.static_table import AnyTable


def check_equal_on_all_ranks(comm: Communicator, description: dict[str, Any], what: str) -> None:
    """Raises on every rank if one rank's description differs. Every rank must call it.

    Args:
      description: field -> value, the first difference is reported; values that JSON does not know
        are compared by their repr.
      what: the subject of the error message, such as "table 'user'".

    Raises:
      RanksDifferError: a field differs; the message names the first such rank, the field and both
        values.
    """
    if comm.size == 1:
        return
    text = json.dumps(description, default=_plain)
    gathered = allgather_texts(comm, text, call="check_equal_on_all_ranks")
    mine, *others = map(json.loads, gathered)
    for rank, theirs in enumerate(others, start=1):
        for field in [*mine, *(field for field in theirs if field not in mine)]:
            a, b = (repr(x[field]) if field in x else "missing" for x in (mine, theirs))
            if a != b:
                raise RanksDifferError(
                    f"{what} must be the same on all ranks. Received: {field} is {a} on rank 0 and "
                    f"{b} on rank {rank}."
                )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else repr(value)


_agreed: "weakref.WeakKeyDictionary[Communicator, set[int | str]]" = weakref.WeakKeyDictionary()


def agree_on(comm: Communicator, description: dict[str, Any], what: str) -> None:
    """Does `check_equal_on_all_ranks` once per description. Every rank must call it."""
    agreed = _agreed.setdefault(comm.connection, set())
    text = json.dumps([what, description], default=_plain)
    if text not in agreed:
        check_equal_on_all_ranks(comm, description, what)
        agreed.add(text)


def agree(
    comm: Communicator, tag: int, tables: Sequence[AnyTable], combiners: Sequence[str]
) -> None:
    """Checks once per tag that all ranks make the same lookup. Every rank must call it.

    Raises:
      RanksDifferError: a rank has other tables, formats, owners of keys, seeds, initializers or
        combiners; on every rank.
    """
    agreed = _agreed.setdefault(comm.connection, set())
    if comm.size == 1 or tag in agreed:
        return
    description: dict[str, Any] = {"number of tables": len(tables)}
    for i, (table, combiner) in enumerate(zip(tables, combiners, strict=True)):
        facts = {
            "name": table.name,
            "var_type": table.var_type,
            "dimension": table.dim,
            "key_type": table.key_dtype.name,
            "dtype": table.row_dtype.name,
            "owner of keys": table.owner.name,
            "gradients sent as bfloat16": table.rounds_gradients,
            "combiner": combiner,
            **table.options_of_all_ranks(),
        }
        if table.owner.only_rank is None:  # else one rank alone initializes rows
            facts |= {"seed": table.seed, "initializer": repr(table.initializer)}
        description |= {f"{name} of table {i}": value for name, value in facts.items()}
    check_equal_on_all_ranks(comm, description, "A lookup")
    agreed.add(tag)
