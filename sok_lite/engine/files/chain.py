"""Where rows and states of keys are: in a file of a checkpoint, or in those that it continues."""

from collections.abc import Callable, Iterable

import numpy as np

from sok_lite.engine.files.manifest_facts import Shard


def newest_rows(
    keys: np.ndarray, keys_with_rows: Iterable[np.ndarray], corrupt: Callable[[str], ValueError]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns of each file which of its rows are the newest of a key.

    Args:
      keys: (n,) distinct.
      keys_with_rows: of each file the keys that have a row there, the newest file first.
      corrupt: makes an error from a reason.

    Returns:
      Of each file the positions of the rows in it, (k,) int64, ascending, and those of their keys
      among `keys`, (k,) int64.

    Raises:
      ValueError: a key has no row.
    """
    found = []
    order = np.argsort(keys)
    left = keys[order], order  # ascending, and their places
    for some in keys_with_rows:
        by_key = np.argsort(some)  # in any other order the search takes many times as long
        at_left = np.empty(some.size, np.int64)
        at_left[by_key] = np.searchsorted(left[0], some[by_key])
        at_left[at_left == left[0].size] = 0
        is_wanted = left[0][at_left] == some if left[0].size else np.zeros(some.size, bool)
        taken = at_left[is_wanted]
        found.append((np.flatnonzero(is_wanted), left[1][taken]))
        rest = np.ones(left[0].size, bool)
        rest[taken] = False
        left = left[0][rest], left[1][rest]
    if left[0].size:
        raise corrupt(
            f"{left[0].size:,} of its keys have no row there, nor in the files that it continues"
        )
    return found


def tensors_of_chain(shard: Shard, tensor: str) -> list[str | None]:
    """Returns the name of a tensor of rows in each file of a chain, oldest first; None: missing."""
    names: list[str | None] = []
    name: str | None = tensor
    for part in reversed(shard.chain):
        names.append(name)
        before = {state.tensor: state.before for state in part.states}
        name = name if name is None or name == "values" else before[name]
    return names[::-1]
