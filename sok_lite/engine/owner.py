"""Who owns a key: one rule for lookups, loading and tools, on host and device."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import KeyDtype, key_dtype
from sok_lite.engine.hashing import hash_keys

# "mod", "hash", or a function (keys of the table's key type, size) -> owners in [0, size).
Partitioner = str | Callable[[Array, int], Array]


def owner(
    keys: Array,
    size: int,
    kind: KeyDtype | str = "int64",
    partitioner: Partitioner = "mod",
    xp: Any = np,
) -> Array:
    """Returns the rank that stores each key; the same on every rank, backend and machine.

    "mod" is key mod size, never negative; uint64 keys are divided as unsigned numbers. "hash"
    spreads keys that "mod" would crowd on one rank: with h the 64-bit hash of the key
    (kernels/hash.cuh), ((h >> 32) * size) >> 32. It looks at the high half of h, the tables' slots
    at the low bits, so a rank's keys still spread over its slots.

    Args:
      keys: (n,) int64; those of uint64 tables as their bit pattern.
      size: number of ranks.
      kind: key type of the table.
      partitioner: "mod", "hash" or a function (keys in the table's key type, size) -> owners.
      xp: NumPy, or CuPy if the keys are its own.

    Returns:
      (n,) int32, each in [0, size).

    Raises:
      ValueError: unknown partitioner, or one that returns other than n ranks.
    """
    kind = key_dtype(kind) if isinstance(kind, str) else kind
    if callable(partitioner):
        return _owners_of_function(xp, keys, size, kind, partitioner)
    if partitioner == "hash":
        return _owners_by_hash(keys, size).astype(np.int32)
    if partitioner != "mod":
        raise ValueError(
            "`partitioner` must be 'mod', 'hash' or a function (keys, size) -> owners. "
            f"Received: {partitioner!r}."
        )
    if size & (size - 1) == 0:
        # The low bits are the floor mod of signed and unsigned numbers alike, without a division.
        return (keys & np.int64(size - 1)).astype(np.int32)
    if kind.name == "uint64":
        return (keys.view(np.uint64) % np.uint64(size)).astype(np.int32)
    return (keys % np.int64(size)).astype(np.int32)  # of the sign of size: -1 mod 3 is 2


def owners(
    backend: Backend,
    keys: Array,
    sizes: np.ndarray,
    size: int,
    kinds: Sequence[KeyDtype | str],
    partitioner: Partitioner = "mod",
) -> Array:
    """Returns what `owner` does for keys of several tables, in one go for each kind of key.

    Args:
      backend: where the keys are.
      keys: (n,) int64, those of each table one after the other.
      sizes: (num_tables,) how many each table has.
      size: number of ranks.
      kinds: key type of each table.
      partitioner: as of `owner`.

    Returns:
      (n,) int32, new memory.

    Raises:
      ValueError: as of `owner`.
    """
    names = [kind if isinstance(kind, str) else kind.name for kind in kinds]
    if not callable(partitioner):  # int32 keys are int64 keys then
        names = ["uint64" if name == "uint64" else "int64" for name in names]
    different = list(dict.fromkeys(names))
    if len(different) == 1:
        return owner(keys, size, different[0], partitioner, backend.xp)
    result = backend.xp.empty(keys.size, np.int32)
    for name in different:
        is_such = np.repeat([each == name for each in names], sizes)
        at = backend.from_host(np.flatnonzero(is_such))
        result[at] = owner(backend.xp.take(keys, at), size, name, partitioner, backend.xp)
    return result


def _owners_by_hash(keys: Array, size: int) -> Array:
    return ((hash_keys(keys) >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)


def _owners_of_function(
    xp: Any,
    keys: Array,
    size: int,
    kind: KeyDtype,
    partitioner: Callable[[Array, int], Array],
) -> Array:
    owners = xp.asarray(partitioner(kind.from_int64(xp, keys), size))
    if owners.shape != keys.shape or owners.dtype.kind not in "iu":
        raise ValueError(
            f"`partitioner` must return one integer per key, shape {keys.shape}. "
            f"Received: {owners.dtype} of shape {owners.shape}."
        )
    if owners.size and (int(owners.min()) < 0 or int(owners.max()) >= size):
        raise ValueError(
            f"`partitioner` must return ranks, 0 to {size - 1}. "
            f"Received: {int(owners.min())} to {int(owners.max())}."
        )
    return owners.astype(np.int32)
