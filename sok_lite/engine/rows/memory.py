"""The memory of a row store: how much each tier has; what free rows have can go to the system."""

import contextlib
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sok_lite.backend.launches import launch_all
from sok_lite.engine.rows.column import Column

if TYPE_CHECKING:
    from sok_lite.engine.rows.store import RowStore


class TierBytes(NamedTuple):
    """Memory of a store by tier.

    Attributes:
      near_used, far_used: rows and states that were handed out so far, free ones included.
      near, far: memory allocated. Memory that was returned to the system is in none of the four.
    """

    near_used: int
    far_used: int
    near: int
    far: int


def tier_bytes(store: "RowStore") -> TierBytes:
    """Returns `used_bytes` and `num_bytes` by tier."""
    near_gone, far_gone = store.numbers.returned_by_tier
    far_used = store.num_far_rows - far_gone
    near_used = store.num_rows - store.num_far_rows - near_gone
    near, far = (count << store.chunk_shift for count in store.chunks)
    rows = (near_used, far_used, near - near_gone, far - far_gone)
    return TierBytes(*(count * store.row_bytes for count in rows))


def give_back(store: "RowStore") -> None:
    """Returns memory of free rows to the system, after some were released; it may find none.

    Where little could be returned nothing is. Otherwise all memory is if no row is in use, or
    else blocks whose rows are all free, which get memory again when they are taken. Some free
    rows keep theirs, for the next keys, which would otherwise pay for pages again and again.
    Free rows of a far file and of a GPU keep theirs too.
    """
    numbers, shift = store.numbers, store.slabs.block_shift
    if not numbers.is_worth_a_look(shift):
        return
    with contextlib.suppress(MemoryError):  # for lists of rows: then nothing goes
        if numbers.num_free == numbers.num_rows:
            store.clear()
        elif store.backend.gives_back:
            blocks = numbers.empty_blocks(shift, not store.has_far_file)
            store.set_numbers(numbers.returning(blocks, shift))
            return_blocks(store.columns.values(), blocks)


def return_blocks(columns: Iterable[Column], blocks: Iterable[range]) -> None:
    """Returns the memory of blocks of rows to the system, in all of some columns."""
    for column, rows in itertools.product(columns, blocks):
        column.give_back(rows)


def regain(store: "RowStore", count: int) -> None:
    """Makes sure that `count` rows can be claimed which have memory."""
    blocks = store.numbers.needed(count)
    if not blocks:
        return
    xp = store.backend.xp
    listed = [xp.arange(rows.start, rows.stop, dtype=np.uint32) for rows in blocks]
    numbers = store.numbers.regaining(xp, blocks, listed)
    # Its pages come with the first touch, full of zeros.
    launch_all(
        store.fill_launch(name, rows) for name in store.states_with_values for rows in listed
    )
    store.set_numbers(numbers)
