"""SOK's module of this name."""

from sok_lite.sok.lookup import (
    all2all_dense_embedding,
    allSupportedVariableCheckFunc,
    group_lookup,
    isDynamicVariable,
    isEmbeddingVariable,
    isResourceVariable,
    isVariable,
    lookup_sparse,
    sparse_read_and_evict,
    to_list,
)

__all__ = [
    "all2all_dense_embedding",
    "allSupportedVariableCheckFunc",
    "group_lookup",
    "isDynamicVariable",
    "isEmbeddingVariable",
    "isResourceVariable",
    "isVariable",
    "lookup_sparse",
    "sparse_read_and_evict",
    "to_list",
]
