"""The options of the "hybrid" table, with SOK's names, and their checks."""

import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from sok_lite.engine.callers import warn
from sok_lite.engine.dtypes import as_float
from sok_lite.engine.table.directory import LINE

# What the score of a key is. Kernels know a strategy by its index here; see kernels/hkv/hkv.cuh.
STRATEGIES = ("kLru", "kLfu", "kEpochLru", "kEpochLfu", "kCustomized")
_ON_REFUSED = ("ignore", "warn", "error")
MAX_CAPACITY = 1 << 31
_MAX_THRESHOLD = 1 << 30  # pending counts grow up to there
_rounded: set[str] = set()  # options for which the warning of `round_up_capacities` was given


@dataclass(frozen=True)
class HkvOptions:
    """The options of a "hybrid" table.

    Attributes:
      init_capacity: initial number of slots, a power of two; at least one bucket is made. (SOK's
        default is that of `max_capacity`; a model has hundreds of tables, and most stay small.)
      max_capacity: slots up to which the table doubles, a power of two; then new keys evict others.
      max_hbm_for_vectors: gigabytes (2**30 bytes) of rows in near memory, the GPU's; the others are
        in far memory, the host's. As in SOK it counts for the rows, and again for each optimizer
        state.
      max_bucket_size: slots per bucket, a power of two from 4 on. (SOK's 128 belong to one bucket
        per key; here a key has two, and fills them better with 16.)
      max_load_factor: load factor above which the table doubles, up to `max_capacity`.
      evict_strategy: "kLru", "kLfu", "kEpochLru", "kEpochLfu" or "kCustomized".
      filter_ratio: probability of a new key to get a row in a lookup with the low-frequency filter.
      enter_threshold: number of lookups that must see a key before it gets a row; 0 and 1: the
        first.
      count_repeats: whether a lookup counts duplicates of a key in its batch, for its score, which
        must be that of "kLfu", and for `enter_threshold`. A lookup of several ranks asks the owner
        of a key once from each rank, and so it counts.
      on_refused: what happens when a batch has more keys for two buckets than they have slots, or
        a key comes with a score below all others there: "ignore", "warn" (once a table) or "error".
      far_path: a folder, or the name of a new file, for far rows on a machine without a GPU; None:
        in memory.
      block_size: threads per block of this table's kernels on a GPU; 0: the library's choice.
      device_id: the GPU; -1: that of this process.
      io_by_cpu: whether the CPU copies far rows, not the GPU; without a GPU it always does.
    """

    init_capacity: int = 1 << 10
    max_capacity: int = 1 << 26
    max_hbm_for_vectors: float = 16
    max_bucket_size: int = 16
    max_load_factor: float = 0.75
    evict_strategy: str = "kLru"
    filter_ratio: float = 1.0
    enter_threshold: int = 0
    count_repeats: bool = False
    on_refused: str = "warn"
    far_path: str | None = None
    block_size: int = 0
    device_id: int = -1
    io_by_cpu: bool = False

    @property
    def bucket(self) -> int:
        """Slots of a bucket."""
        return min(self.max_bucket_size, self.max_capacity)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        return [field.name for field in fields(cls)]

    @classmethod
    def checked(cls, options: dict[str, Any]) -> "HkvOptions":
        """Returns options from a user's values, where None is the default.

        Raises:
          TypeError: an unknown option, or a value of a wrong type.
          ValueError: a value out of range.
        """
        unknown = sorted(set(options) - set(cls.names()))
        if unknown:
            raise TypeError(
                f"A hybrid table got an unexpected option {unknown[0]!r}. "
                f"Known options: {', '.join(sorted(cls.names()))}."
            )
        chosen = {name: value for name, value in options.items() if value is not None}
        _check_numbers(chosen)
        _check_words(chosen)
        max_capacity = chosen.get("max_capacity", cls.max_capacity)
        chosen.setdefault("init_capacity", min(cls.init_capacity, max_capacity))
        chosen.setdefault("max_capacity", max(max_capacity, chosen["init_capacity"]))
        checked = cls(**chosen)
        if checked.init_capacity > checked.max_capacity:
            raise ValueError(
                "`init_capacity` must not exceed `max_capacity`. Received: "
                f"init_capacity={checked.init_capacity}, max_capacity={checked.max_capacity}."
            )
        return checked


