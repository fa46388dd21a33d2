"""Creators of the tables of variables, and their settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from sok_lite.dynamic_embedding.hkv import HkvEvictStrategy, HkvHashTable
from sok_lite.dynamic_embedding.redis_table import RedisTable
from sok_lite.dynamic_embedding.savers import DynamicEmbeddingSaver
from sok_lite.dynamic_embedding.tables import CuckooHashTable, HashTable
from sok_lite.engine.table.hkv_options import MAX_CAPACITY


class KVCreator:
    """Creates tables of one kind. Subclass it for custom tables.

    Args:
      config: settings of the tables; None: defaults.
      saver: how their rows are saved; None: in TensorFlow's checkpoints.

    Raises:
      RuntimeError: the saver is not a `DynamicEmbeddingSaver`.
    """

    def __init__(self, config: Any = None, saver: DynamicEmbeddingSaver | None = None) -> None:
        if saver is not None and not isinstance(saver, DynamicEmbeddingSaver):
            raise RuntimeError(
                "`saver` must be a DynamicEmbeddingSaver, such as de.FileSystemSaver(). "
                f"Received: {saver!r}."
            )
        self.config = config
        self.saver = saver

    def create(
        self,
        key_dtype: Any = None,
        value_dtype: Any = None,
        default_value: Any = None,
        name: str | None = None,
        checkpoint: bool | None = None,
        init_size: int | None = None,
        config: Any = None,
        device: str | None = None,
        shard_saveable_object_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Creates a table; see the table's class for the arguments."""
        raise NotImplementedError("A KVCreator of one's own defines create().")

    def get_config(self) -> dict[str, Any]:
        """Returns a description of the creator. RuntimeError: in a TF1 graph."""
        if not tf.executing_eagerly():
            raise RuntimeError("get_config() of a creator is for eager mode.")
        return {"config": self.config, "saver": self.saver}


class _OwnCreator(KVCreator):
    """A creator for a `table_class` of this package."""

    table_class: type[HashTable]

    def create(
        self,
        key_dtype: Any = None,
        value_dtype: Any = None,
        default_value: Any = None,
        name: str | None = None,
        checkpoint: bool | None = None,
        init_size: int | None = None,
        config: Any = None,
        device: str | None = None,
        shard_saveable_object_fn: Callable[..., Any] | None = None,
    ) -> HashTable:
        """Creates a table of `table_class`. A capacity in the config overrides `init_size`."""
        return self.table_class(
            key_dtype,
            value_dtype,
            default_value,
            name or self.table_class.__name__,
            checkpoint is not False,
            **self._options(config or getattr(self, "config", None), init_size or 0),
        )

    def _options(self, config: Any, init_size: int) -> dict[str, Any]:
        raise NotImplementedError


class CuckooHashTableConfig:
    """Settings of a `CuckooHashTable`: none."""


class CuckooHashTableCreator(_OwnCreator):
    """Creates `CuckooHashTable`s, which grow without bound and keep every key."""

    table_class = CuckooHashTable

    def _options(self, config: Any, init_size: int) -> dict[str, Any]:
        return {"init_size": init_size}


@dataclass(eq=False, repr=False)
class HkvHashTableConfig:
    """Settings of a `HkvHashTable`, named like its arguments."""

    init_capacity: int = 0
    max_capacity: int = MAX_CAPACITY
    max_hbm_for_values: int = 1 << 30
    evict_strategy: HkvEvictStrategy = HkvEvictStrategy.LRU
    step_per_epoch: int = 0
    gen_scores_fn: Callable[[tf.Tensor], Any] | None = None
    reserved_key_start_bit: int = 0


class HkvHashTableCreator(_OwnCreator):
    """Creates `HkvHashTable`s, bounded tables with two memory tiers, by a `HkvHashTableConfig`."""

    table_class = HkvHashTable

    def _options(self, config: Any, init_size: int) -> dict[str, Any]:
        defaults = vars(HkvHashTableConfig())
        options = {name: getattr(config, name, default) for name, default in defaults.items()}
        options["init_capacity"] = options["init_capacity"] or init_size
        return options


class RedisTableCreator(_OwnCreator):
    """Creates `RedisTable`s, whose rows are in Redis, by a `RedisTableConfig`."""

    table_class = RedisTable

    def _options(self, config: Any, init_size: int) -> dict[str, Any]:
        return {"config": config}
