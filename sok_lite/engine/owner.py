"""The owner of a key: the rank that stores its row, by one rule per table."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import items_of_tables, repeat_values
from sok_lite.engine.dtypes import KeyDtype, is_integer, key_dtype
from sok_lite.engine.hashing import hash_keys


class OwnerRule(ABC):
    """A sharding rule: the owner of each key of a table, on every rank, backend and machine.

    A rule is immutable, and equal rules give equal owners.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """A unique name, by which ranks compare rules."""

    @property
    def only_rank(self) -> int | None:
        """The rank that owns all keys; None: the owner depends on the key."""
        return None

    @property
    def is_strict(self) -> bool:
        """Whether a rank must not have keys of other owners."""
        return True

    @property
    def advice(self) -> str:
        """How a program gives each rank its own keys: a clause, for errors."""
        return "convert them by `sok-lite convert`, and sok.load gives each rank its own"

    @abstractmethod
    def owners(self, keys: Array, size: int, kind: KeyDtype | str = "int64", xp: Any = np) -> Array:
        """Returns the owner of each key, (n,) int32 in [0, size), in new memory.

        Args:
          keys: (n,) int64; those of uint64 tables as bit patterns.
          size: number of ranks.
          kind: key type of the table.
          xp: NumPy or CuPy, of the keys.

        Raises:
          ValueError: the rule has no owner among so many ranks.
        """

    def equivalent_key_type(self, kind: KeyDtype | str) -> str:
        """Returns a key type with the same owners: tables that share it and the rule are computed
        together."""
        return kind if isinstance(kind, str) else kind.name


@dataclass(frozen=True)
class KeyModRanks(OwnerRule):
    """key mod ranks, never negative; uint64 keys as unsigned numbers."""

    @property
    def name(self) -> str:
        return "key mod ranks"

    @property
    def advice(self) -> str:
        return (
            "give each rank the keys with keys % sok.communication.num_ranks() == "
            "sok.communication.rank(); sok.load does so by itself"
        )

    def owners(self, keys: Array, size: int, kind: KeyDtype | str = "int64", xp: Any = np) -> Array:
        if size & (size - 1) == 0:
            # The low bits: the floor mod of signed and unsigned numbers, without a division.
            return (keys & np.int64(size - 1)).astype(np.int32)
        if self.equivalent_key_type(kind) == "uint64":
            return (keys.view(np.uint64) % np.uint64(size)).astype(np.int32)
        return (keys % np.int64(size)).astype(np.int32)  # of the sign of size: -1 mod 3 is 2

    def equivalent_key_type(self, kind: KeyDtype | str) -> str:
        return "uint64" if super().equivalent_key_type(kind) == "uint64" else "int64"


@dataclass(frozen=True)
class HashOfKey(OwnerRule):
    """((h >> 32) * ranks) >> 32, h the 64-bit hash of the key: spreads keys with common factors.

    It uses the high half of h, slots of tables use the low bits: a rank's keys spread over its
    slots.
    """

    @property
    def name(self) -> str:
        return "hash of key"

    def owners(self, keys: Array, size: int, kind: KeyDtype | str = "int64", xp: Any = np) -> Array:
        high = hash_keys(keys) >> np.uint64(32)
        return ((high * np.uint64(size)) >> np.uint64(32)).astype(np.int32)

    def equivalent_key_type(self, kind: KeyDtype | str) -> str:
        return "int64"  # the hash is one of bits


@dataclass(frozen=True)
class OneRank(OwnerRule):
    """One rank owns all keys; `owners` checks that there is such a rank."""

    rank: int

    def __post_init__(self) -> None:
        if not is_integer(self.rank) or self.rank < 0:
            raise ValueError(
                "The rank that owns all keys must be an integer from 0 on. "
                f"Received: rank={self.rank!r}."
            )

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    @property
    def only_rank(self) -> int:
        return self.rank

    @property
    def advice(self) -> str:
        return f"call it on rank {self.rank} alone, which has the table"

    def owners(self, keys: Array, size: int, kind: KeyDtype | str = "int64", xp: Any = np) -> Array:
        return xp.full(keys.shape, _checked_rank(self, size), np.int32)


