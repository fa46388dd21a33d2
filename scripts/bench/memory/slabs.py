"""Counts how often a table asks a GPU's driver for memory of rows, and what it then does not use.

The row store allocates as on a GPU (the same size of a first piece) but in ordinary memory, so it
needs none. Value and the two states of Adam, rows added in batches; one line `RESULT {json}` a
batch size. Spare bytes a row are those set aside beyond the rows handed out: at the end, and at the
worst since the first tenth of the rows.

Example:
  python -m scripts.bench memory slabs --rows 1000000 --dim 64
"""

import argparse
from collections.abc import Callable

import numpy as np

from scripts.bench.common.measuring import result
from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.rows.store import RowStore

_GPU_CHUNK_BYTES = 1 << 16  # as in sok_lite/backend/cuda.py


class CountingBackend(CpuBackend):
    """Counts the allocations of near rows."""

    chunk_bytes = _GPU_CHUNK_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def _counted(self, allocate: Callable[[int], np.ndarray], num_bytes: int) -> np.ndarray:
        self.sizes.append(num_bytes)
        return allocate(num_bytes)

    def zeros_chunk(self, num_bytes: int) -> np.ndarray:
        return self._counted(super().zeros_chunk, num_bytes)

    def first_chunk(self, num_bytes: int) -> np.ndarray:
        return self._counted(super().first_chunk, num_bytes)


def measure(num_rows: int, dim: int, batch: int) -> None:
    backend = CountingBackend()
    store = RowStore(backend, dim, row_dtype("float32"))
    for state in ("m", "v"):
        ensure_state(store, state, 0.0)
    worst = spare = 0.0
    while store.num_rows < num_rows:
        store.allocate(min(batch, num_rows - store.num_rows))
        spare = (store.num_bytes - store.used_bytes) / store.num_rows
        if store.num_rows >= num_rows // 10:
            worst = max(worst, spare)
    result(
        rows=store.num_rows,
        dim=dim,
        row_bytes=store.row_bytes,
        batch=batch,
        chunks=store.column().num_chunks,
        allocations=len(backend.sizes),
        largest_bytes=max(backend.sizes),
        spare_bytes_per_row=spare,
        worst_spare_bytes_per_row=worst,
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 16_384, 65_536, 1_000_000])
    args = parser.parse_args()
    for batch in args.batches:
        measure(args.rows, args.dim, batch)
