"""The 64-bit hash of keys, equal to that of kernels/hash.cuh, and its seeds.

Users of a service choose keys, and could choose some that all collide in an index. So each index
has a secret random seed. What must be equal on all ranks has none: the owner of a key, its initial
values, whether it is admitted.
"""

import functools
import os
import secrets
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.dtypes import is_integer

# The last bits of a seed are 0: kernels keep the number of segments there (slots.cuh).
_FREE_BITS = 5
_SEED_BITS = 63 - _FREE_BITS
_VARIABLE = "SOK_LITE_HASH_SEED"

_fixed: int | None = None


def hash_keys(keys: Array, seed: int = 0) -> Array:
    """Returns MurmurHash3's finaliser of `keys ^ seed`, (n,) uint64.

    Args:
      keys: (n,) int64, of NumPy or CuPy.
      seed: from 0 to 2**63 - 1.
    """
    h = keys.view(np.uint64) ^ np.uint64(seed)
    # In-place array arithmetic wraps silently; NumPy warns for scalars only.
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def fix_seed(seed: int | None) -> None:
    """Fixes the seed of every index made from now on, as `checked_seed`; None: random again."""
    global _fixed
    _fixed = None if seed is None else checked_seed("`hash_seed`", seed)


def new_seed() -> int:
    """Returns the seed of a new index: the fixed one, else a random one.

    Raises:
      ValueError: SOK_LITE_HASH_SEED is no seed.
    """
    fixed = _fixed_seed()
    return (secrets.randbits(_SEED_BITS) if fixed is None else fixed) << _FREE_BITS


def seed_after(seed: int) -> int:
    """Returns the next seed of an index whose keys collide; a random one unless it is fixed."""
    if _fixed_seed() is None:
        return new_seed()
    return int(hash_keys(np.array([seed], np.int64), 1)[0]) >> 6 << _FREE_BITS


def is_seed(number: Any) -> bool:
    """Returns whether an index can have this seed."""
    return type(number) is int and 0 <= number < 1 << 63 and number % (1 << _FREE_BITS) == 0


@functools.cache
def seed_of_process() -> int:
    """Returns the seed of hash tables that live for one call: no result depends on it."""
    fixed = _seed_of_environment()
    if fixed is None:
        return secrets.randbits(63)
    return int(hash_keys(np.array([fixed], np.int64), 2)[0]) >> 1


def _fixed_seed() -> int | None:
    return _seed_of_environment() if _fixed is None else _fixed


@functools.cache
def _seed_of_environment() -> int | None:
    text = os.environ.get(_VARIABLE, "").strip()
    try:
        return checked_seed(_VARIABLE, int(text)) if text else None
    except ValueError:
        raise ValueError(
            f"{_VARIABLE} must be a number from 0 to 2**58 - 1. Received: {text!r}. Unset it for "
            "random seeds."
        ) from None


def checked_seed(name: str, seed: Any) -> int:
    """Returns a seed as an int; errors call it `name`.

    Raises:
      TypeError: not an integer.
      ValueError: it is not from 0 to 2**58 - 1.
    """
    if not is_integer(seed):
        raise TypeError(f"{name} must be an integer. Received: {seed!r}.")
    if not 0 <= seed < 1 << _SEED_BITS:
        raise ValueError(f"{name} must be from 0 to 2**58 - 1. Received: {seed}.")
    return int(seed)