@dataclass(frozen=True)
class FunctionOfKeys(OwnerRule):
    """A function computes the owners.

    Attributes:
      label: names the function, as ranks cannot compare functions.
      function: hashable; (keys in the table's key type, number of ranks) -> (n,) integers in
        [0, ranks), of NumPy or CuPy as the keys. It may change the keys in place. The owner of a
        key must be the same on every rank, and must not depend on the other keys.
    """

    label: str
    function: Callable[[Array, int], Array]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                "The owner of a key may be a function (keys, ranks) -> owners. "
                f"Received: {self.function!r}."
            )

    @property
    def name(self) -> str:
        return f"function {self.label!r}"

    @property
    def advice(self) -> str:
        return (
            f"give each rank the keys for which the {self.name} returns "
            "sok.communication.rank(); sok.load does so by itself"
        )

    def owners(self, keys: Array, size: int, kind: KeyDtype | str = "int64", xp: Any = np) -> Array:
        kind = key_dtype(kind) if isinstance(kind, str) else kind
        # A copy: the function may work in place, and the keys are still needed.
        owners = xp.asarray(self.function(xp.array(kind.from_int64(xp, keys)), size))
        if owners.shape != keys.shape or owners.dtype.kind not in "iu":
            raise ValueError(
                f"The {self.name} must return one integer per key, the rank that owns it, shape "
                f"{keys.shape}. Received: {owners.dtype} of shape {owners.shape}."
            )
        if bool(((owners < 0) | (owners >= size)).any()):  # on a GPU this waits
            raise ValueError(
                f"The {self.name} must return ranks, 0 to {size - 1}. "
                f"Received: {int(owners.min())} to {int(owners.max())}."
            )
        return owners.astype(np.int32)


@dataclass(frozen=True)
class AlsoLocal(OwnerRule):
    """A rule for lookups over ranks; in calls of one rank alone, that rank may have any key."""

    rule: OwnerRule

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def only_rank(self) -> int | None:
        return self.rule.only_rank

    @property
    def is_strict(self) -> bool:
        return False

    def owners(self, keys: Array, size: int, kind: KeyDtype | str = "int64", xp: Any = np) -> Array:
        return self.rule.owners(keys, size, kind, xp)

    def equivalent_key_type(self, kind: KeyDtype | str) -> str:
        return self.rule.equivalent_key_type(kind)


MOD = KeyModRanks()
HASH = HashOfKey()


def _checked_rank(rule: OwnerRule, size: int) -> int:
    """Returns `only_rank`, or 0 if there is none; ValueError: there are not so many ranks."""
    rank = rule.only_rank or 0
    if rank >= size:
        raise ValueError(
            f"The rank that owns all keys of a table must be one of {size}, 0 to {size - 1}. "
            f"Received: {rank}."
        )
    return rank


def owners(
    backend: Backend,
    keys: Array,
    sizes: np.ndarray,
    size: int,
    kinds: Sequence[KeyDtype | str],
    rules: Sequence[OwnerRule],
) -> Array:
    """Returns the owners of the keys of several tables, (n,) int32 in new memory.

    The number of array operations depends on the number of different rules, not of tables, and
    `OneRank` adds none.

    Args:
      keys: (n,) int64, table by table.
      sizes: (num_tables,) keys of each table.
      size: number of ranks.
      kinds, rules: of each table.

    Raises:
      ValueError: the only owner of a table is no rank, or a function returns other than one rank
        for each key.
    """
    ranks = [_checked_rank(rule, size) for rule in rules]
    rule_of_table = [
        None if rule.only_rank is not None else (rule, rule.equivalent_key_type(kind))
        for rule, kind in zip(rules, kinds, strict=True)
    ]
    different = list(dict.fromkeys(rule_of_table))
    if len(different) == 1 and different[0] is not None:
        rule, kind = different[0]
        return rule.owners(keys, size, kind, backend.xp)
    result = repeat_values(backend, np.array(ranks, np.int32), sizes)
    for each in different:
        if each is not None:
            rule, kind = each
            of_this_rule = [other == each for other in rule_of_table]
            at = items_of_tables(backend, of_this_rule, sizes)
            result[at] = rule.owners(backend.xp.take(keys, at), size, kind, backend.xp)
    return result
