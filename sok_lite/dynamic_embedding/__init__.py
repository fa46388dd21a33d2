"""TFRA's `dynamic_embedding`, on the tables of this package: change the import line.

    from sok_lite import dynamic_embedding as de

The names are those of TensorFlow Recommenders-Addons; docs/faces.md has them all.
"""

from sok_lite.dynamic_embedding import data_flow, math, shadow_ops
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
from sok_lite.dynamic_embedding.variable import GraphKeys, Variable, get_variable

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
    "data_flow",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "enable_inference_mode",
    "enable_train_mode",
    "get_model_mode",
    "get_variable",
    "math",
    "safe_embedding_lookup_sparse",
    "shadow_ops",
    "trainable_wrapper_filter",
]
