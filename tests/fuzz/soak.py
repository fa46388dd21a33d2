"""Two ranks train, dump, are killed, go on, evict and expire; the rows at the end have one digest.

All that happens is a function of the seed, and no kill changes the rows: a job that is killed goes
on from its last checkpoint with the same batches. So a digest that was kept before sok_lite was
rebuilt must come out of it afterwards. Only public names of sok_lite are used.

    python -m tests.fuzz.soak --minutes 5 --seed 7
    python -m tests.fuzz.soak --rounds 20 --seed 7 --kills none     the same digests
    python -m tests.fuzz.soak --check tests/fuzz/soaks/7.json       a kept one again

The last line is RESULT and what came out. The exit status is 1 if a digest differs.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import soak_plan as plan
from tests.fuzz.soak_record import Digests, digests_of, first_difference, joined, record_of, text_of

ROOT = Path(__file__).resolve().parents[2]
_HANGS_AFTER_S = 900.0  # without a round that ends; kernels are compiled before the first one
_ENDS_WITHIN_S = 30.0  # the launcher, once it is told to


class SoakError(Exception):
    """A job ended, or hung, without being told to, or a round came out in two ways."""


def launcher() -> str | None:
    """Returns the path of horovodrun; None where there is none."""
    beside = Path(sys.executable).with_name("horovodrun")
    if importlib.util.find_spec("horovod") is None:
        return None
    return str(beside) if beside.exists() else shutil.which("horovodrun")


class Soak:
    """The jobs of one soak, one after the other, each up to its kill.

    Attributes:
      by_round: the digests of all tables after each round so far.
      num_jobs: how many were started.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        rounds: int | None = None,
        minutes: float | None = None,
        kills: list[plan.Kill] | None = None,
        threads: int = 1,
        say: Callable[[str], None] = print,
    ) -> None:
        self.seed, self.folder, self.rounds, self.threads = seed, folder, rounds, threads
        self.by_round: list[Digests] = []
        self.num_jobs = 0
        self._kills = list(kills or [])
        self._until_s = None if minutes is None else time.time() + 60 * minutes
        self._say = say
        self._plan = plan.rounds_of(seed)
        self._round_began = time.monotonic()

    def run(self) -> list[Digests]:
        """Runs all rounds; returns the digests of each.

        Raises:
          SoakError: a job failed by itself, or a round that was repeated came out otherwise.
        """
        while True:
            kill = self._kills.pop(0) if self._kills else None
            if self._run_job(kill):
                return self.by_round

    def _run_job(self, kill: plan.Kill | None) -> bool:
        """Runs a job; returns whether it came to the end of all rounds."""
        told = {
            "seed": self.seed,
            "folder": str(self.folder),
            "rounds": self.rounds,
            "until_s": self._until_s,
            "kill": kill,
        }
        self.num_jobs += 1
        for path in self.folder.glob("struck-*"):
            path.unlink()
        log = self.folder / f"job-{self.num_jobs}.log"
        with log.open("w") as out:
            job = subprocess.Popen(
                [launcher() or "horovodrun", "-np", str(plan.RANKS), sys.executable]
                + ["-m", "tests.fuzz.soak_start", json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                    "SOK_LITE_NUM_THREADS": str(self.threads),
                    # Which keys a full table evicts depends on it.
                    "SOK_LITE_HASH_SEED": "0",
                },
            )
            try:
                self._watch(job, log)
            finally:
                self._end(job)
        struck = sorted(path.name for path in self.folder.glob("struck-*"))
        if job.returncode == 0:
            return True
        if not struck:
            raise SoakError(f"A job ended with status {job.returncode}:\n{_tail(log)}")
        assert kill is not None
        step = f" {kill.number}" if kill.point == "step" else ""
        ranks = " and ".join(str(rank) for rank in kill.ranks)
        later = f" + {kill.delay_ms} ms" if kill.delay_ms else ""
        self._say(f"round {kill.round}: killed rank {ranks} at {kill.point}{step}{later}")
        return False

    def _watch(self, job: subprocess.Popen, log: Path) -> None:
        """Waits for the end of a job, and takes what its rounds leave."""
        heard = time.monotonic()
        while True:
            is_over = job.poll() is not None  # asked first: what was left before is all there is
            if self._take_rounds():
                heard = time.monotonic()
            if is_over:
                return
            if time.monotonic() - heard > _HANGS_AFTER_S:
                raise SoakError(f"No round has ended for {_HANGS_AFTER_S:.0f} s:\n{_tail(log)}")
            time.sleep(0.1)

    @staticmethod
    def _end(job: subprocess.Popen) -> None:
        if job.poll() is None:
            job.terminate()  # horovodrun ends its ranks
            try:
                job.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()

    def _take_rounds(self) -> bool:
        """Makes digests of the rounds that both ranks have left; returns whether there were any."""
        taken = False
        for first in sorted(self.folder.glob("round-*-0.npz"), key=_number):
            number = _number(first)
            paths = [first.with_name(f"round-{number}-{rank}.npz") for rank in range(plan.RANKS)]
            if not all(path.exists() for path in paths):
                continue
            parts = [dict(np.load(path)) for path in paths]
            for path in paths:
                path.unlink()
            self._take(number, digests_of(parts))
            taken = True
        return taken

    def _take(self, number: int, digests: Digests) -> None:
        if number < len(self.by_round):  # once more, after a kill
            before = self.by_round[number]
            wrong = [table for table in digests if digests[table] != before[table]]
            if wrong:
                raise SoakError(
                    f"Round {number}, repeated after a kill, came out otherwise in: "
                    f"{', '.join(wrong)}."
                )
            self._say(f"round {number}: the same once more")
            return
        if number != len(self.by_round):
            raise SoakError(f"Round {number} came after {len(self.by_round)} rounds.")
        self.by_round.append(digests)
        place = next(self._plan)
        seconds, self._round_began = time.monotonic() - self._round_began, time.monotonic()
        did = ", ".join(f"{each.name} {each.table}" for each in place.operations)
        self._say(
            f"round {number}: {sum(place.steps)} steps, {'/'.join(place.dumps)} dump, {did}; "
            f"{seconds:.1f} s; {joined(digests)[:12]}"
        )


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:])


