"""What a training step of one rank moves in the memory of a GPU, by calculation.

The step looks ids up, one a row, sums their gradients and updates by Adam; all keys are known, rows
are float32. `least_bytes` is what any implementation moves. `traffic_of` is what one launch of ours
moves, by a formula for each kernel and operation: what it reads and writes counts once a launch, as
if caches held everything within a launch and nothing between two. What lies scattered counts in
whole lines of 64 bytes. tests/tools/test_estimate_gpu_step.py compares the formulas of kernels with
the lines that launches touch on the simulated GPU.
"""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sok_lite.backend.sources import all_kernels, find_kernel
from tools.scaling_model import LINE
from tools.scaling_work import Job, Work

ROOT = Path(__file__).resolve().parents[1]
_PIECE = 32  # kPiece of kernels/pooling.cuh
_PASSES = 4  # of a radix sort of int32 by 8 bits at a time


class Sizes(NamedTuple):
    """How much a step has to do.

    Attributes:
      tables: all alike.
      batch: ids of each table.
      dim: elements of a row.
      states: arrays of float32 beside a row; Adam has 2.
      distinct: distinct keys of all tables together.
    """

    tables: int
    batch: int
    dim: int
    states: int
    distinct: float

    @staticmethod
    def of(job: Job) -> "Sizes":
        """Returns the sizes of a job of one id a row, with as many distinct keys as expected."""
        return Sizes(job.tables, job.batch, job.dim, job.states, Work(job, 1).distinct)

    @property
    def items(self) -> int:
        """Ids of all tables together."""
        return self.tables * self.batch

    @property
    def row(self) -> int:
        """Bytes of a row, of a state and of a gradient."""
        return 4 * self.dim

    @property
    def row_lines(self) -> int:
        """Lines of a row that lies alone."""
        return math.ceil(self.row / LINE)


class Traffic(NamedTuple):
    """What a launch moves.

    Attributes:
      bytes: read and written.
      accesses: of single lines of them, read or written wherever they lie.
    """

    bytes: float
    accesses: float


def least_bytes(sizes: Sizes) -> dict[str, float]:
    """Returns the bytes that any implementation moves, by what they are.

    Each id once, a line of the index and the row of each distinct key; the result and its gradient,
    since the model between them is another's; and the row and its states, read and written.
    """
    own = LINE * sizes.row_lines * sizes.distinct
    return {
        "ids": 8 * sizes.items,
        "index": LINE * sizes.distinct,
        "rows": own,
        "results": sizes.row * sizes.items,
        "gradients": sizes.row * sizes.items,
        "rows and states, updated": 2 * (1 + sizes.states) * own,
    }


def _traffic(dense: float, lines: float = 0.0, also_scattered: float = 0.0) -> Traffic:
    """Returns what a launch moves.

    Args:
      dense: bytes of arrays of which everything is touched.
      lines: single lines beside them.
      also_scattered: how many accesses those of arrays are that are not in order.
    """
    return Traffic(dense + LINE * lines, lines + also_scattered)


def _lines(elements: float, itemsize: int, wanted: float) -> float:
    """Returns the lines with `wanted` scattered ones of so many elements, no two in a line."""
    return min(math.ceil(elements * itemsize / LINE), wanted)


def _heads(s: Sizes) -> float:
    """Lines of the scratch hash with a distinct key: two int32 for each item."""
    return _lines(2 * s.items, 4, s.distinct)


# By the first part of a kernel's name; the longest counts. What is behind "+" is what it writes.
KERNELS: dict[str, Callable[[Sizes], Traffic]] = {
    # keys + row numbers; of each distinct key a line of the index, + its stamp
    "find": lambda s: _traffic(8 * s.items + 4 * s.items, s.distinct + s.distinct),
    # row splits, row numbers + results; rows
    "pool_": lambda s: _traffic((8 + 4 + s.row) * s.items, s.row_lines * s.distinct),
    # row splits + the row of each item
    "combine_items": lambda s: _traffic(8 * s.items + 4 * s.items),
    # keys + slots; heads + heads
    "dedup_insert": lambda s: _traffic(8 * s.items + 4 * s.items, 2 * _heads(s)),
    # slots + marks; heads
    "dedup_count": lambda s: _traffic(4 * s.items + s.items / 8, _heads(s)),
    # marks + first items, keys; slots and keys of first items, + heads
    "dedup_number": lambda s: _traffic(
        s.items / 8 + (4 + 8) * s.distinct,
        _lines(s.items, 4, s.distinct) + _lines(s.items, 8, s.distinct) + _heads(s),
    ),
    # slots + numbers; heads
    "dedup_inverse": lambda s: _traffic(4 * s.items + 4 * s.items, _heads(s)),
    # sorted items, labels + order, offsets
    "group_sorted": lambda s: _traffic((8 + 4 + 4) * s.items + 8 * s.distinct),
    # offsets, order, the row of each item; labels of pieces; gradients, each row by itself + sums,
    # pieces at most
    "segment_sums": lambda s: _traffic(
        8 * s.distinct + (4 + 4) * s.items + s.row * (s.items + s.distinct + s.items / _PIECE),
        _lines(s.items, 4, s.items / _PIECE),
        also_scattered=s.row_lines * s.items,
    ),
    # of each piece order, label and offsets; pieces at most. What it writes are the sums of few
    "segment_add_pieces": lambda s: _traffic(
        s.row * s.items / _PIECE,
        _lines(s.items, 4, s.items / _PIECE) * 2 + _lines(s.distinct, 8, s.items / _PIECE),
    ),
    # keys, the known keys and their row numbers + row numbers; keys are known ones themselves where
    # TensorFlow is not between
    "recall_rows": lambda s: _traffic((8 + 8 + 4 + 4) * s.distinct),
    # row numbers, gradients; rows and states + rows and states
    "update_adam_": lambda s: _traffic(
        (4 + s.row) * s.distinct, 2 * (1 + s.states) * s.row_lines * s.distinct
    ),
}


