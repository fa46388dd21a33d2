"""The file of what files of keys and values lack: optimizer states, `last_seen`, scores.

A process writes one file beside its shards, an .npz of NumPy arrays that is named

    <variable>_rank<r>_size<s>-states.npz

It has the tensors of bridge/checkpoint.py but for keys and values, in ascending order of the keys,
its texts as bytes of UTF-8, and `checksums`: the CRC-32 of the keys and of the values of each
shard, which tell it from that of another save.
"""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from sok_lite.engine.files.growing_file import GrowingFile
from sok_lite.engine.files.key_value_files import STATES
from sok_lite.engine.files.lock import Lock
from sok_lite.engine.files.manifest import sync_path
from sok_lite.engine.files.shard import read_arrays


def states_path(folder: str, name: str, rank: int, size: int) -> str:
    """Returns the path of the file of a process."""
    return os.path.join(folder, f"{name.replace('/', '_')}_rank{rank}_size{size}{STATES}")


def write_states(
    path: str, arrays: Mapping[str, np.ndarray], checksums: Sequence[tuple[int, int]]
) -> None:
    """Writes the file; if it raises, the one that was there is as before.

    Args:
      arrays: by name, numbers or a text's bytes.
      checksums: of the keys and values of each shard, as they are on the disk already.
    """
    pairs = np.array(checksums, np.int64).reshape(-1, 2)
    with Lock(f"{path}.lock", repr(path)), GrowingFile(path, None) as made:
        np.savez(made.file, checksums=pairs, **arrays)  # type: ignore[arg-type]
        made.sync()
        made.publish()
    sync_path(os.path.dirname(path))


def read_states(
    path: str, checksums: Sequence[tuple[int, int] | None]
) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a file; None: there is none.

    Args:
      checksums: of keys and values of each shard that it belongs to; None: those are not known.

    Raises:
      ValueError: it is corrupt, or of other shards.
    """
    if not os.path.exists(path):
        return None
    arrays = read_arrays(path)
    try:
        expected = [tuple(pair) for pair in arrays.pop("checksums").tolist()]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path!r} is corrupt: {error}. Take another copy of it.") from error
    if expected != list(checksums):
        raise ValueError(
            f"{path!r} is not of the keys and values beside it: they are from two saves. Take the "
            "files of one save, or remove this one: rows are then restored without their states."
        )
    return arrays
