"""`KvOptions`: where the rows of a KvVariable are kept."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sok_lite.engine.table.hkv_options import MAX_CAPACITY, rounded_up

# Options of the table that the variable decides itself.
_DECIDED = ("enter_threshold", "evict_strategy", "filter_ratio", "count_repeats")


class StorageCombination(enum.Enum):
    """The memories that rows are kept in.

    MEM: one memory: the GPU's, or RAM without a GPU. MEM_SSD: hot rows there, the others in host
    memory or, with `far_path`, in a file.
    """

    MEM = "mem"
    MEM_SSD = "mem_ssd"


class StorageType(enum.Enum):
    """The kind of memory of a KvStorageConfig: the first memory, as in TFPlus."""

    MEM_STORAGE = "mem_storage"


@dataclass(frozen=True)
class KvStorageConfig:
    """The settings of a memory, as TFPlus takes them. They have no effect, there or here: rows are
    kept in memory as long as there is some.

    Attributes:
      storage_path: "" where none is named.
      training_storage_size, inference_storage_size: keys in this memory; -1: any number.
    """

    storage_path: str = ""
    training_storage_size: int = -1
    inference_storage_size: int = -1


@dataclass(frozen=True)
class KvOptions:
    """Where the rows of a variable are kept, and how many.

    Attributes:
      combination: which memories.
      configs: options of the table by name, of `sok_lite.engine.table.hkv_options.HkvOptions`:
        `init_capacity`, and `max_capacity` for a table that is to forget the least counted key
        when it is full, both rounded up to powers of two; MEM_SSD also takes
        `max_hbm_for_vectors` and `far_path`. MEM may have a KvStorageConfig for
        StorageType.MEM_STORAGE, as in TFPlus. None: none.

    Raises:
      TypeError: `combination` or `configs`, or what it has for a StorageType, is no such thing.
      ValueError: an option that the combination or the variable decides.
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
            object.__setattr__(self, "configs", rounded_up(self.configs, stacklevel=3))

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
