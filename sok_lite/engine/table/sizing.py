"""The memory of a table: the arithmetic of docs/sizing.md and of `sok-lite plan`.

It uses the size functions of the tables, and gives the numbers of `statistics()` without a table.
"""

import math
from typing import NamedTuple

from sok_lite.backend import Backend
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.rows.slabs import FAR_GROWTH, NEAR_GROWTH
from sok_lite.engine.rows.tiers import ACCESS_COUNT_BYTES, ACCESS_COUNT_GROWTH
from sok_lite.engine.table import det_index, hkv_index
from sok_lite.engine.table.directory import segment_bytes
from sok_lite.engine.table.hkv_options import MAX_CAPACITY, HkvOptions

_STATE_BYTES = 4  # optimizer states are float32, whatever the rows are


class RowBytes(NamedTuple):
    """Memory of one key's row and of its optimizer states, in bytes."""

    row: int
    states: int

    @property
    def total(self) -> int:
        """Bytes of the row and its states."""
        return self.row + self.states

    @staticmethod
    def of(dim: int, dtype: str, state_size: int) -> "RowBytes":
        """Returns it for rows of `dim` elements, and states of `state_size` elements together.

        Raises:
          ValueError: no such dtype.
        """
        return RowBytes(dim * row_dtype(dtype).storage.itemsize, state_size * _STATE_BYTES)


class TableBytes(NamedTuple):
    """Memory of a table on one rank, in bytes.

    Attributes:
      near_rows, near_states, far_rows, far_states: rows and optimizer states, by tier.
      slots: the index.
      access_counts: the counters that say which rows are hot; 0 with one tier.
      near_spare, far_spare: upper bounds of what is allocated for the next rows and their counters.
        On a CPU it takes no memory before it is used.
    """

    near_rows: int
    near_states: int
    far_rows: int
    far_states: int
    slots: int
    access_counts: int
    near_spare: int
    far_spare: int

    @property
    def near(self) -> int:
        """All near memory, spare included."""
        kept = self.near_rows + self.near_states + self.slots + self.access_counts
        return kept + self.near_spare

    @property
    def far(self) -> int:
        """All far memory, spare included."""
        return self.far_rows + self.far_states + self.far_spare


def hbm_bytes(num_keys: int, row: RowBytes) -> TableBytes:
    """Returns the memory of an "hbm" table."""
    num_slots = det_index.slots_for(det_index.sizes_of(Backend), num_keys)
    rows, states = num_keys * row.row, num_keys * row.states
    spare = (rows + states) // NEAR_GROWTH
    return TableBytes(rows, states, 0, 0, segment_bytes(num_slots, False, False), 0, spare, 0)


def max_capacity_for(num_keys: int) -> int | None:
    """Returns the smallest `max_capacity` at which `num_keys` keys keep a "hybrid" table below its
    load factor, so that none is evicted; None: they are too many."""
    most = HkvOptions.max_load_factor
    capacity = 1 << max(0, math.ceil(num_keys / most) - 1).bit_length()
    capacity = max(capacity, HkvOptions.init_capacity)
    return capacity if capacity <= MAX_CAPACITY else None


def hybrid_bytes(
    num_keys: int, row: RowBytes, max_capacity: int, near_rows: int | None, has_scores: bool = False
) -> TableBytes:
    """Returns the memory of a "hybrid" table.

    Args:
      num_keys: at most `max_capacity`.
      near_rows: rows of the near tier; None: there is one tier.
      has_scores: whether `evict_strategy` is not kLru.
    """
    limits = (max_capacity, HkvOptions.max_load_factor)
    capacity = hkv_index.capacity_for(num_keys, HkvOptions.init_capacity, *limits)
    num_slots = hkv_index.slots_for(num_keys, capacity, *limits, Backend.segment_slots)
    index = segment_bytes(num_slots, has_scores, True)
    near = num_keys if near_rows is None else min(num_keys, near_rows)
    far = num_keys - near
    access_counts = 0 if near_rows is None else num_keys * ACCESS_COUNT_BYTES
    return TableBytes(
        near_rows=near * row.row,
        near_states=near * row.states,
        far_rows=far * row.row,
        far_states=far * row.states,
        slots=index,
        access_counts=access_counts,
        near_spare=near * row.total // NEAR_GROWTH + access_counts // ACCESS_COUNT_GROWTH,
        far_spare=far * row.total // FAR_GROWTH,
    )
