"""Runs the stages of the check, two at a time, and says what each took. scripts/test.sh calls it.

Quick runs the tests that tests/conftest.py chooses; full (`--full`) runs all of them, and what
quick chooses once more under mpirun and with the oldest TensorFlow, of which quick has a handful of
smokes. All stages run even when one fails. Then come the table of stages and the last line, which
counts the tests of all. A full run of a clean tree without a failure writes its commit to
tests/last_full.json: quick finds there what changed since.
"""

import argparse
import collections
import contextlib
import datetime
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
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
BUDGET = {"quick": 600, "full": 3600}
OLDEST = ".venv-oldest"


class Stage(NamedTuple):
    """A command of the check.

    Attributes:
      name: of the stage.
      command: its words.
      limit: seconds after which it is ended. It is generous: a slow machine keeps to it, and a test
        that hangs says so long before (pyproject.toml).
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
    # Colours, which a variable or a launcher's terminal may switch on, would hide the closing line.
    pytest = ["python", "-m", "pytest", "-q", "--color=no", *slowest]
    if quick:
        pytest.append("--quick")
    rank = [*pytest, "-p", "no:cacheprovider"]
    # Quick's choice in full too: another launcher, or another release, differs in its functions,
    # which every variant of a test calls, and not in sizes, modes and tables. Whatever has changed
    # runs in all variants beside it.
    chosen = [] if quick else ["--quick", "--unchanged"]
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
        tests(
            "scripts", "tests/scripts", "tests/bench", "tests/tools", "tests/examples", "tests/fuzz"
        ),
        tests("jobs of ranks", *JOBS),
        tests("bridge", "tests/bridge", "tests/native"),
        tests("backend", "tests/backend", "tests/comm", "tests/support"),
        # By default it gives ranks 30 seconds to start and to meet: too few on a busy machine.
        ranks(
            "horovodrun",
            "tests/ranks",
            options="--start-timeout 300 --gloo-timeout-seconds 300",
        ),
        tests("TFRA", "tests/dynamic_embedding"),
        tests("SOK", "tests/sok"),
        # What programs do with Keras, on one rank here; see also the stages of ranks.
        tests("Keras", "tests/keras", "tests/ranks/test_keras_matrix.py"),
        tests("TFPlus", "tests/kv_variable"),
        tests("whole tree", *(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))),
        # A handful of smokes in quick.
        ranks("mpirun", *(MPI_SMOKES if quick else ["tests/ranks", *chosen]), is_part=quick),
        tests("command line", "tests/cli", "tests/reports"),
        Stage("mypy", ["mypy"], 300),
        Stage("ruff format", ["ruff", "format", "--check", "."], 60),
        Stage("ruff check", ["ruff", "check", "."], 60),
        Stage("clang-format", ["clang-format", "--dry-run", "-Werror", *sources], 60),
    ]
    if has_oldest:
        # TFRA's and TFPlus' names are made of what the other rooms test: two files of each. And
        # sk.Checkpoint writes files of ours, whatever the release.
        rooms = ["tests/sok", "tests/bridge", "tests/native", "tests/keras", *OLDEST_APIS]
        rooms.append("--ignore=tests/keras/test_checkpoint.py")
        paths = OLDEST_SMOKES if quick else rooms
        options = ["-p", "no:cacheprovider", *chosen]
        name = f"TensorFlow {oldest}"
        stages.insert(5, tests(name, *paths, *options, oldest=True, is_part=quick))
    return stages


# These start ranks themselves; all others of tests/ranks are run by ranks.
_JOBS = ("autosave", "elastic", "hosts", "launch", "rank_failures")
JOBS = [f"tests/ranks/test_{name}.py" for name in _JOBS]
MPI_SMOKES = ["tests/ranks/test_comm.py"]
OLDEST_APIS = [
    "tests/dynamic_embedding/test_variable.py",
    "tests/dynamic_embedding/test_training.py",
    "tests/kv_variable/test_lookups.py",
    "tests/kv_variable/test_training.py",
]
OLDEST_SMOKES = [
    "tests/sok/test_sok_document.py",
    "tests/bridge/test_lookup.py",
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
        self.is_ended = False
        self.lock = threading.RLock()  # a second signal may come while the first is handled

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
            self.is_ended = True
            running = list(self.running.values())
        _end(running)

    def _lane(self, number: int) -> None:
        while True:
            with self.lock:
                if self.is_ended or not self.waiting:
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
            # Written when the set-up has come to its end.
            if not (ROOT / OLDEST / "sok_lite-setup.txt").exists():
                text = f"{OLDEST} was not set up. SOK_LITE_OLDEST=0 leaves this stage out."
                return Result(stage, 127, 0.0, lane, text, 0, 1, 0)
        start = time.monotonic()
        # A file and not a pipe, which a process that outlives the stage would hold open.
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    stage.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=ROOT,
                    start_new_session=True,
                )
            except OSError as error:
                return Result(stage, 127, 0.0, lane, f"cannot be run: {error}", 0, 1, 0)
            with self.lock:
                self.running[lane] = process
                is_late = self.is_ended
            if is_late:
                _end([process])
            over = threading.Event()

            def stop(process: subprocess.Popen[bytes] = process) -> None:
                over.set()
                _end([process])

            timer = threading.Timer(stage.limit, stop)
            timer.start()
            code = process.wait()
            timer.cancel()
            with contextlib.suppress(ProcessLookupError):  # what it started and left behind
                os.killpg(process.pid, signal.SIGKILL)
            with self.lock:
                del self.running[lane]
            output.seek(0)
            log = output.read().decode(errors="replace")
        if over.is_set():
            code = code or 124
            log += f"\nstopped after its limit of {stage.limit} s"
        return Result(stage, code, time.monotonic() - start, lane, log, *counts_of(log, code))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends stages and what they started, after they had ten seconds to say where they are."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
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
    width = max((len(result.stage.name) for result in results), default=5)
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


def _git(*arguments: str) -> str:
    """Raises OSError or CalledProcessError: no git, no repository, or no such thing in it."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def last_full() -> str:
    """Returns which run is known as the last full one."""
    try:
        record = json.loads(LAST_FULL.read_text())
        name = f"{record['commit'][:12]}, {record['date']}"
    except (OSError, ValueError, KeyError):
        return "none is known, so nothing counts as changed"
    try:
        _git("cat-file", "-e", f"{record['commit']}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        return f"{name}, a commit that is not here, so nothing counts as changed"
    return name


def clean_commit() -> str | None:
    """Returns the commit of the tree, None where something differs from it or nobody knows."""
    try:
        return None if _git("status", "--porcelain") else _git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_last_full(commit: str | None, seconds: float, passed: int) -> str:
    """Writes the commit at which full passed; returns what to tell.

    Args:
      commit: what `clean_commit` gave before the stages ran.
      seconds: what they took.
      passed: how many tests passed.
    """
    if commit is None or clean_commit() != commit:
        return f"{LAST_FULL.name} was not written: full did not run on one commit without changes."
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
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(errors="replace")  # tests print what some terminals cannot
    start = time.monotonic()
    # pyproject.toml names the oldest release that is supported.
    text = (ROOT / "pyproject.toml").read_text()
    oldest = re.findall(r'"tensorflow-cpu>=([\d.]+),', text)[0]
    has_oldest = os.environ.get("SOK_LITE_OLDEST") != "0"
    quick, full = quick_and_full_stages(oldest, has_oldest)
    stages = quick if level == "quick" else full
    commit = clean_commit()
    runner = Runner(stages)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: runner.end())
    results = runner.run()
    broken = [result for result in results if result.code != 0]
    for result in broken:
        print(what_failed(result) + "\n")
    print(table_of(results))
    never = [s.name for s in stages if s.name not in {r.stage.name for r in results}]
    if never:
        print(f"did not run: {', '.join(never)}")
    seconds = time.monotonic() - start
    print(f"{level}: {seconds:.0f} s of the {BUDGET[level]} s that it may take on two quiet cores")
    parts = [stage.name for stage in quick if stage.is_part]
    print(f"quick leaves out most of: {', '.join(parts)}; of all others, what is full_only")
    if level == "quick":
        print(f"all variants run of what changed since the last full run: {last_full()}")
        print("  (of none where more changed than tests/conftest.py allows: a full run is due)")
    if not has_oldest:
        print(f"left out by SOK_LITE_OLDEST=0: tests, TensorFlow {oldest}")
    passed, failed, skipped = (
        sum(getattr(result, name) for result in results) for name in ("passed", "failed", "skipped")
    )
    is_good = not broken and not never
    if level == "full" and has_oldest and is_good:
        print(write_last_full(commit, seconds, passed))
    print(f"{passed} passed, {failed + len(never)} failed, {skipped} skipped in {seconds:.0f} s")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
