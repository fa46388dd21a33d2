"""Times what Python does for a training step on a GPU, without one: nothing is launched.

Arrays are CuPy's, over memory of the host, so that slices, views and addresses cost what they cost
on a GPU. A step is a lookup, its gradient and Adam on known keys, one id a row, called without
TensorFlow. One line `RESULT {json}` for each number of tables, microseconds of a median step:

  step_us      all that Python does, but for launches and waits
  packing_us   of it, to make the arguments of launches: addresses, columns, words
  launches     how many would be made

Example:
  python -m scripts.bench engine packing --tables 1 26
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np

from scripts.bench.common.measuring import result
from sok_lite.backend.cpu import CpuBackend
from sok_lite.backend.cuda import CudaBackend
from sok_lite.backend.publish import NOTHING
from sok_lite.backend.sources import all_kernels
from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.pieces import Pieces
from sok_lite.engine.step import StepOptions
from sok_lite.engine.table import make_table
from sok_lite.engine.update import UpdateStep
from sok_lite.engine.update_rows import Updates
from tests.support.parts import Part, batch_of

POOL_BYTES = 1 << 26
WARM_UP = 10  # steps that do not count


class HostArray(cupy.ndarray):
    """An array of CuPy's over memory of the host; NumPy fills it."""

    def fill(self, value: Any) -> None:
        on_host(self)[...] = value


def on_host(array: Any) -> np.ndarray:
    """Returns the memory of an array, as NumPy's."""
    interface = {"data": (array.data.ptr, False), "shape": array.shape, "version": 3}
    return np.asarray(
        SimpleNamespace(__array_interface__={**interface, "typestr": array.dtype.str})
    )


class Unlaunched(CudaBackend):
    """A GPU that launches nothing and whose memory is the host's.

    Attributes:
      packing: seconds so far in which arguments were made.
      launches: how many there would have been.
      starts: what dedup is to tell of where the keys of each table start.
    """

    def __init__(self) -> None:
        self._sources, self._source_of = all_kernels(), {}
        self._binaries: Any = SimpleNamespace(has_wide=True)
        self._threads_per_block, self._max_blocks = 256, 32 * 132
        self._memory, self._used = np.empty(POOL_BYTES, np.uint8), 0
        names = ("float32", "int64", "int32", "uint32")
        dtypes = {name: getattr(np, name) for name in names}
        self.xp: Any = SimpleNamespace(
            empty=self.empty,
            zeros=self.zeros,
            take=lambda array, index: self.empty(index.shape, array.dtype),
            argsort=lambda array, kind: self.empty(array.shape, np.int64),
            ascontiguousarray=cupy.ascontiguousarray,
            **dtypes,
        )
        self.packing, self.launches = 0.0, 0
        self.starts = np.zeros(1, np.int64)

    def _kernel(self, name: str, is_wide: bool) -> Any:
        return bool, 1, 1024

    def empty(self, shape: Any, dtype: Any) -> HostArray:
        """Returns memory, which comes again when all of it was given out."""
        dtype, size = np.dtype(dtype), np.dtype(dtype).itemsize * int(np.prod(shape))
        if self._used + size > POOL_BYTES:
            self._used = 0
        place, self._used = self._used, self._used + -(-size // 256) * 256
        return self.view(self._memory[place : place + size].view(dtype).reshape(shape))

    def view(self, array: np.ndarray) -> HostArray:
        """Returns an array of the host as one of CuPy's."""
        owner = cupy.cuda.UnownedMemory(array.ctypes.data, max(1, array.nbytes), array, 0)
        return HostArray(array.shape, array.dtype, cupy.cuda.MemoryPointer(owner, 0))

    def zeros(self, shape: Any, dtype: Any) -> HostArray:
        """Returns memory of zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def to_host(self, array: Any) -> np.ndarray:
        return self.starts if array.shape == self.starts.shape else on_host(array)

    def from_host(self, array: Any) -> HostArray:
        made = self.empty(np.shape(array), array.dtype)
        on_host(made)[...] = array
        return made

    def _timed(self, make: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        made = make(*args)
        self.packing += time.perf_counter() - start
        return made

    def _plan_launch(self, *args: Any) -> Any:
        super()._plan_launch(*args)
        self.launches += 1
        return NOTHING

    def _joined(self, *args: Any) -> Any:
        return self._timed(super()._joined, *args)

    def _joined_columns(self, *args: Any) -> Any:
        return self._timed(super()._joined_columns, *args)

    def addresses(self, *args: Any) -> Any:
        return self._timed(super().addresses, *args)


def measure(num_tables: int, args: argparse.Namespace) -> None:
    """Times steps on so many tables, and prints the result."""
    cpu, gpu, comm = CpuBackend(), Unlaunched(), SingleCommunicator()
    keys, splits = np.arange(args.ids), np.arange(args.ids + 1)
    ones = make_initializer("ones", args.dim)
    tables = [
        make_table("hbm", cpu, args.dim, name=f"t{i}", initializer=ones) for i in range(num_tables)
    ]
    parts = [Part(table, keys, splits, None, "sum") for table in tables]
    shapes, rules = [(args.ids, args.dim)] * num_tables, [Adam()] * num_tables
    grads = np.ones(num_tables * args.ids * args.dim, np.float32)
    looked_up = [(table, None, "sum") for table in tables]

    def step(backend: Any, batch: Any, grads: Any, number: int) -> None:
        _, context = lookup.forward(backend, comm, batch)
        found = lookup.backward(backend, looked_up, Pieces.of(grads, shapes), context)
        of_found, nobody = [True] * num_tables, [None] * num_tables
        updates = Updates(tables, rules, found.keys, found.row_grads, nobody, of_found)
        UpdateStep(updates, StepOptions(1e-3, number)).commit()

    batch = batch_of(cpu, parts)
    step(cpu, batch, grads, 1)
    for table in tables:
        table.backend = gpu
    gpu.starts = args.ids * np.arange(num_tables + 1)
    on_gpu, keys, splits = map(gpu.view, (grads, batch.keys, batch.row_splits))
    batch = batch._replace(keys=keys, row_splits=splits)
    times, packing = [], []
    for number in range(2, 2 + WARM_UP + args.rounds):
        gpu.packing, gpu.launches, start = 0.0, 0, time.perf_counter()
        step(gpu, batch, on_gpu, number)
        times.append(time.perf_counter() - start)
        packing.append(gpu.packing)
    result(
        case="step",
        tables=num_tables,
        ids=args.ids,
        step_us=1e6 * statistics.median(times[WARM_UP:]),
        packing_us=1e6 * statistics.median(packing[WARM_UP:]),
        launches=gpu.launches,
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, nargs="*", default=[1, 26])
    parser.add_argument("--ids", type=int, default=1024, help="of a table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    for num_tables in args.tables:
        measure(num_tables, args)
