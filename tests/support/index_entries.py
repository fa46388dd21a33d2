"""What an index holds, in the order of the keys."""

import numpy as np

from sok_lite.engine.table.locking import with_lock


def entries_of(table):
    """The entries of a table's index on the host, with keys of its key type, by their order."""
    held = with_lock(table, table.index.entries)
    keys = table.key_dtype.from_int64(np, table.backend.to_host(held.keys))
    arrays = [keys, *map(table.backend.to_host, held[1:])]
    order = np.argsort(keys)
    return type(held)(*(array[order] for array in arrays))
