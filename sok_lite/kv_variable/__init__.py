"""TFPlus' KvVariable: `from sok_lite.kv_variable import get_kv_variable`.

`patch_tf()` puts the names where TFPlus documents them. `training_mode`, or
`kv_variable_ops.IS_TRAINING`, controls whether lookups insert; an IS_TRAINING of this package has
no effect.
"""

from sok_lite.bridge.optimizers.patched import patch_optimizers
from sok_lite.kv_variable import training as train
from sok_lite.kv_variable.embedding_ops import (
    embedding_lookup,
    embedding_lookup_sparse,
    embedding_lookup_unique,
    insert_kv_embedding,
    safe_embedding_lookup_sparse,
    use_tf_embedding_ops,
    use_tfplus_embedding_ops,
)
from sok_lite.kv_variable.kv_variable_ops import KvVariable, training_mode
from sok_lite.kv_variable.kv_variable_options import (
    KvOptions,
    KvStorageConfig,
    StorageCombination,
    StorageType,
)
from sok_lite.kv_variable.partitioned import PartitionedKvVariable
from sok_lite.kv_variable.patch import patch_tf, unpatch_tf
from sok_lite.kv_variable.saveable import (
    KvVariableSaveable,
    disable_delta_export,
    disable_full_or_delta_import_v2,
    disable_save_v3,
    enable_delta_export,
    enable_full_or_delta_import_v2,
    enable_save_v3,
    save_delta,
    set_new_num_shards,
    set_tfplus_saver_mode,
)
from sok_lite.kv_variable.saved_files import rank_path, saved_path
from sok_lite.kv_variable.variable_scope import get_kv_variable

__all__ = [
    "KvOptions",
    "KvStorageConfig",
    "KvVariable",
    "KvVariableSaveable",
    "PartitionedKvVariable",
    "StorageCombination",
    "StorageType",
    "disable_delta_export",
    "disable_full_or_delta_import_v2",
    "disable_save_v3",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "enable_delta_export",
    "enable_full_or_delta_import_v2",
    "enable_save_v3",
    "get_kv_variable",
    "insert_kv_embedding",
    "patch_tf",
    "rank_path",
    "safe_embedding_lookup_sparse",
    "save_delta",
    "saved_path",
    "set_new_num_shards",
    "set_tfplus_saver_mode",
    "train",
    "training_mode",
    "unpatch_tf",
    "use_tf_embedding_ops",
    "use_tfplus_embedding_ops",
]

patch_optimizers()
