"""Keys of other ranks in a gradient: rejected before they become rows that no lookup finds here.

A lookup over all ranks returns to each rank the gradient of its own keys. If a program passes that
to Horovod, it gathers the slices, and the result has the keys of all ranks.
"""

from typing import NamedTuple

import numpy as np

from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.update_rows import ResolvedUpdates, Updates


class RankInfo(NamedTuple):
    """This rank among all.

    Attributes:
      rank: its number, from 0 on.
      size: how many there are.
    """

    rank: int
    size: int


class ForeignKeysError(ValueError):
    """A gradient has keys that belong to other ranks."""


def refuse_foreign_keys(updates: Updates, by_row: ResolvedUpdates, rank_info: RankInfo) -> None:
    """Raises if keys that are about to be inserted belong to other ranks.

    Keys that are the very ones of a gradient are not checked, nor are keys that have a row: lookups
    on one rank alone may insert any. So it waits for the device only where other keys have no row.

    Args:
      updates: of different tables.
      by_row: the same updates with row numbers.
      rank_info: this rank.

    Raises:
      ForeignKeysError: there are such keys.
    """
    doubtful = [
        i
        for i, (of_gradient, count) in enumerate(
            zip(updates.of_gradients, by_row.num_without_row, strict=True)
        )
        if count and not of_gradient
    ]
    for table, all_keys, rows in zip(*by_row.some(doubtful)[:3], strict=True):
        xp = table.backend.xp
        if not table.owner.is_strict:
            continue
        keys = all_keys[rows == np.uint32(NO_ROW)]
        owners = table.owner.owners(keys, rank_info.size, table.key_dtype, xp)
        foreign = owners != rank_info.rank
        count = int(foreign.sum())
        if count:
            first = table.backend.to_host(keys[foreign][:1])
            key = table.key_dtype.from_int64(np, first)[0]
            raise ForeignKeysError(
                f"{count} of {all_keys.size} keys of the gradient of table {table.name!r} belong "
                f"to other ranks than this one, {rank_info.rank}, which has no row for them. "
                f"Received: key {key} of rank {int(owners[foreign][0])}; nothing was changed. "
                "A lookup gives each rank the gradient of its own keys, summed over all ranks: "
                "keep it out of Horovod's collectives. With hvd.DistributedGradientTape, call "
                "tape.register_local_source(table)."
            )