class Operation(NamedTuple):
    """An operation of CuPy or TensorFlow on arrays of items or distinct keys.

    Attributes:
      traffic: what it moves.
      source: the file that asks for it, and a text of that line.
      launches: of kernels on the GPU.
    """

    traffic: Callable[[Sizes], Traffic]
    source: tuple[str, str]
    launches: int = 1


_ENGINE, _BRIDGE = "sok_lite/engine", "sok_lite/bridge"
# By name and the dtype of what is written.
OPERATIONS = {
    # + heads
    "fill of int32": Operation(
        lambda s: _traffic(8 * s.items), (f"{_ENGINE}/dedup.py", "heads.fill(-1)")
    ),
    # A copy of the labels, numbers beside them, a histogram, and in each pass both are read and
    # written: Thrust's sort by key, which is CUB's radix sort.
    "argsort of int64": Operation(
        lambda s: _traffic((4 + 4 + 8 + 4 + _PASSES * 2 * (4 + 8)) * s.items),
        (f"{_ENGINE}/segments.py", "xp.argsort("),
        launches=8,
    ),
    # first items + row numbers; row numbers
    "take of uint32": Operation(
        lambda s: _traffic(8 * s.distinct, _lines(s.items, 4, s.distinct)),
        (f"{_ENGINE}/lookup.py", "backend.xp.take("),
    ),
    # Through TensorFlow: the row numbers of items for the way back.
    "setitem of uint32": Operation(
        lambda s: _traffic(2 * 4 * s.items), (f"{_ENGINE}/packed.py", "packed[start:].view(")
    ),
    # Distinct keys, for TensorFlow.
    "setitem of int64": Operation(
        lambda s: _traffic(2 * 8 * s.distinct), (f"{_BRIDGE}/tensor.py", "view[...] = array")
    ),
}
# What TensorFlow copies around the calls of a graph. Rows are cut apart without a copy where they
# fill whole lines.
OF_TENSORFLOW = {
    "tf.concat of ids": Operation(
        lambda s: _traffic(2 * 8 * s.items),
        (f"{_BRIDGE}/lookup_arguments.py", "join(keys)"),
    ),
    "tf.concat of gradients of results": Operation(
        lambda s: _traffic(2 * s.row * s.items), (f"{_BRIDGE}/pooled_call.py", "joined_rows(out")
    ),
    "tf.split of keys": Operation(
        lambda s: _traffic(2 * 8 * s.distinct), (f"{_BRIDGE}/lookup.py", "cut(")
    ),
    "tf.concat of keys": Operation(
        lambda s: _traffic(2 * 8 * s.distinct), (f"{_BRIDGE}/optimizers/host.py", "join(keys)")
    ),
    "tf.concat of gradients of rows": Operation(
        lambda s: _traffic(2 * s.row * s.distinct),
        (f"{_BRIDGE}/optimizers/host.py", "*joined_rows("),
    ),
}
# Of numbers: a few for each table. Only its launch counts.
_OF_NUMBERS = Operation(lambda _: Traffic(0.0, 0.0), ("", ""))


class Launch(NamedTuple):
    """Something that runs on the GPU in a step.

    Attributes:
      name: of a kernel or an operation; see OPERATIONS.
      is_kernel: whether it is one of our kernels.
      is_of_items: whether it is about arrays as long as there are items or distinct keys; else
        about a few numbers of each table.
    """

    name: str
    is_kernel: bool
    is_of_items: bool = True


def _operation(launch: Launch) -> Operation:
    if not launch.is_of_items:
        return _OF_NUMBERS
    known = OPERATIONS | OF_TENSORFLOW
    if launch.name not in known:
        raise KeyError(
            f"No formula of the operation {launch.name!r}. Add it to OPERATIONS of "
            "tools/gpu_step_work.py."
        )
    return known[launch.name]


def traffic_of(launch: Launch, sizes: Sizes) -> Traffic:
    """Returns what a launch moves.

    Raises:
      KeyError: there is no formula of it yet.
    """
    if not launch.is_kernel:
        return _operation(launch).traffic(sizes)
    fits = [name for name in KERNELS if launch.name.startswith(name)]
    if not fits:
        raise KeyError(
            f"No formula of the kernel {launch.name!r}. Add it to KERNELS of "
            "tools/gpu_step_work.py."
        )
    return KERNELS[max(fits, key=len)](sizes)


def gpu_launches(launch: Launch) -> int:
    """Returns how many kernels the GPU runs for a launch of ours or an operation."""
    return 1 if launch.is_kernel else _operation(launch).launches


@functools.cache
def is_kernel(name: str) -> bool:
    """Whether it is the name of one of our kernels."""
    try:
        return bool(find_kernel(name, all_kernels()))
    except AttributeError:
        return False


def source_of(launch: Launch) -> str:
    """Returns the file and line of a launch: of the kernel, or of the call of an operation."""
    if not launch.is_kernel:
        name, text = _operation(launch).source
        return _line_of(ROOT / name, re.escape(text)) if name else ""
    source = find_kernel(launch.name, all_kernels())
    return _line_of(source.path, rf"KERNEL\({source.name}(##\w+)?\)")


def _line_of(path: Path, pattern: str) -> str:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.search(pattern, line):
            return f"{path.relative_to(ROOT)}:{number}"
    raise LookupError(f"No line of {path.relative_to(ROOT)} has {pattern}.")
