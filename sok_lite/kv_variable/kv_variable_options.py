"""`KvOptions`: where a KvVariable keeps its rows."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sok_lite.engine.table.hkv_options import MAX_CAPACITY, round_up_capacities

# Table options that the variable sets itself.
_DECIDED = ("enter_threshold", "evict_strategy", "filter_ratio", "count_repeats")


class StorageCombination(enum.Enum):
    """The memories for rows.

    MEM: one memory: the GPU's, or RAM without a GPU. MEM_SSD: hot rows there, the rest in host
    memory or, with `far_path`, in a file.
    """

    MEM = "mem"
    MEM_SSD = "mem_ssd"


class StorageType(enum.Enum):
    """The memory of a KvStorageConfig: the first memory, as in TFPlus."""

    MEM_STORAGE = "mem_storage"


@dataclass(frozen=True)
class KvStorageConfig:
    """TFPlus' settings of a memory, without effect there and here: memory is used while it lasts.

    Attributes:
      storage_path: "" without one.
      training_storage_size, inference_storage_size: keys in this memory; -1: any number.
    """

    storage_path: str = ""
    training_storage_size: int = -1
    inference_storage_size: int = -1


@dataclass(frozen=True)
class KvOptions:
    """Where a variable keeps its rows, and how many.

    Attributes:
      combination: which memories.
      configs: options by name, of `sok_lite.engine.table.hkv_options.HkvOptions`: `init_capacity`,
        and `max_capacity` to evict the least frequent key from a full table, both rounded up to
        powers of two; MEM_SSD also takes `max_hbm_for_vectors` and `far_path`. MEM may have a
        KvStorageConfig for StorageType.MEM_STORAGE, as in TFPlus.

    Raises:
      TypeError: `combination`, `configs`, or the value of a StorageType of another type.
      ValueError: an option that the combination or the variable sets itself.
    """

    combination: StorageCombination = StorageCombination.MEM
    configs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.combination, StorageCombination):
            known = ", ".join(f"StorageCombination.{each.name}" for each in StorageCombination)
            raise TypeError(
                f"`combination` must be one of {known}. Received: {self.combination!r}."
            )
        if self.configs is not None and not isinstance(self.configs, Mapping):
            raise TypeError(
                "`configs` must be a dict of the table's options, or None. "
                f"Received: {self.configs!r}."
            )
        storages = {n: x for n, x in (self.configs or {}).items() if isinstance(n, StorageType)}
        for name, config in storages.items():
            if not isinstance(config, KvStorageConfig):
                raise TypeError(
                    f"`configs[{name}]` must be a KvStorageConfig. Received: {config!r}."
                )
        decided = list(_DECIDED)
        if self.combination is StorageCombination.MEM:
            decided += ["max_hbm_for_vectors", "far_path"]
        wrong = sorted(set(self.configs or {}) & set(decided))
        if self.combination is not StorageCombination.MEM:
            wrong += map(str, storages)  # paths and sizes would have no effect
        if wrong:
            raise ValueError(
                f"`configs` cannot have {', '.join(wrong)}: "
                f"{self.combination.name} or the variable decides that. Leave it out."
            )
        if self.configs is not None:
            object.__setattr__(self, "configs", round_up_capacities(self.configs))

    def table_options(self, enter_threshold: int) -> dict[str, Any]:
        """Returns the options of the engine's "hybrid" table."""
        configs = {n: x for n, x in (self.configs or {}).items() if not isinstance(n, StorageType)}
        options = {
            "max_capacity": MAX_CAPACITY,
            "evict_strategy": "kLfu",
            "count_repeats": True,
            "enter_threshold": enter_threshold,
            **configs,
        }
        if self.combination is StorageCombination.MEM:
            options["max_hbm_for_vectors"] = float("inf")
        return options
