"""Tables with a fixed number of rows, which have numbers for keys and are stored elsewhere.

Such a table has the rows 0 to n - 1 and no index: of a table that is spread over ranks, rank r has
the rows r, r + ranks, r + 2 * ranks and so on, in this order. Its rows may lie anywhere, in a
tensor of TensorFlow for example. So a lookup (engine/static_lookup.py) has three steps: `locate`
returns which rows this rank has to read, the caller reads them, and `forward` pools them.
"""

from typing import Any

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.owner import MOD, KeyModRanks, OneRank
from sok_lite.engine.table import EmbeddingTable


class StaticTable:
    """The facts of such a table that a lookup needs; it implements `ShardedTable`.

    Args:
      backend: where lookups compute.
      num_rows: rows on all ranks together.
      dim: elements of a row.
      dtype: of the rows, a name of floats that RowDtype lists.
      name: in errors, and the same on all ranks.
      owner: which rank has a row: `MOD`, or `OneRank`.
    """

    var_type = "static"
    is_static = True
    all_ranks_refusal = None
    keeps_every_key = True
    rounds_gradients = False
    max_capacity = None
    ids = None
    # Nothing is drawn: the rows are there.
    seed = 0
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
        """Returns the options of this kind of table that ranks must have in common."""
        return {"number of rows": self.num_rows}

    def engine_keys(self, keys: Any) -> Array:
        """Returns row numbers of any shape as int64, without a check that they exist.

        Raises:
          TypeError: they are no integers. ValueError: one does not fit int64.
        """
        return self.key_dtype.to_int64(self.backend.xp, keys, self._what)

    @property
    def _what(self) -> str:
        return f"row numbers of table {self.name!r}"

    def check_rows(self, keys: Array) -> None:
        """Raises ValueError where there is no such row. On a GPU it waits.

        Args:
          keys: (n,) int64.
        """
        outside = (keys < 0) | (keys >= self.num_rows)
        if bool(outside.any()):
            raise ValueError(
                f"{self._what} must be from 0 to {self.num_rows - 1}: it has {self.num_rows} rows. "
                f"Received: {int(keys[outside][0])}. A dynamic table takes any key."
            )

    def stride(self, num_ranks: int) -> int:
        """Returns how far apart the rows are that lie side by side on a rank: row r is there the
        one of number r // stride."""
        return 1 if self.owner.only_rank is not None else num_ranks

    def row_numbers(self, rank: int, num_ranks: int) -> range:
        """Returns the numbers of the rows that a rank has, in the order in which they lie there."""
        if self.owner.only_rank is not None:
            return range(self.num_rows if rank == self.owner.only_rank else 0)
        return range(rank, self.num_rows, num_ranks)

    def num_rows_of(self, rank: int, num_ranks: int) -> int:
        """Returns how many rows a rank has."""
        return len(self.row_numbers(rank, num_ranks))


# What checkpoints and comparisons between ranks take.
AnyTable = EmbeddingTable | StaticTable
