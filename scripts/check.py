"""Runs the stages of the check, two at a time, and says what each took. scripts/test.sh calls it.

Quick runs the tests that tests/conftest.py chooses; full (`--full`) runs all of them, and the
stages of the oldest TensorFlow and of mpirun whole. All stages run even when one fails. Then come
the table of stages and the last line, which counts the tests of all. A full run of a clean tree
without a failure writes its commit to tests/last_full.json: quick finds there what changed since.
"""

import argparse
import collections
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LAST_FULL = ROOT / "tests" / "last_full.json"
# Most tests use one core, so two lanes of stages share two cores.
LANES = 2
# Seconds that a check may take after set-up, on two quiet cores.
BUDGET = {"quick": 600, "full": 4500}
OLDEST = ".venv-oldest"


class Stage(NamedTuple):
    """A command of the check.

    Attributes:
      name: of the stage.
      command: its words.
      limit: seconds after which it is ended. It holds on a slow machine; a test that hangs says so
        long before (pyproject.toml).
      oldest: whether it runs with the oldest TensorFlow.
      is_part: whether it runs a part of what the stage of this name runs in full.
    """

    name: str
    command: Sequence[str]
    limit: int
    oldest: bool = False
    is_part: bool = False


class Result(NamedTuple):
    """How a stage ended: exit code, seconds, lane, and counts of tests."""

    stage: Stage
    code: int
    seconds: float
    lane: int
    log: str
    passed: int
    failed: int
    skipped: int


def quick_and_full_stages(oldest: str, has_oldest: bool) -> tuple[list[Stage], list[Stage]]:
    """Returns the stages of both levels, in the order in which they start.

    Args:
      oldest: the oldest TensorFlow that is supported.
      has_oldest: whether there is an environment with it.
    """
    return _stages(True, oldest, has_oldest), _stages(False, oldest, has_oldest)


def _stages(quick: bool, oldest: str, has_oldest: bool) -> list[Stage]:
    slowest = ("--durations=10", "--durations-min=5")
    pytest = ["python", "-m", "pytest", "-q", *slowest, *(["--quick"] if quick else [])]
    # Some launchers give a rank a terminal, and pytest then colours what is counted here.
    rank = [*pytest, "--color=no", "-p", "no:cacheprovider"]
    limit = 3600 if quick else 5400

    def tests(name: str, *paths: str, **fields: bool) -> Stage:
        return Stage(f"tests, {name}", [*pytest, *paths], limit, **fields)

    def ranks(launcher: str, *paths: str, is_part: bool = False, options: str = "") -> Stage:
        command = [launcher, "-np", "2", *options.split(), *rank, *paths]
        return Stage(f"tests, 2 ranks, {launcher}", command, limit, is_part=is_part)

    ends = (".cu", ".cuh", ".cpp")
    sources = sorted(
        str(path.relative_to(ROOT))
        for folder in ("kernels", "scripts", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in ends
    )
    # The longest first, so that the lanes end together.
    stages = [
        tests("engine", "tests/engine"),
        tests("SOK", "tests/sok"),
        tests("TFRA", "tests/dynamic_embedding"),
        tests("bridge", "tests/bridge"),
        tests("TFPlus", "tests/kv_variable"),
        tests("Keras", "tests/keras"),
        tests("scripts", "tests/scripts", "tests/examples", "tests/fuzz"),
        tests("backend", "tests/backend", "tests/comm", "tests/support"),
        tests("jobs of ranks", *JOBS),
        tests("command line", "tests/cli"),
        tests("whole tree", *(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))),
        # By default it gives ranks 30 seconds to start and to meet: too few on a busy machine.
        ranks(
            "horovodrun",
            "tests/ranks",
            options="--start-timeout 300 --gloo-timeout-seconds 300",
        ),
        # A handful of smokes in quick.
        ranks("mpirun", *(MPI_SMOKES if quick else ["tests/ranks"]), is_part=quick),
        Stage("mypy", ["mypy"], 300),
        Stage("ruff format", ["ruff", "format", "--check", "."], 60),
        Stage("ruff check", ["ruff", "check", "."], 60),
        Stage("clang-format", ["clang-format", "--dry-run", "-Werror", *sources], 60),
    ]
    if has_oldest:
        rooms = ["tests/sok", "tests/bridge", "tests/dynamic_embedding", "tests/kv_variable"]
        paths = OLDEST_SMOKES if quick else [*rooms, "tests/keras"]
        name = f"TensorFlow {oldest}"
        without_cache = ("-p", "no:cacheprovider")
        stages.insert(1, tests(name, *paths, *without_cache, oldest=True, is_part=quick))
    return stages


# These start ranks themselves; all others of tests/ranks are run by ranks.
JOBS = [f"tests/ranks/test_{name}.py" for name in ("elastic", "hosts", "launch", "rank_failures")]
MPI_SMOKES = ["tests/ranks/test_comm.py"]
OLDEST_SMOKES = [
    "tests/sok/test_sok_document.py",
    "tests/bridge/test_embedding_lookup.py",
    "tests/keras/test_features.py",
]


# ------------------------------------------------------------------------------------ running


def counts_of(log: str, code: int) -> tuple[int, int, int]:
    """Returns how many tests passed, failed and were skipped, by pytest's closing line.

    Under a launcher every rank prints such a line; a count is the largest of them. A stage without
    one is one test itself.
    """
    found: dict[str, int] = collections.defaultdict(int)
    for line in re.findall(r"(?m)(?:^|>:)=* ?((?:\d+ [a-z]+,? ?)+) in [\d.]+s", log):
        for number, word in re.findall(r"(\d+) ([a-z]+)", line):
            word = "failed" if word.startswith("error") else word
            found[word] = max(found[word], int(number))
    passed, failed, skipped = found["passed"], found["failed"], found["skipped"]
    if code != 0 and not failed:
        failed = 1
    if code == 0 and not passed and not skipped:
        passed = 1
    return passed, failed, skipped


