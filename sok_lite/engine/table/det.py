"""The "hbm" table: all rows in the backend's memory, growing without bound."""

from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.table.base import EmbeddingTable, GivesFirstRows
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.index import Found


class DetTable(EmbeddingTable):
    """A table over an open-addressing index. See EmbeddingTable for what it does.

    Args:
      backend: where it lives.
      dim: elements of a row.
      initializer: gives the first values of rows.
      key_type: "int64", "int32" or "uint64".
      dtype: of the rows, "float32", "float16" or "bfloat16".
      name: in errors; it also seeds the rows.
      seed: of the rows.
      init_capacity: keys to make room for at once.
    """

    var_type = "hbm"

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: GivesFirstRows,
        key_type: str = "int64",
        dtype: str = "float32",
        name: str = "table",
        seed: int = 0,
        init_capacity: int = 0,
    ) -> None:
        super().__init__(
            backend,
            dim,
            initializer=initializer,
            key_type=key_type,
            dtype=dtype,
            name=name,
            seed=seed,
        )
        self.index: DetIndex = DetIndex(backend, self.key_dtype, name, init_capacity)

    def _find(
        self,
        keys: Array,
        stamp: int = 0,
        scores: Array | None = None,
        out: Array | None = None,
    ) -> Found:
        return self.index.find(keys, stamp, None if out is None else self.store.copying(out))

    def _insert(self, keys: Array, stamp: int, scores: Array | None, *, initialise: bool) -> Array:
        self.index.make_room(int(keys.size))
        with self._room_for(int(keys.size)):
            rows = self.store.allocate(int(keys.size))
        try:
            if initialise:
                self.initializer.fill(self.backend, self.store, rows, keys, self._table_seed)
            self.index.insert(keys, rows, stamp)
        except BaseException:
            self.store.release(rows)
            raise
        self._counts["inserted"] += int(keys.size)
        return rows

    def _erase_index(self, keys: Array) -> Array:
        return self.index.erase(keys)

    def _scores(self, keys: Array) -> Array:
        return self.index.stamps(keys).astype(np.uint64)

    def _set_scores(self, keys: Array, scores: Any) -> None:
        self.index.update(keys, stamps=scores.astype(np.uint32))
