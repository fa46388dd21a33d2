"""Random faults in random operations on random tables, against a dict and the audit.

A round builds tables of some kind, does some operations to them, and strikes another one again and
again: by Ctrl-C in a function or at a random time, or by memory that runs out once or for good.
After each the tables must be as tests/support/fault_facts.py says. Every round has a seed of its
own and says it:

  python -m tests.fuzz.faults                        until the first failure, or Ctrl-C
  python -m tests.fuzz.faults --minutes 120          at most so long
  python -m tests.fuzz.faults --seed 1234 --rounds 1 the round of that seed again
"""

import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from scripts.bench.common.measuring import backends
from sok_lite.backend import Backend
from sok_lite.engine.hashing import fix_seed
from tests.fuzz import rounds
from tests.support.fault_bench import FULL, KINDS, Bench
from tests.support.fault_cases import CASES, Case
from tests.support.fault_facts import Facts
from tests.support.shortage import Shortage
from tests.support.simt import backend as simt
from tests.support.simt import runtime
from tests.support.tripwire import Alarm, CtrlC


def _is_plain(case: Case) -> bool:
    """Whether it may come after any others."""
    return case.prepare is Case._field_defaults["prepare"]


def new_fault(dice: random.Random, backend: Backend) -> Any:
    """Draws a fault. Most are Ctrl-C: there are the most places of it."""
    kind = dice.choice(["ctrl-c", "ctrl-c", "memory", "signal"])
    if kind == "memory":
        return Shortage(backend, dice.randrange(1, 60), dice.random() < 0.5)
    # Of an alarm the threads of a simulated GPU have no time.
    if kind == "ctrl-c" or simt.is_simulated(backend):
        return CtrlC(int(np.exp(dice.uniform(0, np.log(400)))))
    return Alarm(float(np.exp(dice.uniform(np.log(2e-5), np.log(3e-3)))))


def run_round(backend: Backend, seed: int, counts: Counter) -> None:
    """Runs the round of a seed; raises AssertionError with what it found."""
    dice = random.Random(seed)
    fix_seed(seed)  # of the hash
    runtime.set_seed(seed)
    # Who evicts whom is up to the threads of a real GPU.
    kinds = [kind for kind in KINDS if backend.name == "cpu" or kind not in FULL]
    kind, n = dice.choice(kinds), dice.choice([4, 10, 10, 30])
    names = [name for name, case in CASES.items() if kind in case.kinds]
    name = dice.choice(names)
    # The log of removals never takes another seed: it loses keys that are chosen against the hash.
    plain = [n for n in names if _is_plain(CASES[n]) and not CASES[n].others and n != "reseed"]
    length = dice.choice([0, 1, 3, 8]) if plain and _is_plain(CASES[name]) else 0
    history = tuple(dice.choices(plain, k=length))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(backend, kind, n, folder if dice.random() < 0.5 else None)
        told = f"{name} of {kind}, n={n}, after {', '.join(history) or 'nothing'}"
        facts = Facts.of(bench, name, history)
        for _ in range(dice.randrange(2, 12)):
            fault = new_fault(dice, backend)
            wrong = facts.attempt(fault)
            assert wrong is None, f"{type(fault).__name__} at {fault.place}: {wrong}\n  {told}"
            counts["operations"] += 1
            counts[type(fault).__name__] += fault.place is not None
        facts.check_spare()


@contextlib.contextmanager
def on_backend(name: str) -> Iterator[Backend]:
    """Gives a backend whose memory is in small pieces, so that small tables have several."""
    (backend,) = [simt.simt_backend()] if name == "simt" else backends([name])
    backend.chunk_bytes = backend.far_chunk_bytes = 512
    backend.segment_slots = 128
    if name == "cpu":
        backend.num_threads = 1  # so that a round repeats
    yield backend


if __name__ == "__main__":
    sys.exit(rounds.main(__doc__, run_round, on_backend, ["cpu", "cuda", "simt"]))