class Runner:
    """Runs stages in lanes: each lane takes the next stage of one list."""

    def __init__(self, stages: Sequence[Stage]):
        self.waiting = collections.deque(stages)
        self.results: list[Result] = []
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.lock = threading.Lock()

    def run(self) -> list[Result]:
        lanes = [threading.Thread(target=self._lane, args=(number,)) for number in range(LANES)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        return self.results

    def end(self) -> None:
        """Ends what runs, so that each stage says where it was, and starts nothing more."""
        with self.lock:
            self.waiting.clear()
            running = list(self.running.values())
        for process in running:
            _end(process)

    def _lane(self, number: int) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    return
                stage = self.waiting.popleft()
            print(f"... {stage.name}", flush=True)
            result = self._run(stage, number)
            with self.lock:
                self.results.append(result)
                word = "ok" if result.code == 0 else f"FAILED, exit code {result.code}"
                print(f"\n=== {stage.name}\n{result.log.rstrip()}")
                print(f"--- {stage.name}: {word}, {result.seconds:.0f} s\n", flush=True)

    def _run(self, stage: Stage, lane: int) -> Result:
        env = {**os.environ}
        if stage.oldest:
            env["PATH"] = f"{ROOT / OLDEST / 'bin'}{os.pathsep}{env['PATH']}"
        start = time.monotonic()
        try:
            process = subprocess.Popen(
                stage.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            return Result(stage, 127, 0.0, lane, f"cannot be run: {error}", 0, 1, 0)
        with self.lock:
            self.running[lane] = process
        timer = threading.Timer(stage.limit, _end, [process])
        timer.start()
        assert process.stdout is not None
        log = process.stdout.read().decode(errors="replace")
        code = process.wait()
        timer.cancel()
        seconds = time.monotonic() - start
        with self.lock:
            del self.running[lane]
        if seconds >= stage.limit:
            log += f"\nstopped after its limit of {stage.limit} s"
        return Result(stage, code, seconds, lane, log, *counts_of(log, code))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a stage and what it started, after it had ten seconds to say where it is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------ telling


def what_failed(result: Result) -> str:
    """Returns the failures of a log, for whoever sees only the last lines."""
    lines = result.log.splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"(.*>:)?=+ (FAILURES|ERRORS) =", line)]
    text = lines[heads[0] : heads[0] + 150] if heads else lines[-40:]
    names = [line for line in lines if re.match(r"(.*>:)?(FAILED|ERROR) ", line)]
    return "\n".join([f"=== what failed of {result.stage.name}", *text, *names])


def table_of(results: Sequence[Result]) -> str:
    """Returns a line for each stage and one for each lane."""
    width = max(len(result.stage.name) for result in results)
    lines = [f"{'stage':{width}} lane seconds passed failed skipped"]
    for r in sorted(results, key=lambda r: (r.lane, -r.seconds)):
        lines.append(
            f"{r.stage.name:{width}} {r.lane + 1:4d} {r.seconds:7.0f} {r.passed:6d} {r.failed:6d} "
            f"{r.skipped:7d}"
        )
    for lane in range(LANES):
        total = sum(r.seconds for r in results if r.lane == lane)
        lines.append(f"{f'sum of lane {lane + 1}':{width}}      {total:7.0f}")
    return "\n".join(lines)


def last_full() -> str:
    """Returns which run is known as the last full one."""
    try:
        record = json.loads(LAST_FULL.read_text())
        return f"{record['commit'][:12]}, {record['date']}"
    except (OSError, ValueError, KeyError):
        return "none is known, so nothing counts as changed"


def write_last_full(seconds: float, passed: int) -> str:
    """Writes the commit at which full passed; returns what to tell."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changes, commit = git("status", "--porcelain"), git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{LAST_FULL.name} was not written: git gives no commit ({error})."
    if changes:
        return f"{LAST_FULL.name} was not written, since there are changes outside the commit."
    record = {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds),
        "passed": passed,
    }
    LAST_FULL.write_text(json.dumps(record, indent=2) + "\n")
    return f"{LAST_FULL.relative_to(ROOT)} names {commit[:12]} now: commit it."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every test in every variant")
    level = "full" if parser.parse_args().full else "quick"
    start = time.monotonic()
    # pyproject.toml names the oldest release that is supported.
    text = (ROOT / "pyproject.toml").read_text()
    oldest = re.findall(r'"tensorflow-cpu>=([\d.]+),', text)[0]
    has_oldest = os.environ.get("SOK_LITE_OLDEST") != "0"
    quick, full = quick_and_full_stages(oldest, has_oldest)
    runner = Runner(quick if level == "quick" else full)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runner.end())
    results = runner.run()
    broken = [result for result in results if result.code != 0]
    for result in broken:
        print(what_failed(result) + "\n")
    print(table_of(results))
    seconds = time.monotonic() - start
    print(f"{level}: {seconds:.0f} s of the {BUDGET[level]} s that it may take on two quiet cores")
    parts = [stage.name for stage in quick if stage.is_part]
    print(f"in part in quick: {', '.join(parts)}; of all others quick runs some variants")
    if level == "quick":
        print(f"all variants run of what changed since the last full run: {last_full()}")
    if not has_oldest:
        print(f"left out by SOK_LITE_OLDEST=0: tests, TensorFlow {oldest}")
    passed, failed, skipped = (
        sum(getattr(result, name) for result in results) for name in ("passed", "failed", "skipped")
    )
    if level == "full" and not broken:
        print(write_last_full(seconds, passed))
    print(f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
