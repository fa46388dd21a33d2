"""What a training step asks of a GPU, counted on the simulated one: tools/estimate_gpu_step.py.

Numbers of launches and waits are the same whatever the batch, but for one of a few ids.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from scripts.bench.engine.step import Step
from tests.support.simt import device
from tests.support.simt.backend import simt_backend
from tools.gpu_step_work import ROOT, Launch, Sizes, gpu_launches, is_kernel, traffic_of
from tools.scaling_model import LINE

# Of what is counted. So many ids are more than the numbers that a call has of each table.
COUNTED_IDS, COUNTED_DIM = 256, 4
COPY = "copy to the device"
# What is on a stream and is no launch: the first is for the simulation alone, the second a wait.
_NO_LAUNCHES = ("free", "copy to the host")


class Counts(NamedTuple):
    """What one step asks of a GPU, whatever its size.

    Attributes:
      launches: of our kernels and CuPy's operations, in their order.
      waits: of the host for the device, by our code.
      views: of TensorFlow's memory, each of which waits for TensorFlow's work; None: it is not
        there.
      results: tensors that TensorFlow was asked for; None: it is not there.
    """

    launches: Sequence[Launch]
    waits: int
    views: int | None = None
    results: int | None = None

    @property
    def kernels(self) -> int:
        """Launches of our kernels."""
        return sum(launch.is_kernel for launch in self.launches)

    @property
    def copies(self) -> int:
        """Copies of numbers from the host to the device."""
        return sum(launch.name == COPY for launch in self.launches)

    @property
    def operations(self) -> int:
        """Operations of CuPy, without these copies."""
        return len(self.launches) - self.kernels - self.copies

    @property
    def all_launches(self) -> int:
        """What runs on the GPU: a CuPy operation may be several."""
        return sum(map(gpu_launches, self.launches))


@contextmanager
def _launches(items: int) -> Iterator[list[Launch]]:
    """Gives what is put on the stream within, in a step of so many items."""
    found: list[Launch] = []
    enqueue = device.enqueue

    def noting(name: str, work: Callable[[], Any], *more: Any) -> None:
        if is_kernel(name):
            found.append(Launch(name, True))
        elif name not in _NO_LAUNCHES:
            arrays = [a for a in getattr(work, "args", ()) if isinstance(a, np.ndarray)]
            # All are of items or of distinct keys but for the few numbers of each table.
            is_of_items = max((a.size for a in arrays), default=0) >= items / 4
            found.append(
                Launch(f"{name} of {arrays[0].dtype}" if is_of_items else name, False, is_of_items)
            )
        enqueue(name, work, *more)

    with mock.patch.object(device, "enqueue", noting):
        yield found


def counted(step: Callable[[], Any], items: int) -> Counts:
    """Counts a step of so many items that was made before."""
    device.wait()
    with device.counted() as counts, _launches(items) as launches:
        step()
    return Counts(tuple(launches), counts["waits"])


def engine_step(tables: int, ids: int, dim: int, keys: int) -> Step:
    """Returns a step on the simulated GPU, called without TensorFlow, that was made twice."""
    step = Step(simt_backend(), tables, ids, dim, keys)
    for _ in range(2):
        step.whole()
    return step


def engine_counts(tables: int, ids: int = COUNTED_IDS) -> Counts:
    """Counts a step that is called without TensorFlow."""
    return counted(engine_step(tables, ids, COUNTED_DIM, 2 * ids).whole, tables * ids)


def tensorflow_counts(tables: int, ids: int = COUNTED_IDS) -> Counts:
    """Counts a step in a `tf.function`."""
    import pytest
    import tensorflow as tf

    from tests.support.gpu_play import play_gpu
    from tools.count_calls import make_step

    with pytest.MonkeyPatch.context() as patch:
        play = play_gpu(patch)
        step = make_step("step", tables, argparse.Namespace(ids=ids, dim=COUNTED_DIM))
        for _ in range(3):  # traced, states made, layouts known
            step()
        views, to_dlpack = 0, tf.experimental.dlpack.to_dlpack

        def viewing(tensor: Any) -> Any:
            nonlocal views
            views += 1
            return to_dlpack(tensor)

        patch.setattr(tf.experimental.dlpack, "to_dlpack", viewing)
        before = play.num_allocations
        counts = counted(step, tables * ids)
        return counts._replace(views=views, results=play.num_allocations - before)


def touched(tables: int, ids: int, dim: int) -> Iterator[tuple[Launch, float, float]]:
    """Yields each kernel of a step with the bytes of the lines it touches, counted and computed.

    The lines are those of the simulated GPU, the computed bytes of as many distinct keys as it has.
    It must come before anything else that uses the simulated GPU.
    """
    from tests.support.touched_lines import touched_lines

    # Of so many keys that few of a step share a line of the index.
    with touched_lines() as launches:
        step = engine_step(tables, ids, dim, 32 * ids)
        device.wait()
        launches.clear()
        sizes = Sizes(tables, ids, dim, 2, distinct_keys(step, tables))
        step.whole()
        device.wait()
    for kernel, read, written in launches:
        launch = Launch(kernel, True)
        yield launch, LINE * (read + written), traffic_of(launch, sizes).bytes


def distinct_keys(step: Step, tables: int) -> int:
    """Returns the distinct keys that a step looks up next, of all tables together."""
    keys = simt_backend().to_host(step._batches[step._count % len(step._batches)].keys)
    return sum(np.unique(part).size for part in np.split(keys, tables))


def python_seconds(tables: int) -> float:
    """Measures Python of the engine in a step on this machine; it launches and waits for nothing.

    Raises:
      CalledProcessError: the benchmark cannot run here, such as without CuPy.
    """
    command = [sys.executable, "-m", "scripts.bench", "engine", "packing", "--tables", str(tables)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return float(json.loads(line.removeprefix("RESULT "))["step_us"]) / 1e6
