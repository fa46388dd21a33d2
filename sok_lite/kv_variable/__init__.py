"""TFPlus' KvVariable: `from sok_lite.kv_variable import get_kv_variable`.

`patch_tf()` puts the names where TFPlus' document has them.
"""

from sok_lite.kv_variable.embedding_ops import (
    embedding_lookup,
    embedding_lookup_sparse,
    embedding_lookup_unique,
    insert_kv_embedding,
    safe_embedding_lookup_sparse,
)
from sok_lite.kv_variable.kv_variable_ops import KvVariable
from sok_lite.kv_variable.kv_variable_options import KvOptions, StorageCombination
from sok_lite.kv_variable.partitioned import PartitionedKvVariable
from sok_lite.kv_variable.variable_scope import get_kv_variable

__all__ = [
    "KvOptions",
    "KvVariable",
    "PartitionedKvVariable",
    "StorageCombination",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "get_kv_variable",
    "insert_kv_embedding",
    "safe_embedding_lookup_sparse",
]
