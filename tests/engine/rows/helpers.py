"""A row store."""

from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.rows.store import RowStore


def new_store(backend, dim=3, dtype="float32", **options):
    return RowStore(backend, dim, row_dtype(dtype), **options)
