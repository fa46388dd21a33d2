"""Systems in processes of their own, timed in turns, so that whatever else the machine does meets
all of them alike.

Standard library only: the processes of other systems run in environments of their own.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[3]
SystemT = TypeVar("SystemT")
SECONDS_TO_LOOK = 1.0  # between two looks whether a process that should connect still lives


# ----------------------------------------------------------------- the process of one system


def serve(
    address: str,
    make_system: Callable[[], SystemT],
    prepare: Callable[[SystemT, str], Callable[[], float]],
) -> None:
    """Answers the process in front until that closes the connection.

    Args:
      address: path of its socket.
      make_system: called once, when connected: others start meanwhile.
      prepare: gives for a case a function that does one call and returns its seconds.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        system, call = make_system(), None
        for line in connection.makefile("r"):
            case, count = json.loads(line)
            if count == 0:
                call = None  # what it holds goes before the next case is made
                call = prepare(system, case)
            assert call is not None
            answer = [1000 * call() for _ in range(count)]
            connection.sendall((json.dumps(answer) + "\n").encode())


# ----------------------------------------------------------------- the process in front


class Contender(NamedTuple):
    """A system as it is started.

    Attributes:
      system: its name.
      threads: of TensorFlow and of the kernels, in one rank; None: as they choose.
      ranks: processes, under horovodrun if several.
      python: of its environment.
      root: the checkout whose `sok_lite` it uses.
      label: what the results call it instead of the system's name.
    """

    system: str
    threads: int | None = None
    ranks: int = 1
    python: str = sys.executable
    root: Path = ROOT
    label: str = ""

    @property
    def name(self) -> str:
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return (self.label or self.system) + ranks + threads


def command_by_path(python: str, *words: str) -> list[str]:
    """Returns the command that runs a benchmark with the `sok_lite` of PYTHONPATH."""
    return [python, str(Path(__file__).parent / "by_path.py"), *words]


class Worker:
    """A contender's processes, and a connection to each of its ranks."""

    def __init__(self, contender: Contender, benchmark: str, options: Sequence[str]) -> None:
        """Starts them.

        Args:
          contender: what to start.
          benchmark: its program, as `python -m scripts.bench` is told. It takes `--worker SYSTEM`,
            `--address PATH` and `--threads N`.
          options: more options for it.
        """
        self.name = contender.name
        command = command_by_path(contender.python, *benchmark.split())
        command += ["--worker", contender.system, *options]
        env = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "-1"),
        }
        if contender.threads:
            command += ["--threads", str(contender.threads)]
            env["SOK_LITE_NUM_THREADS"] = str(contender.threads)
        if contender.system == "tfra":
            env["TF_USE_LEGACY_KERAS"] = "1"
        else:
            env["PYTHONPATH"] = os.pathsep.join([str(contender.root), env.get("PYTHONPATH", "")])
        if contender.ranks > 1:
            command = [find_horovodrun() or "", "-np", str(contender.ranks), *command]
            # Idle ranks look for work in the turns of others too; rows go through shared memory.
            env["HOROVOD_CYCLE_TIME"] = "50"
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
            address = str(Path(folder) / "socket")
            server.bind(address)
            server.listen(contender.ranks)
            server.settimeout(SECONDS_TO_LOOK)
            # What libraries print must not mix with the results.
            self.process = subprocess.Popen(
                [*command, "--address", address],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=env,
            )
            self._connections = [self._accept(server) for _ in range(contender.ranks)]
        self._answers = [each.makefile("r") for each in self._connections]

    def _accept(self, server: socket.socket) -> socket.socket:
        while True:
            try:
                return server.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None:
                    raise self._died() from None

    def _died(self) -> SystemExit:
        return SystemExit(f"A process of {self.name} died; its words are above.")

    def tell(self, case: str, count: int) -> None:
        """Asks for a case to be prepared (`count` 0) or for calls of it."""
        for connection in self._connections:
            try:
                connection.sendall((json.dumps([case, count]) + "\n").encode())
            except BrokenPipeError:
                raise self._died() from None

    def hear(self) -> list[float]:
        """Returns the milliseconds of each call, those of the slowest rank.

        Raises:
          SystemExit: a process has died.
        """
        lines = [answers.readline() for answers in self._answers]
        if not all(lines):
            raise self._died()
        return [max(ranks) for ranks in zip(*map(json.loads, lines), strict=True)]

    def close(self) -> None:
        """Ends the processes."""
        for answers, connection in zip(self._answers, self._connections, strict=True):
            answers.close()
            connection.close()
        self.process.wait()


