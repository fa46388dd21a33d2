"""TFRA's `dynamic_embedding`, on the tables of this package: change the import line.

    from sok_lite import dynamic_embedding as de

The names are those of TensorFlow Recommenders-Addons; docs/compatibility.md lists them all.
"""

import importlib
from typing import Any

from sok_lite.dynamic_embedding import data_flow, math, ragged_embedding_ops, shadow_ops, train
from sok_lite.dynamic_embedding.by_name import get_variable
from sok_lite.dynamic_embedding.creators import (
    CuckooHashTableConfig,
    CuckooHashTableCreator,
    HkvHashTableConfig,
    HkvHashTableCreator,
    KVCreator,
    RedisTableCreator,
)
from sok_lite.dynamic_embedding.hkv import HkvEvictStrategy, HkvHashTable
from sok_lite.dynamic_embedding.lookups import (
    embedding_lookup,
    embedding_lookup_sparse,
    embedding_lookup_unique,
    safe_embedding_lookup_sparse,
)
from sok_lite.dynamic_embedding.mode import (
    ModelMode,
    enable_inference_mode,
    enable_train_mode,
    get_model_mode,
)
from sok_lite.dynamic_embedding.optimizer import DynamicEmbeddingOptimizer
from sok_lite.dynamic_embedding.redis_table import RedisTable, RedisTableConfig
from sok_lite.dynamic_embedding.restrict_policies import (
    FrequencyRestrictPolicy,
    RestrictPolicy,
    TimestampRestrictPolicy,
)
from sok_lite.dynamic_embedding.savers import FileSystemSaver
from sok_lite.dynamic_embedding.tables import CuckooHashTable
from sok_lite.dynamic_embedding.trainable import (
    DEResourceVariable,
    TrainableWrapper,
    trainable_wrapper_filter,
)
from sok_lite.dynamic_embedding.variable import GraphKeys, Variable
from sok_lite.dynamic_embedding.warm_start_util import WarmStartHook, warm_start

__all__ = [
    "CuckooHashTable",
    "CuckooHashTableConfig",
    "CuckooHashTableCreator",
    "DEResourceVariable",
    "DynamicEmbeddingOptimizer",
    "FileSystemSaver",
    "FrequencyRestrictPolicy",
    "GraphKeys",
    "HkvEvictStrategy",
    "HkvHashTable",
    "HkvHashTableConfig",
    "HkvHashTableCreator",
    "KVCreator",
    "ModelMode",
    "RedisTable",
    "RedisTableConfig",
    "RedisTableCreator",
    "RestrictPolicy",
    "TimestampRestrictPolicy",
    "TrainableWrapper",
    "Variable",
    "WarmStartHook",
    "data_flow",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "enable_inference_mode",
    "enable_train_mode",
    "get_model_mode",
    "get_variable",
    "keras",
    "math",
    "ragged_embedding_ops",
    "safe_embedding_lookup_sparse",
    "shadow_ops",
    "train",
    "trainable_wrapper_filter",
    "warm_start",
]


def __getattr__(name: str) -> Any:
    # On first use, because it imports Keras.
    if name == "keras":
        return importlib.import_module("sok_lite.dynamic_embedding.keras")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
