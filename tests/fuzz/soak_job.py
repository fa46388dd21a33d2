"""What each rank of a soak runs, from the last checkpoint to the last round or to its kill.

    horovodrun -np 2 python -m tests.fuzz.soak_start '{"seed": 7, ...}'

tests/fuzz/soak.py starts it so; `Job` has the fields.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import tensorflow as tf

import sok_lite as sok
from tests.fuzz import soak_operations, soak_plan
from tests.fuzz.soak_model import Model
from tests.fuzz.soak_plan import Kill, Round


class Job(NamedTuple):
    """What a job is told.

    Attributes:
      seed: of all that it does.
      folder: where the checkpoint and the digests go; all ranks see it.
      rounds: the number of rounds; None: until the time is over.
      until_s: in seconds since 1970, when no further round begins.
      kill: the fields of a `Kill`, or None.
    """

    seed: int
    folder: str
    rounds: int | None
    until_s: float | None
    kill: list | None


class Strike:
    """Kills this rank, where and when the job says so."""

    def __init__(self, kill: list | None, rank: int, folder: Path) -> None:
        self._kill = None if kill is None else Kill(*kill)
        self._rank, self._folder = rank, folder

    def at(self, number: int, point: str, step: int = 0) -> None:
        """Says that the rank has come to a point of a round, which may be its last."""
        kill = self._kill
        if kill is None or self._rank not in kill.ranks or point != kill.point:
            return
        if (point != "load" and number != kill.round) or step != kill.number:
            return
        # Whoever started the job may know that it was to end.
        (self._folder / f"struck-{self._rank}").touch()
        if kill.delay_ms == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        # From another process: it comes wherever this one then is.
        command = f"sleep {kill.delay_ms / 1000}; kill -KILL {os.getpid()}"
        subprocess.Popen(["sh", "-c", command])
        self._kill = None


class Soak:
    """The rounds of a job, on one rank."""

    def __init__(self, job: Job) -> None:
        self.job, self.folder = job, Path(job.folder)
        self.rank = sok.communication.rank()
        self.strike = Strike(job.kill, self.rank, self.folder)
        self.model = Model(job.seed)
        self.checkpoint = self.folder / "checkpoint"

    def run(self) -> None:
        self.strike.at(0, "load")
        if (self.checkpoint / "manifest.json").exists():
            self.model.load(self.checkpoint)
        done = self.model.steps
        for place in itertools.islice(soak_plan.rounds_of(self.job.seed), self.job.rounds):
            if place.end <= done:
                continue
            if done and done not in (place.first, place.middle):
                raise RuntimeError(f"A checkpoint has {done} steps, where no dump is made.")
            self.run_round(place, done == place.middle)
            done = place.end
            if self.is_over():
                break

    def run_round(self, place: Round, is_half_done: bool) -> None:
        begun = None
        if not is_half_done:
            self.train(place, place.first, place.middle)
            self.strike.at(place.number, "dump 0")
            begun = self.model.dump(self.checkpoint, place.dumps[0])
        self.train(place, place.middle, place.end)
        if begun is not None:
            begun.wait()
        self.strike.at(place.number, "operations")
        for operation in place.operations:
            table = self.model.tables[operation.table]
            soak_operations.run(table, operation, self.job.seed, self.rank, place.end)
        self.strike.at(place.number, "digest")
        self.write(place, self.model.contents(place.end))
        self.strike.at(place.number, "dump 1")
        self.model.dump(self.checkpoint, place.dumps[1])

    def train(self, place: Round, first: int, end: int) -> None:
        for number in range(first, end):
            self.strike.at(place.number, "step", number)
            self.model.step(number)

    def write(self, place: Round, contents: dict[str, np.ndarray]) -> None:
        """Leaves what this rank holds for the one who started the job."""
        path = self.folder / f"round-{place.number}-{self.rank}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **contents)
        part.rename(path)

    def is_over(self) -> bool:
        """Whether any rank says that the time is over; all get the same answer."""
        if self.job.until_s is None:
            return False
        said = tf.constant(float(time.time() >= self.job.until_s))
        return float(sok.communication.allreduce(said, "sum")) > 0


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    tf.config.threading.set_intra_op_parallelism_threads(1)  # two ranks share the cores
    sok.init(comm_tool="horovod")
    Soak(job).run()
