"""What each rank of a soak runs, from the last checkpoint to the last round or to its kill."""

import itertools
import json
import os
import subprocess
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import tensorflow as tf

import sok_lite as sok
from tests.fuzz import soak_operations, soak_plan
from tests.fuzz.soak_model import Model
from tests.fuzz.soak_plan import Kill, Round


class Soak:
    """The rounds of a job, on one rank. All ranks see the folder, where the checkpoint and the
    contents of rounds go; `kill` has the fields of a `Kill`."""

    def __init__(self, seed: int, folder: str, rounds: int, kill: list | None) -> None:
        self.seed, self.folder, self.rounds = seed, Path(folder), rounds
        self.rank = sok.communication.rank()
        self.kill = None if kill is None else Kill(*kill)
        self.model = Model(seed)
        self.checkpoint = self.folder / "checkpoint"

    def run(self) -> None:
        if (self.checkpoint / "manifest.json").exists():
            self.model.load(self.checkpoint)
        done = self.model.steps
        for place in itertools.islice(soak_plan.rounds_of(self.seed), self.rounds):
            if place.end <= done:
                continue
            if done and done not in (place.first, place.middle):
                raise RuntimeError(f"A checkpoint has {done} steps, where no dump is made.")
            self.run_round(place, done == place.middle)
            done = place.end

    def run_round(self, place: Round, is_half_done: bool) -> None:
        begun = None
        if not is_half_done:
            self.train(place.first, place.middle)
            begun = self.model.dump(self.checkpoint, place.dumps[0])
        self.train(place.middle, place.end)
        if begun is not None:
            begun.wait()
        for operation in place.operations:
            table = self.model.tables[operation.table]
            soak_operations.run(table, operation, self.seed, self.rank, place.end)
        path = self.folder / f"round-{place.number}-{self.rank}.npz"
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **self.model.contents(place.end))
        path.with_suffix(".part").rename(path)
        self.model.dump(self.checkpoint, place.dumps[1])

    def train(self, first: int, end: int) -> None:
        for number in range(first, end):
            if self.kill is not None and number == self.kill.step and self.rank in self.kill.ranks:
                # Whoever started the job may know that it was to end.
                (self.folder / f"struck-{self.rank}").touch()
                # From another process: it comes wherever this one then is.
                command = f"sleep {self.kill.delay_ms / 1000}; kill -KILL {os.getpid()}"
                subprocess.Popen(["sh", "-c", command])
            self.model.step(number)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)  # two ranks share the cores
    sok.init(comm_tool="horovod")
    Soak(**json.loads(os.environ["SOAK_JOB"])).run()
