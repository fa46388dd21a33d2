"""Tables with a fixed number of rows, whose keys are row numbers and whose caller stores the rows.

The table has the rows 0 to n - 1 and no index. Spread over ranks, rank r has the rows r, r + ranks,
r + 2 * ranks and so on, in this order. See engine/static_lookup.py for lookups.
"""

from typing import Any

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.owner import MOD, KeyModRanks, OneRank
from sok_lite.engine.table import EmbeddingTable


class StaticTable:
    """What a lookup needs of a static table, as a `ShardedTable`.

    Args:
      num_rows: rows on all ranks together.
      dtype: of the rows, a float of RowDtype.
      name: in errors; equal on all ranks.
      owner: which rank has a row: `MOD` or `OneRank`.
    """

    var_type = "static"
    is_static = True
    all_ranks_refusal = None
    keeps_every_key = True
    rounds_gradients = False
    max_capacity = None
    ids = None
    seed = 0  # no initial values are drawn
    initializer = None

    def __init__(
        self,
        backend: Backend,
        num_rows: int,
        dim: int,
        *,
        dtype: str = "float32",
        name: str = "table",
        owner: KeyModRanks | OneRank = MOD,
    ) -> None:
        self.backend = backend
        self.num_rows, self.dim = num_rows, dim
        self.key_dtype, self.row_dtype = key_dtype("int64"), row_dtype(dtype)
        self.name, self.owner = name, owner

    @property
    def size(self) -> int:
        """Rows on all ranks together."""
        return self.num_rows

    def options_of_all_ranks(self) -> dict[str, Any]:
        """Returns the options that must be equal on all ranks."""
        return {"number of rows": self.num_rows}

    def engine_keys(self, keys: Any) -> Array:
        """Returns row numbers of any shape as int64, unchecked by `check_rows`.

        Raises:
          TypeError: they are no integers. ValueError: one does not fit int64.
        """
        return self.key_dtype.to_int64(self.backend.xp, keys, self._what)

    @property
    def _what(self) -> str:
        return f"row numbers of table {self.name!r}"

    def check_rows(self, keys: Array) -> None:
        """Raises ValueError if one of keys (n,) int64 is not a row number. On a GPU it waits."""
        outside = (keys < 0) | (keys >= self.num_rows)
        if bool(outside.any()):
            raise ValueError(
                f"{self._what} must be from 0 to {self.num_rows - 1}: it has {self.num_rows} rows. "
                f"Received: {int(keys[outside][0])}. A dynamic table takes any key."
            )

    def stride(self, num_ranks: int) -> int:
        """Returns the step between a rank's row numbers: row r is at r // stride there."""
        return 1 if self.owner.only_rank is not None else num_ranks

    def row_numbers(self, rank: int, num_ranks: int) -> range:
        """Returns the row numbers of a rank, in their order there."""
        if self.owner.only_rank is not None:
            return range(self.num_rows if rank == self.owner.only_rank else 0)
        return range(rank, self.num_rows, num_ranks)

    def num_rows_of(self, rank: int, num_ranks: int) -> int:
        """Returns the number of rows of a rank."""
        return len(self.row_numbers(rank, num_ranks))


# For checkpoints and checks between ranks.
AnyTable = EmbeddingTable | StaticTable