@contextlib.contextmanager
def started(
    contenders: Iterable[Contender], benchmark: str, options: Sequence[str]
) -> Iterator[list[Worker]]:
    """Starts a `Worker` of each; however this ends, their processes have ended then."""
    with contextlib.ExitStack() as on_exit:
        workers = []
        for contender in contenders:
            workers.append(Worker(contender, benchmark, options))
            on_exit.callback(workers[-1].close)
        yield workers


def time_in_turns(
    workers: Sequence[Worker], case: str, rounds: int, warm_ups: int, calls: int = 1
) -> dict[str, list[float]]:
    """Times one case.

    Args:
      workers: who takes turns.
      case: what they are asked to do.
      rounds: turns of each that count.
      warm_ups: turns before that do not.
      calls: that count in a turn. If several, one more goes before them, which pays for what the
        others have left in the caches; a single one pays itself.

    Returns:
      For each worker's name the milliseconds of its calls.
    """
    for worker in workers:
        worker.tell(case, 0)
    for worker in workers:
        worker.hear()
    times: dict[str, list[float]] = {worker.name: [] for worker in workers}
    unpaid = calls > 1
    for number in range(warm_ups + rounds):
        for worker in workers:
            worker.tell(case, calls + unpaid)
            took = worker.hear()[unpaid:]
            if number >= warm_ups:
                times[worker.name] += took
    return times


def statistics_of(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns the fields of a RESULT line: median and least milliseconds of each."""
    return {
        "median_ms": {name: round(statistics.median(each), 3) for name, each in times.items()},
        "least_ms": {name: round(min(each), 3) for name, each in times.items()},
    }


# ----------------------------------------------------------------- what the machine has


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--peers`, which `peer_python` reads."""
    parser.add_argument("--peers", help="folder of TFRA's environment (default: .venv-peers)")


def add_worker_options(parser: argparse.ArgumentParser, systems: Iterable[str]) -> None:
    """Adds what `Worker` starts a benchmark with."""
    parser.add_argument("--worker", choices=sorted(systems), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)


def peer_python(peers: str | None) -> str | None:
    """Returns the Python of TFRA's environment; None, and says so, where it was not made."""
    folder = Path(peers or os.environ.get("SOK_LITE_PEERS") or ROOT / ".venv-peers")
    python = folder / "bin" / "python"
    if python.exists():
        return str(python)
    if peers:
        raise SystemExit(f"No Python at {python}. Make it: bash scripts/bench/peers.sh {folder}")
    print("TFRA is not measured: make its environment with scripts/bench/peers.sh.")
    return None


def find_horovodrun() -> str | None:
    """Returns the path of horovodrun, first the one beside this Python; None if there is none."""
    return shutil.which("horovodrun", path=str(Path(sys.executable).parent)) or shutil.which(
        "horovodrun"
    )


def print_machine() -> None:
    """Prints what these figures are of, and how busy it was before them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{platform.processor() or platform.machine()}, {cores} cores, {platform.platform()}")
    print(f"load before: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


def print_medians(results: Sequence[Mapping[str, Any]]) -> None:
    """Prints a Markdown table of the medians: a row a case, a column a contender."""
    names = list(dict.fromkeys(name for result in results for name in result["median_ms"]))
    rows = []
    for result in results:
        medians = result["median_ms"]
        cells = [f"{medians[name]:.3g}" if name in medians else "" for name in names]
        rows.append([result["case"], *cells])
    print_table(["median ms", *names], rows)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table, with an empty line before it."""
    print("\n| " + " | ".join(header) + " |")
    print("|---" * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
