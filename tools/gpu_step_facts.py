"""What tools/estimate_gpu_step.py is given: a GPU, what was measured on one, what others published.

Each number has its source. The cautious ends of `H100` are fitted, so that what was measured lies
between the two ends; the hopeful ones are what its parts reached by themselves.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

from tools.gpu_step_work import Sizes
from tools.scaling_machine import Given


@dataclass(frozen=True)
class Gpu:
    """A GPU and the host beside it.

    Attributes:
      name: of the GPU.
      bandwidth: bytes a second of its memory.
      efficiency: the part of it that kernels reach.
      accesses: single lines of 64 bytes a second, wherever they lie.
      kernel: what a kernel takes on the GPU beside its bytes: it begins, fills the GPU, ends.
      launch: what the host takes to launch a kernel whose arguments are packed.
      wait: what it takes to wait for a GPU that has nothing to do.
      python: the time of Python, divided by what it takes where this runs.
      bridge: our Python between TensorFlow and the engine.
      framework: TensorFlow's own part of a step, without the model.
    """

    name: str
    bandwidth: Given
    efficiency: Given
    accesses: Given
    kernel: Given
    launch: Given
    wait: Given
    python: Given
    bridge: Given
    framework: Given

    def givens(self) -> dict[str, Given]:
        """Returns the numbers by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: given for name, given in named.items() if isinstance(given, Given)}


_ON_H100 = "docs/measurements.md, GPU, 2026-11-26"
_MACHINE_A = "machine A, docs/measurements.md, 2026-11-27"

H100 = Gpu(
    name="H100 80GB HBM3",
    bandwidth=Given(3.35e12, 3.35e12, "B/s", "published", "nvidia.com/en-us/data-center/h100, SXM"),
    efficiency=Given(
        0.35,
        0.80,
        "",
        "measured",
        f"hopeful: a copy, 2.67 TB/s, {_ON_H100}; cautious: fitted to what was measured of steps",
    ),
    accesses=Given(22e9, 30e9, "1/s", "measured", f"random reads of 64 bytes, {_ON_H100}"),
    kernel=Given(12e-6, 3e-6, "s", "assumed", "cautious: fitted as well"),
    launch=Given(
        11.7e-6, 8.0e-6, "s", "measured", f"one with 4,080 and one with 480 words, {_ON_H100}"
    ),
    wait=Given(18e-6, 8e-6, "s", "assumed", "no less than a launch; a DLPack view takes as much"),
    python=Given(
        1.5, 1.0, "", "assumed", f"the host beside it was up to 1.5 times slower, {_ON_H100}"
    ),
    bridge=Given(
        0.9e-3,
        0.9e-3,
        "s",
        "derived",
        f"all of our Python in train-1024, 2.26 ms, less that of the engine, 1.36: {_MACHINE_A}",
    ),
    framework=Given(
        3.3e-3,
        1.24e-3,
        "s",
        "measured",
        "hopeful: a function of 26 tensors with one call of Python; cautious: TensorFlow's part of "
        f"train-1024, 5.0 ms, less 1.7 for its ragged ids: {_MACHINE_A}",
    ),
)


class Measured(NamedTuple):
    """A step of the engine on an H100, called without TensorFlow.

    Attributes:
      batch, dim: of 26 tables.
      step, gpu: milliseconds of a step, and of what the GPU works in it; None: not measured.
    """

    batch: int
    dim: int
    step: float
    gpu: float | None

    def words(self) -> tuple[str, str]:
        """Returns what the GPU works, and the step."""
        return "-" if self.gpu is None else str(self.gpu), str(self.step)


# By an older version of the code, which packed arguments and searched more slowly.
MEASURED_SOURCE = "docs/performance.md, On a GPU, 2026-11-26"
MEASURED = (
    Measured(8192, 16, 2.7, 0.4),
    Measured(65536, 16, 3.1, 1.2),
    Measured(65536, 128, 4.1, None),
)


class Published(NamedTuple):
    """A step of another system.

    Attributes:
      name: of the system.
      milliseconds: of a step.
      sizes: what the step had to do.
    """

    name: str
    milliseconds: float
    sizes: Sizes


# One H100 80GB HBM3: ids of a power law of 1.05, not pooled, Adam, all rows in its memory. The
# distinct keys are the mean that they print. PyTorch calls both; no hash table is in the second.
PUBLISHED_SOURCE = (
    "github.com/NVIDIA/recsys-examples, corelib/dynamicemb/benchmark/benchmark_results.json at "
    "43465ae, dyn_train_ms and trc_train_ms of T10_totalB1048570_D128_adam_gpu_pool=none_cap=1M"
)
_THEIRS = Sizes(tables=10, batch=104857, dim=128, states=2, distinct=350280.0)
PUBLISHED = (
    Published("dynamicemb", 2.185, _THEIRS),
    Published("FBGEMM's TBE, an array without keys", 1.352, _THEIRS),
)


# Rows that `find` copies in a second, half of the slots in use; they count in 2^30.
HKV_SOURCE = (
    "github.com/NVIDIA-Merlin/HierarchicalKV, pull request 251: find, 3.910 B-KV/s, H100 NVL"
)
HKV_FINDS = 3.910 * 2**30
HKV_DIM = 8
