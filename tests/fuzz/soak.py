"""Two ranks train, dump, are killed, go on, evict and expire; the rows after each round are known.

All that happens is a function of the seed, and no kill changes the rows: a job that is killed goes
on from its last checkpoint with the same batches. So digests that were kept before sok_lite was
rebuilt must come out of it afterwards. Only public names of sok_lite are used.

    python -m tests.fuzz.soak --check tests/fuzz/soaks/18.json            a kept one again
    python -m tests.fuzz.soak --seed 7 --rounds 20 --keep tests/fuzz/soaks/7.json

The last line is RESULT and what came out. The exit status is 1 if a digest differs.
"""

import argparse
import hashlib
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from tests.fuzz import soak_plan as plan
from tests.support.rank_jobs import run_job

Digests = list[str]  # of a round: the first digits of the SHA-256 of each table
_DIGITS = 12
_JOB = "from tests.fuzz import soak_job; soak_job.main()"


class SoakError(Exception):
    """A job ended without being told to, or a round came out in two ways."""


def soak(
    seed: int, rounds: int, has_kills: bool = True, say: Callable[[str], None] = print
) -> tuple[list[Digests], int]:
    """Runs jobs, each up to its kill; returns the digests of each round and the number of jobs."""
    kills = plan.kills_of(seed, rounds) if has_kills else []
    by_round: list[Digests] = []
    num_jobs = 0
    with tempfile.TemporaryDirectory(prefix="soak_") as name:
        folder = Path(name)
        for kill in [*kills, None]:
            num_jobs += 1
            told = {"seed": seed, "folder": name, "rounds": rounds, "kill": kill}
            job = run_job(
                *("horovod", _JOB, folder),
                ranks=plan.RANKS,
                timeout=900 + 60 * rounds,
                SOK_LITE_NUM_THREADS="1",  # which keys a full table evicts depends on them
                SOK_LITE_HASH_SEED="0",
                SOAK_JOB=json.dumps(told),
            )
            for place, digests in _rounds_in(folder):
                if by_round[place : place + 1] not in ([], [digests]):
                    raise SoakError(f"Round {place}, repeated after a kill, came out otherwise.")
                if place == len(by_round):
                    by_round.append(digests)
            if job.code == 0:
                break
            struck = list(folder.glob("struck-*"))
            for path in struck:
                path.unlink()
            if not struck:
                raise SoakError(f"A job ended with status {job.code}:\n{job.output[-6000:]}")
            assert kill is not None
            ranks = " and ".join(map(str, kill.ranks))
            say(f"killed rank {ranks} at step {kill.step} + {kill.delay_ms} ms")
    return by_round, num_jobs


def _rounds_in(folder: Path) -> Iterator[tuple[int, Digests]]:
    """Yields the number and the digests of each round that all ranks have left."""
    numbers = sorted(int(path.name.split("-")[1]) for path in folder.glob("round-*-0.npz"))
    for number in numbers:
        paths = [folder / f"round-{number}-{rank}.npz" for rank in range(plan.RANKS)]
        if all(path.exists() for path in paths):
            yield number, digests_of([dict(np.load(path)) for path in paths])
        for path in paths:
            path.unlink(missing_ok=True)


def digests_of(parts: list[dict[str, np.ndarray]]) -> Digests:
    """Returns the digest of each table's keys, rows and states of all ranks, in key order.

    What was read, which has no key, is of one rank after the other.
    """
    found = []
    for table in plan.DIMS:
        keys = np.concatenate([part[f"{table}/keys"] for part in parts])
        order = np.argsort(keys, kind="stable")
        assert len(np.unique(keys)) == len(keys), f"Both ranks have keys of table {table!r}."
        digest = hashlib.sha256()
        named = sorted(name for name in parts[0] if name.startswith(f"{table}/"))
        for name in (f"{table}/keys", *(name for name in named if name != f"{table}/keys")):
            what, array = name.partition("/")[2], np.concatenate([part[name] for part in parts])
            array = array if what.startswith("read") else array[order]
            digest.update(f"{what} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        found.append(digest.hexdigest()[:_DIGITS])
    return found


def first_difference(kept: list[Digests], found: list[Digests]) -> str | None:
    """Says in which round which tables first differ from those kept; None where none does."""
    for number, both in enumerate(zip(kept, found, strict=False)):
        wrong = [table for table, *its in zip(plan.DIMS, *both, strict=True) if its[0] != its[1]]
        if wrong:
            return f"Round {number} is the first that differs, in: {', '.join(wrong)}."
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="the first ones of a record (default: all)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--check", type=Path, help="a record to repeat and compare with")
    parser.add_argument("--keep", type=Path, help="where to write a record")
    args = parser.parse_args()
    record = {"seed": args.seed, "by_round": []}
    if args.check is not None:
        record = json.loads(args.check.read_text())
    seed, kept = record["seed"], record["by_round"]
    by_round, num_jobs = soak(seed, args.rounds or len(kept) or 10, not args.no_kills)
    difference = first_difference(kept, by_round)
    if args.keep is not None:
        made = {name: metadata.version(name) for name in ("numpy", "keras", "horovod")}
        made |= {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
        head = json.dumps({"seed": seed, "made": made}, indent=1).removesuffix("\n}")
        rows = ",\n".join(f"  {json.dumps(digests)}" for digests in by_round)
        args.keep.write_text(f'{head},\n "by_round": [\n{rows}\n ]\n}}\n')
    result = {"seed": seed, "rounds": len(by_round), "jobs": num_jobs, "difference": difference}
    print("RESULT " + json.dumps(result), flush=True)
    return int(difference is not None)


if __name__ == "__main__":
    sys.exit(main())
