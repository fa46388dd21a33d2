"""`RedisTable`: a table whose rows are in Redis, shared by programs through its name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.dynamic_embedding.redis_settings import read_settings
from sok_lite.dynamic_embedding.redis_store import RedisStore
from sok_lite.dynamic_embedding.tables import HashTable
from sok_lite.engine.callers import warn
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.remote import RemoteTable


@dataclass(eq=False, repr=False)
class RedisTableConfig:
    """The path of the file that names the Redis (see redis_settings.py).

    Attributes:
      redis_config_abs_dir: path of a JSON file; None: from the environment variable
        TFRA_REDIS_CONFIG_PATH, else the defaults.
      redis_config_abs_dir_env: environment variable with the path of a file.
    """

    redis_config_abs_dir: str | None = None
    redis_config_abs_dir_env: str | None = None


@unconverted
class RedisTable(HashTable):
    """A table whose rows and optimizer states are in Redis.

    All tables of one name and model_tag_runtime are the same table, in any process: what one writes
    or trains the others read, and no worker's update is lost. Optimizers with equal states, such as
    two Adams, share them. Checkpoints hold nothing of the table, and restoring leaves its rows
    unchanged. Further arguments as for `CuckooHashTable`.

    Args:
      key_dtype: tf.int64 or tf.int32.
      checkpoint: whether to warn that checkpoints do not have its rows.
      device, shard_saveable_object_fn: not used.
      config: a `RedisTableConfig`; None: its defaults.

    Raises:
      NotImplementedError: string keys.
      TypeError: `config` of another type.
      ValueError: invalid settings, or the table exists with other rows.
      ConnectionError: no Redis answers.
      ImportError: the package `redis` is not installed.
    """

    kind = "de.RedisTable"
    is_shared = True
    instead_of_save = (
        "Its rows stay in the Redis. Save the dense part of the model alone; for serving, use "
        "sok_lite.export_serving, which copies the rows."
    )

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str = "RedisTable",
        checkpoint: bool = False,
        config: RedisTableConfig | None = None,
        device: str = "",
        shard_saveable_object_fn: Callable[..., Any] | None = None,
    ) -> None:
        if tf.as_dtype(key_dtype) == tf.string:
            raise NotImplementedError(
                "A RedisTable has integer keys: a text could not be told from its number by "
                "another program. Received: key_dtype=string. Use tf.strings.to_hash_bucket_fast, "
                "or a CuckooHashTable."
            )
        if config is not None and not isinstance(config, RedisTableConfig):
            raise TypeError(
                f"`config` must be a RedisTableConfig. Received: {type(config).__name__}."
            )
        if checkpoint:
            warn(
                f"No checkpoint or Saver has the rows of {name!r}: they stay in the Redis, and a "
                "restore leaves them as they are then. To keep them as they were, back the Redis "
                "up. checkpoint=False says that you know.",
                RuntimeWarning,
            )
        chosen = config or RedisTableConfig()
        self._settings = read_settings(chosen.redis_config_abs_dir, chosen.redis_config_abs_dir_env)
        super().__init__(key_dtype, value_dtype, default_value, name, False, {})

    def _make_table(self, make: Callable[[], EmbeddingTable]) -> Any:
        return RemoteTable(make, _open_rows(self._settings, make()))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {}  # the rows stay where they are

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return tf.no_op()


def _open_rows(settings: dict[str, Any], like: EmbeddingTable) -> RedisStore:
    """Returns the rows of a table; a new one starts with the rows of version model_tag_import."""
    form: dict[str, Any] = {
        "name": like.name,
        "row_bytes": like.dim * like.row_dtype.storage.itemsize,
        "row_type": f"{like.dim} x {like.row_dtype.name}",
    }
    rows = RedisStore(settings, **form)
    earlier = settings["model_tag_import"]
    if rows.is_new and rows.has_version(earlier) and earlier != settings["model_tag_runtime"]:
        other = RedisStore({**settings, "model_tag_runtime": earlier}, **form)
        rows.copy_from(other)
        other.close()
    return rows
