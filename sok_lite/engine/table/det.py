"""The "hbm" table: all rows in the backend's memory, without a limit."""

from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch
from sok_lite.engine.initializer import AnyInitializer
from sok_lite.engine.owner import MOD, OwnerRule
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.base import checked_num_keys
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.insert import DetInsertion, claim_rows
from sok_lite.engine.table.table import EmbeddingTable


class DetTable(EmbeddingTable):
    """A table with an open-addressing index; see EmbeddingTable.

    Args:
      dim: elements of a row.
      initializer: gives the initial values of rows.
      key_type: "int64", "int32" or "uint64".
      dtype: of the rows, a name that RowDtype lists.
      name: for errors, and part of the seed of rows.
      seed: of the initial values.
      owner: which rank owns a key, the same on all ranks.
      init_capacity: keys to make room for at once.
      rounds_gradients: whether gradients travel to other ranks as bfloat16; see
        engine/exchange.py. The same on all ranks.
    """

    var_type = "hbm"

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: AnyInitializer,
        key_type: str = "int64",
        dtype: str = "float32",
        name: str = "table",
        seed: int = 0,
        owner: OwnerRule = MOD,
        init_capacity: int = 0,
        rounds_gradients: bool = False,
    ) -> None:
        super().__init__(
            backend,
            dim,
            initializer=initializer,
            key_type=key_type,
            dtype=dtype,
            name=name,
            seed=seed,
            owner=owner,
            rounds_gradients=rounds_gradients,
        )
        init_capacity = checked_num_keys(name, "init_capacity", init_capacity)
        self.index: DetIndex
        self.set_parts(DetIndex(backend, self.key_dtype, name, init_capacity), self.store)

    def make_room(self, count: int) -> Claim:
        self.index.make_room(count)
        return claim_rows(self, count)

    def new_insertion(self, *args: Any) -> DetInsertion:
        return DetInsertion(self, *args)

    def can_skip_dedup(self, most: int) -> bool:
        return self.index.has_room(most) and self.store.has_room(most)

    def scores_of(self, keys: Array) -> Array:
        return self.index.last_seen(keys).astype(np.uint64)

    def score_launch(self, keys: Array, scores: Any) -> Launch:
        return self.index.update_launch(keys, last_seen=scores.astype(np.uint32))