def soak(
    seed: int, rounds: int | None = None, kills: str = "seed", **options: Any
) -> tuple[list[Digests], int]:
    """Runs a soak in a folder that goes with it; returns the digests of each round and the jobs.

    Args:
      kills: "seed": where the seed says; "none"; or a number, the seed of other kills.
      options: of `Soak`.
    """
    of = None if kills == "none" else seed if kills == "seed" else int(kills)
    # 2000 take more than an hour; a soak ends with its rounds, not with its kills.
    planned = [] if of is None else plan.kills_of(seed, rounds or 2000, of)
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        running = Soak(seed, Path(folder), rounds, kills=planned, **options)
        return running.run(), running.num_jobs


def check(path: Path, args: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """Replays a kept record; returns what came out and what differs."""
    record = json.loads(path.read_text())
    rounds = min(args.rounds or record["rounds"], record["rounds"])
    print(f"{path.name}: seed {record['seed']}, {rounds} rounds", flush=True)
    start = time.monotonic()
    by_round, num_jobs = soak(record["seed"], rounds, args.kills, threads=args.threads, say=say)
    result = _result(record["seed"], by_round, num_jobs, start)
    # More threads: what a full bucket keeps is up to their order.
    leaves_out = plan.EVICTING if args.threads > 1 else ()
    return result, first_difference(record, by_round, leaves_out)


def say(text: str) -> None:
    print(text, flush=True)


def _result(seed: int, by_round: list[Digests], num_jobs: int, start: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "rounds": len(by_round),
        "jobs": num_jobs,
        "seconds": round(time.monotonic() - start, 1),
        "tables": by_round[-1],
        "digest": joined(by_round[-1]),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, help="begin no round after so many")
    add("--rounds", type=int, help="exactly so many; of a record, its first ones")
    add("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    add("--kills", default="seed", help='"seed" (default), "none", or a seed of other kills')
    add("--threads", type=int, default=1, help="of the kernels in each rank (%(default)s)")
    add("--check", type=Path, help="a record, or a folder of them, to repeat and compare with")
    add("--keep", type=Path, help="where to write a record")
    args = parser.parse_args()
    if args.check is None and args.minutes is None and args.rounds is None:
        args.minutes = 5.0
    return args


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the ranks as well
    if args.check is not None:
        paths = sorted(args.check.glob("*.json")) if args.check.is_dir() else [args.check]
        differences = {}
        for path in paths:
            result, difference = check(path, args)
            say(f"{path.name}: {difference or 'the same digests'}")
            differences[path.name] = difference
            say("RESULT " + json.dumps({**result, "difference": difference}))
        return 1 if any(differences.values()) else 0
    say(f"seed {args.seed}")
    start = time.monotonic()
    by_round, num_jobs = soak(
        args.seed, args.rounds, args.kills, minutes=args.minutes, threads=args.threads, say=say
    )
    if args.keep is not None:
        args.keep.write_text(text_of(record_of(args.seed, by_round)))
    say("RESULT " + json.dumps(_result(args.seed, by_round, num_jobs, start)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
