"""What several ranks have saved of a table, put together for one rank of any number."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from sok_lite.bridge.checkpoint import as_arrays
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import (
    concatenate,
    from_named_arrays,
    named_arrays,
    owned_by,
    owns,
)

Tensors = Mapping[str, tf.Tensor]


def part_of_rank(
    parts: Sequence[Tensors], table: EmbeddingTable, rank: int, size: int
) -> dict[str, tf.Tensor]:
    """Returns what a rank is to have of what all have saved: its own keys, of every part.

    Args:
      parts: of each rank that saved what `checkpoint.serialized` gave, eager tensors.
      table: whose keys they are.
      rank, size: of the ranks that there are now.

    Raises:
      ValueError: a part is corrupt, or two have a key in common.
    """
    whose, are_own = f"table {table.name!r}", owns(table, rank, size)
    contents = (from_named_arrays(as_arrays(part), whose) for part in parts)
    whole = concatenate([owned_by(each, are_own) for each in contents], whose)
    return {name: tf.constant(array) for name, array in named_arrays(whole).items()}
