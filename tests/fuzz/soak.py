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
import hashlib
import importlib.util
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import soak_plan as plan

ROOT = Path(__file__).resolve().parents[2]
Digests = dict[str, str]  # of a round: table -> SHA-256
_SHORT = 12  # digits of a digest that a record keeps of each round
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


# ---------------------------------------------------------------- records


def digests_of(parts: list[dict[str, np.ndarray]]) -> Digests:
    """Returns the SHA-256 of each table's keys, rows and states of all ranks, in key order.

    What was read, which has no key, is of one rank after the other.

    Args:
      parts: of each rank what `Model.contents` gave.
    """
    found = {}
    for table in plan.DIMS:
        keys = np.concatenate([part[f"{table}/keys"] for part in parts])
        order = np.argsort(keys, kind="stable")
        assert len(np.unique(keys)) == len(keys), f"Both ranks have keys of table {table!r}."
        digest = hashlib.sha256()
        _add(digest, "keys", keys[order])
        named = sorted(name for name in parts[0] if name.startswith(f"{table}/"))
        for name in (name.partition("/")[2] for name in named if name != f"{table}/keys"):
            all_rows = np.concatenate([part[f"{table}/{name}"] for part in parts])
            _add(digest, name, all_rows if name.startswith("read") else all_rows[order])
        found[table] = digest.hexdigest()
    return found


def _add(digest: Any, name: str, array: np.ndarray) -> None:
    digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def joined(digests: Digests) -> str:
    """Returns one digest of those of all tables."""
    text = "".join(f"{table} {digests[table]}\n" for table in plan.DIMS)
    return hashlib.sha256(text.encode()).hexdigest()


def record_text(seed: int, by_round: list[Digests]) -> str:
    """Returns what is kept of a soak as JSON, with a round in each line."""
    made = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    made |= {name: metadata.version(name) for name in ("numpy", "keras", "horovod")}
    record = {"seed": seed, "rounds": len(by_round), "made": made, "digest": joined(by_round[-1])}
    head = json.dumps({**record, "tables": by_round[-1]}, indent=1).removesuffix("\n}")
    rows = [[digests[table][:_SHORT] for table in plan.DIMS] for digests in by_round]
    return f'{head},\n "by_round": [\n' + ",\n".join(map(json.dumps, rows)) + "\n ]\n}\n"


def first_difference(
    record: dict[str, Any], by_round: list[Digests], leaves_out: Iterable[str] = ()
) -> str | None:
    """Says in which round which tables first differ from a record; None where none does."""
    tables = [(place, table) for place, table in enumerate(plan.DIMS) if table not in leaves_out]
    for number, (kept, found) in enumerate(zip(record["by_round"], by_round, strict=False)):
        wrong = [table for place, table in tables if kept[place] != found[table][:_SHORT]]
        if wrong:
            return f"Round {number} is the first that differs, in: {', '.join(wrong)}."
    if len(by_round) == record["rounds"]:
        wrong = [table for _, table in tables if record["tables"][table] != by_round[-1][table]]
        if wrong:
            return f"The last round differs, in: {', '.join(wrong)}."
    return None


# ---------------------------------------------------------------- the command line


def main() -> int:
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the ranks as well
    records: list[dict[str, Any]] = []
    if args.check is not None:
        paths = sorted(args.check.glob("*.json")) if args.check.is_dir() else [args.check]
        records = [json.loads(path.read_text()) for path in paths]
    elif args.minutes is None and args.rounds is None:
        args.minutes = 5.0
    is_other = False
    for record in records or [{"seed": args.seed}]:
        say(f"seed {record['seed']}")
        rounds, start = record.get("rounds", args.rounds), time.monotonic()
        if records and args.rounds:
            rounds = min(args.rounds, rounds)
        options = {"minutes": None if records else args.minutes, "threads": args.threads}
        by_round, num_jobs = soak(record["seed"], rounds, args.kills, say=say, **options)
        result = {
            "seed": record["seed"],
            "rounds": len(by_round),
            "jobs": num_jobs,
            "seconds": round(time.monotonic() - start, 1),
            "digest": joined(by_round[-1]),
        }
        if records:
            # More threads: what a full bucket keeps is up to their order.
            leaves_out = plan.EVICTING if args.threads > 1 else ()
            result["difference"] = first_difference(record, by_round, leaves_out)
            is_other |= result["difference"] is not None
        if args.keep is not None:
            args.keep.write_text(record_text(record["seed"], by_round))
        say("RESULT " + json.dumps(result))
    return int(is_other)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
