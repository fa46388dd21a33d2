"""What a soak does to tables between steps: expires, erases and writes keys of this rank."""

import numpy as np
import tensorflow as tf

import sok_lite as sok
from tests.fuzz import soak_plan as plan


def run(table: tf.Variable, operation: plan.Operation, seed: int, rank: int, steps: int) -> None:
    """Does an operation on this rank's part of a table. Every rank does it; none waits for another.

    Args:
      steps: that were done; new keys are among those of the next ones.
    """
    numbers = plan.words(seed, operation.number, operation.name, count=60)
    chosen = operation.number
    if operation.name == "expire":
        table.expire(num_lookups=15 + chosen % 40)
    elif operation.name == "erase":
        table.erase(sok.export(table)[0].numpy()[chosen % 7 :: 11])
    elif operation.name == "erase_if":
        # The key's middle bits: the lowest ones say which rank has it.
        table.erase_if(lambda keys, rows, scores: keys // 16 % 13 == chosen % 13)
    elif operation.name == "reserve":
        table.reserve(500 + chosen % 2000)
    elif operation.name == "clear":
        if chosen % 3 == 0:
            table.clear()
    elif operation.name == "read_and_evict":
        sok.sparse_read_and_evict(table, _new_keys(operation.table, numbers, rank, steps))
    elif operation.name == "insert":
        keys = _new_keys(operation.table, numbers, rank, steps)
        sok.assign(table, keys, _rows(table, numbers, len(keys)))
    else:
        keys = sok.export(table)[0].numpy()[chosen % 5 :: 9][:50]
        _write(table, operation.name, keys, numbers)


def _write(table: tf.Variable, name: str, keys: np.ndarray, numbers: np.ndarray) -> None:
    if name == "assign":
        sok.assign(table, keys, _rows(table, numbers, len(keys)))
    elif name == "scatter_add":
        table.scatter_add(tf.IndexedSlices(_rows(table, numbers, len(keys)), keys))
    elif name == "scatter_update":
        table.scatter_update(tf.IndexedSlices(_rows(table, numbers, len(keys)), keys))
    elif name == "assign_state":
        states = sok.optimizer_states(table)
        first = states[min(states)]
        # Above 0: it may be a mean of squares.
        sok.assign(first, keys, tf.abs(tf.cast(_rows(table, numbers, len(keys)), tf.float32)) + 1)
    else:
        raise ValueError(f"There is no operation {name!r}.")


def _new_keys(table: str, numbers: np.ndarray, rank: int, steps: int) -> np.ndarray:
    """Returns keys that this rank owns, by the rule of docs/concepts/ranks.md.

    Of a table whose rule is a hash only lookups know: it gets none here.
    """
    keys = np.unique(plan.keys_of(table, numbers % np.uint64(3000) + np.uint64(5 * steps)))
    if table == "item":
        return keys[:0]
    if table == "home":
        return keys if rank == 1 else keys[:0]
    return keys[keys % plan.RANKS == rank]


def _rows(table: tf.Variable, numbers: np.ndarray, count: int) -> tf.Tensor:
    """Returns rows (count, dim) of multiples of 1/64 in [-1, 1)."""
    dim = table.shape[1]
    wanted = np.resize(numbers, count) if count else numbers[:0]
    shifted = wanted[:, None] >> np.arange(dim, dtype=np.uint64)[None]
    values = (shifted % np.uint64(128)).astype(np.float32) / np.float32(64) - np.float32(1)
    return tf.cast(tf.constant(values), table.dtype)