def round_up_capacities(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with capacities rounded up to powers of two, as SOK does. It warns once for
    each option in a program.

    Values that cannot be capacities stay as they are, for `HkvOptions.checked` to refuse.
    """
    rounded = {}
    for name in ("init_capacity", "max_capacity"):
        wanted = options.get(name, LINE)
        if _is_whole(wanted) and 0 < wanted < MAX_CAPACITY:
            capacity = max(1 << (int(wanted) - 1).bit_length(), LINE)
            if capacity != wanted:
                rounded[name] = capacity
    texts = [
        f"{name}={options[name]} is rounded up to {capacity}"
        for name, capacity in rounded.items()
        if name not in _rounded
    ]
    if texts:
        _rounded.update(rounded)
        warn(
            f"{', '.join(texts)}: the capacity of a table of var_type 'hybrid' is a power of two. "
            "(Said once for each option.)",
        )
    return {**options, **rounded}


def refuse_hybrid_option(name: str, value: Any, var_type: str) -> NoReturn:
    """Raises ValueError for an option of "hybrid" tables, given for a table of another type."""
    raise ValueError(
        f"`{name}` is an option of var_type='hybrid'. Received: {name}={value!r} for "
        f"var_type={var_type!r}. Use var_type='hybrid', or leave it out."
    )


def _check_numbers(chosen: dict[str, Any]) -> None:
    """Checks the numbers among some options, and converts them to int or float."""
    for name in ("init_capacity", "max_capacity", "max_bucket_size"):
        if name in chosen:
            chosen[name] = _power_of_two(name, chosen[name])
    for name, least in (("enter_threshold", 0), ("block_size", 0), ("device_id", -1)):
        if name in chosen:
            chosen[name] = _integer(name, chosen[name], least)
    if chosen.get("enter_threshold", 0) > _MAX_THRESHOLD:
        raise ValueError(
            f"`enter_threshold` must be at most {_MAX_THRESHOLD}. "
            f"Received: enter_threshold={chosen['enter_threshold']}."
        )
    for name, low, high in (
        ("max_hbm_for_vectors", 0.0, float("inf")),
        ("filter_ratio", 0.0, 1.0),
        ("max_load_factor", 0.0, 1.0),
    ):
        if name in chosen:
            chosen[name] = _number(name, chosen[name], low, high)
    if chosen.get("max_load_factor") == 0.0:
        raise ValueError("`max_load_factor` must be above 0. Received: max_load_factor=0.")
    if chosen.get("block_size", 0) % 32 or chosen.get("block_size", 0) > 1024:
        raise ValueError(
            "`block_size` must be a multiple of 32 up to 1024. "
            f"Received: block_size={chosen['block_size']}."
        )


def _check_words(chosen: dict[str, Any]) -> None:
    """Checks the strings, flags and the path among some options."""
    for name, words in (("evict_strategy", STRATEGIES), ("on_refused", _ON_REFUSED)):
        if name in chosen and chosen[name] not in words:
            raise ValueError(
                f"`{name}` must be one of {', '.join(words)}. Received: {name}={chosen[name]!r}."
            )
    for name in ("count_repeats", "io_by_cpu"):
        if chosen.get(name, False) not in (False, True):
            raise TypeError(f"`{name}` must be True or False. Received: {name}={chosen[name]!r}.")
    if chosen.get("count_repeats", False) and chosen.get("evict_strategy") != "kLfu":
        raise ValueError(
            "`count_repeats` is for scores that count: use evict_strategy='kLfu'. Received: "
            f"evict_strategy={chosen.get('evict_strategy', HkvOptions.evict_strategy)!r}."
        )
    if not isinstance(chosen.get("far_path", ""), (str, os.PathLike)):
        raise TypeError(
            "`far_path` must be the name of a folder or of a new file. "
            f"Received: far_path={chosen['far_path']!r}."
        )


def _integer(name: str, value: Any, least: int) -> int:
    if not _is_whole(value):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}. Received: {name}={value}.")
    return int(value)


def _is_whole(value: Any) -> bool:
    """Whether a value is a whole number of any type."""
    return _is_number(value) and value % 1 == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _power_of_two(name: str, value: Any) -> int:
    number = _integer(name, value, 1)
    if number & (number - 1) and number < MAX_CAPACITY:
        raise ValueError(
            f"`{name}` must be a power of two. Received: {name}={number}. "
            f"The next one is {1 << number.bit_length()}."
        )
    if not LINE <= number <= MAX_CAPACITY:
        raise ValueError(
            f"`{name}` must be a power of two from {LINE} to {MAX_CAPACITY}. "
            f"Received: {name}={number}."
        )
    return number


def _number(name: str, value: Any, low: float, high: float) -> float:
    if not _is_number(value):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}.")
    if not low <= value <= high:
        raise ValueError(f"`{name}` must be from {low:g} to {high:g}. Received: {name}={value}.")
    return as_float(value)
