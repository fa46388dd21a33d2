"""Keys of other ranks in a gradient: found before they become rows that nobody looks up here.

A lookup over all ranks gives each rank the gradient of its own keys. What a program makes of it may
hold those of all ranks: Horovod gathers the slices that it is given.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.update_rows import Ready, Update


class Place(NamedTuple):
    """This rank among all.

    Attributes:
      rank: its number, from 0 on.
      size: how many there are.
    """

    rank: int
    size: int


class ForeignKeysError(ValueError):
    """A gradient has keys that belong to other ranks."""


def refuse_foreign_keys(
    updates: Sequence[Update], updates_by_row: Sequence[Ready], place: Place
) -> None:
    """Raises if keys that are about to be inserted belong to other ranks.

    Keys as a gradient had them are not looked at, nor those that have a row: who looks up keys on
    one rank alone may have any. So it waits for the device only where such a key is missing.

    Args:
      updates: of different tables.
      updates_by_row: what `ready` gave for them.
      place: this rank.

    Raises:
      ForeignKeysError: there are such keys.
    """
    for update, ready in zip(updates, updates_by_row, strict=True):
        table, xp = update.table, update.table.backend.xp
        if update.of_gradient or not ready.num_absent or not table.owner.is_strict:
            continue
        keys = ready.keys[ready.rows == np.uint32(ABSENT)]
        owners = table.owner.owners(keys, place.size, table.key_dtype, xp)
        foreign = owners != place.rank
        count = int(foreign.sum())
        if count:
            first = table.backend.to_host(keys[foreign][:1])
            key = table.key_dtype.from_int64(np, first)[0]
            raise ForeignKeysError(
                f"{count} of {ready.keys.size} keys of the gradient of table {table.name!r} belong "
                f"to other ranks than this one, {place.rank}, which has no row for them. Received: "
                f"key {key} of rank {int(owners[foreign][0])}; nothing was changed. A lookup gives "
                "each rank the gradient of its own keys, summed over all ranks: keep it out of "
                "Horovod's collectives. With hvd.DistributedGradientTape, call "
                "tape.register_local_source(table)."
            )
