"""Says where the time of a step goes: our kernels, our Python, and TensorFlow.

Cases: `lookup-1024`, `train-8192` and their like are those of systems.py beside this file, 26
tables in a `tf.function`, medians of some calls. `demo` is examples/train_ctr.py by one rank, means
over its steps but the first ones. Each ends with one line `RESULT {json}`, milliseconds of a call:

  total                      of the call; of the demo's step without reading the batch
  input                      reading the batch (`demo`)
  lookup, gradient, update   each as [in kernels, in Python around them]: within the calls from
                             TensorFlow into Python
  rest                       TensorFlow: its operations, the dense layers, the calls themselves

Examples:
  python -m scripts.bench many_tables stages --cases lookup-1024 train-1024 demo
  SOK_LITE_NUM_THREADS=1 python -m scripts.bench many_tables stages --threads 1
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.common.demo import demo_module
from scripts.bench.common.measuring import result
from scripts.bench.common.systems import SYSTEMS
from scripts.bench.many_tables.systems import ManyTables

STAGES = ("lookup", "gradient", "update")
WARM_UPS = 5


class Stages:
    """Notes how long host calls take, and the kernels within; of several threads none at a time.

    Attributes:
      seconds: by stage, [of all, of its kernels].
    """

    def __init__(self) -> None:
        from sok_lite.backend import get_backend
        from sok_lite.bridge import host_call

        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._in_kernels = 0.0
        backend, on_device = get_backend("cpu"), host_call.on_device
        launch = backend._launch  # type: ignore[attr-defined]

        def launched(words: Any) -> Any:
            start = time.perf_counter()
            done = launch(words)
            self._in_kernels += time.perf_counter() - start
            return done

        def called(
            backend: Any, function: Callable[..., Any], *args: Any, waits: bool = True
        ) -> Any:
            start, before = time.perf_counter(), self._in_kernels
            done = on_device(backend, function, *args, waits=waits)
            of_stage = self.seconds[_stage_of(function)]
            of_stage[0] += time.perf_counter() - start
            of_stage[1] += self._in_kernels - before
            return done

        backend._launch = launched  # type: ignore[attr-defined]
        host_call.on_device = called

    def taken(self, total: float, steps: int = 1) -> dict[str, Any]:
        """Returns the milliseconds of a step since the last time, and forgets them.

        Args:
          total: seconds of all steps.
        """
        fields: dict[str, Any] = {"total": 1e3 * total / steps}
        rest = total
        for stage in STAGES:
            of_all, of_kernels = self.seconds[stage]
            rest -= of_all
            fields[f"{stage}_kernels"] = 1e3 * of_kernels / steps
            fields[f"{stage}_python"] = 1e3 * (of_all - of_kernels) / steps
        self.seconds.clear()
        return fields | {"rest": 1e3 * rest / steps}


def _stage_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", "")
    if "forward" in name:
        return "lookup"
    return "gradient" if "backward" in name else "update"


def measure_tables(stages: Stages, case: str, args: argparse.Namespace) -> dict[str, float]:
    """Returns medians of calls of a case of systems.py."""
    call = ManyTables(SYSTEMS["sok_lite"](args.dim, None), args).timed_calls(case)
    for _ in range(WARM_UPS):
        call()
    stages.seconds.clear()
    taken = [stages.taken(call()) for _ in range(args.calls)]
    return {name: statistics.median([each[name] for each in taken]) for name in taken[0]}


def measure_demo(stages: Stages, args: argparse.Namespace) -> dict[str, float]:
    """Returns means over the steps of the demo."""
    train_ctr = demo_module("train_ctr")
    Rows, ClickModel = demo_module("ctr.criteo").Rows, demo_module("ctr.model").ClickModel
    Ranks = demo_module("ctr.ranks").Ranks

    demo = train_ctr.parse_args([f"--rows={args.demo_rows}"])
    reading, steps, seconds = [0.0], [0], [0.0]
    take, step = Rows.take, ClickModel.train_step

    def timed_take(rows: Any, *chosen: Any) -> Any:
        start = time.perf_counter()
        taken = take(rows, *chosen)
        reading[0] += time.perf_counter() - start
        return taken

    def timed_step(model: Any, *batch: Any) -> Any:
        start = time.perf_counter()
        loss = float(step.__get__(model, ClickModel)(*batch))
        seconds[0] += time.perf_counter() - start
        steps[0] += 1
        if steps[0] == WARM_UPS:
            stages.seconds.clear()
            reading[0] = seconds[0] = 0.0
        return loss

    with tempfile.TemporaryDirectory() as folder:
        train_ctr.prepare(demo, Path(folder))
        rows = Rows.open(Path(folder)).take(slice(args.demo_rows))
        Rows.take, ClickModel.train_step = timed_take, timed_step
        train_ctr.train(ClickModel(demo.dim, demo.seed, Ranks()), rows, demo)
    count = steps[0] - WARM_UPS
    return {**stages.taken(seconds[0], count), "input": 1e3 * reading[0] / count}


def main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", default=["lookup-1024", "lookup-8192", "train-1024", "train-8192"])
    add("--tables", type=int, default=26)
    add("--keys", type=int, default=20_000, help="in each table (%(default)s)")
    add("--dim", type=int, default=16)
    add("--calls", type=int, default=50, help="that count (%(default)s)")
    add("--threads", type=int, help="of TensorFlow")
    add("--demo-rows", type=int, default=100_000, help="of the demo's data (%(default)s)")
    args = parser.parse_args()
    import tensorflow as tf

    import sok_lite as sok

    if args.threads:
        tf.config.threading.set_intra_op_parallelism_threads(args.threads)
        tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    sok.init()
    stages = Stages()
    for case in args.cases:
        fields = (
            measure_demo(stages, args) if case == "demo" else measure_tables(stages, case, args)
        )
        result(case=case, **{name: round(each, 3) for name, each in fields.items()})
