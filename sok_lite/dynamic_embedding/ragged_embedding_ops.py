"""TFRA's names for sparse lookups of ragged keys."""

from typing import Any

from sok_lite.dynamic_embedding import lookups

__all__ = ["embedding_lookup_sparse", "safe_embedding_lookup_sparse"]


def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    name: str | None = "embedding_lookup_sparse",
    combiner: str | None = "mean",
) -> Any:
    """As `de.embedding_lookup_sparse` for ragged keys: (batch, dim), zeros for empty rows."""
    return lookups.embedding_lookup_sparse(params, sp_ids, sp_weights, name=name, combiner=combiner)


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: Any = None,
    name: str | None = "safe_embedding_lookup_sparse",
) -> Any:
    """As `de.safe_embedding_lookup_sparse`; empty rows get `default_id`, or zeros."""
    return lookups.safe_embedding_lookup_sparse(
        embedding_weights, sparse_ids, sparse_weights, combiner, default_id, name
    )
