"""Random operations on random tables with random faults, against a dict and the audit.

A round makes a table of some kind and runs some operations on it. Into most of them a fault is
injected: Ctrl-C in a function or at a random time, or memory that runs out once or for good. After
each the table must be as before the operation or as after it, and sound inside
(tests/support/table_audit.py). Every round has a seed of its own and says it:

  python -m tests.fuzz.faults                        until the first failure, or Ctrl-C
  python -m tests.fuzz.faults --minutes 120          at most so long
  python -m tests.fuzz.faults --operations 200000    so many, to the end of a round
  python -m tests.fuzz.faults --seed 1234 --rounds 1 the round of that seed again

The last line is RESULT and the counts. The exit status is 1 if something was found.
"""

import argparse
import contextlib
import faulthandler
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.bench.common.measuring import backends, note, result
from sok_lite.backend import Backend
from sok_lite.engine.hashing import fix_seed
from sok_lite.engine.table import make_table
from sok_lite.engine.table.hkv import RefusedError
from tests.fuzz.faults_steps import DIM, STATE, KeyRows, Rows, Step, new_step
from tests.support.fault_bench import KINDS
from tests.support.shortage import Shortage
from tests.support.signal_rounds import Alarm
from tests.support.simt import backend as simt
from tests.support.simt import runtime
from tests.support.table_audit import audit
from tests.support.table_state import State, stale_rows
from tests.support.tripwire import CtrlC

_HANGS_AFTER = 120.0

# -------------------------------------------------------------------- faults


def _struck_by_ctrl_c(dice: random.Random, work: Callable[[], Any], names: Counter) -> bool:
    wire = CtrlC(int(np.exp(dice.uniform(0, np.log(400)))))
    with contextlib.suppress(KeyboardInterrupt):
        wire.run(work)
    names["ctrl_c"] += wire.place is not None
    return wire.place is not None


def _struck_by_shortage(
    dice: random.Random, backend: Backend, work: Callable[[], Any], names: Counter
) -> bool:
    shortage = Shortage(backend, dice.randrange(1, 60), dice.random() < 0.5)
    with shortage:
        with contextlib.suppress(MemoryError):
            work()
    names["memory"] += shortage.calls >= shortage.at
    return shortage.calls >= shortage.at


def _struck_by_signal(
    dice: random.Random, alarm: Alarm, work: Callable[[], Any], names: Counter
) -> bool:
    was_struck = alarm.run(float(np.exp(dice.uniform(np.log(2e-5), np.log(3e-3)))), work)
    names["signal"] += was_struck
    return was_struck


# -------------------------------------------------------------------- checks


def rows_of(state: State) -> Rows:
    """Returns what a state holds, as the dicts have it."""
    rows = {}
    for key, (value, states) in state.rows.items():
        bits = dict(states).get(STATE)
        state_row = np.zeros(DIM, np.float32) if bits is None else np.frombuffer(bits, np.float32)
        rows[key] = np.frombuffer(value, np.float32), state_row
    return rows


def _equal(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def check(step: Step, before: State, now: State, may_drop: bool, has_struck: bool) -> bool:
    """Raises AssertionError unless a table is as before a step or as after it.

    Returns:
      Whether it is as after.
    """
    stale = stale_rows(now, before)
    assert stale is None, stale
    held, expected = rows_of(now), step.after(rows_of(before))
    is_after = held.keys() == expected.keys() and all(
        _equal(held[key], expected[key]) for key in held
    )
    if is_after:
        return True
    gained = {name: now.counts[name] - before.counts[name] for name in now.counts}
    if now.rows == before.rows and not gained["inserted"]:
        # Where all new keys were refused, or not admitted, that is what comes after.
        assert has_struck or may_drop, "nothing was done"
        return False
    strange = held.keys() - expected.keys()
    assert not strange, f"keys that must not be there: {sorted(strange)[:5]}"
    wrong = [key for key in held if not _equal(held[key], expected[key])]
    assert not wrong, f"rows are neither as before nor as after: {sorted(wrong)[:5]}"
    gone = expected.keys() - held.keys()
    assert may_drop, f"keys are lost: {sorted(gone)[:5]}"
    evicted = len(gone & before.rows.keys())
    assert evicted == gained["evicted"], f"{evicted} keys are gone, {gained['evicted']} evicted"
    came = len(held.keys() - before.rows.keys())
    assert came == gained["inserted"], f"{came} keys came, {gained['inserted']} inserted"
    refused = len(gone - before.rows.keys())
    told = gained["refused"] + gained["not_admitted"]
    assert refused == told, f"{refused} new keys have no row, the table says {told}"
    return True


def run_round(
    backend: Backend,
    seed: int,
    faults: list[str],
    folder: str,
    alarm: Alarm,
    counts: Counter,
) -> None:
    """Runs the round of a seed; raises AssertionError with what it found."""
    dice = random.Random(seed)
    fix_seed(seed)  # of the hash
    runtime.set_seed(seed)
    kind = dice.choice(list(KINDS))
    options = dict(KINDS[kind])
    if options["var_type"] == "hybrid":
        slots = dice.choice([16, 64, 256])
        most = 1 << 16 if kind in ("roomy", "sighting") else slots
        options |= {"init_capacity": min(slots, most), "max_capacity": most}
        options["max_hbm_for_vectors"] = dice.choice([0, slots // 4, slots]) * DIM * 4 / 2**30
        options["max_bucket_size"] = dice.choice([4, 16])
        if backend.name == "cpu" and dice.random() < 0.5:
            options["far_path"] = folder
    table = make_table(options.pop("var_type"), backend, DIM, initializer=KeyRows(), **options)
    told = []
    for _ in range(dice.randrange(5, 40)):
        before = State.of(table)
        if dice.random() < 0.02:
            table.clock.prepare_restart(max(table.num_lookups, 2**32 - 1 - dice.randrange(3)))()
            before = State.of(table)
        step = new_step(dice, table, rows_of(before))
        before = before._replace(counts=State.of(table).counts)
        fault = dice.choice(faults)
        told.append(f"{step.name} ({fault})")

        def work(step: Step = step) -> None:
            with contextlib.suppress(RefusedError):
                step.run(table)

        try:
            if fault == "ctrl-c":
                has_struck = _struck_by_ctrl_c(dice, work, counts)
            elif fault == "memory":
                has_struck = _struck_by_shortage(dice, backend, work, counts)
            elif fault == "signal":
                has_struck = _struck_by_signal(dice, alarm, work, counts)
            else:
                work()
                has_struck = False
            audit(table)
            now = State.of(table)
            if step.name == "clear":
                before = before._replace(counts=now.counts)
            is_done = check(step, before, now, table.var_type == "hybrid", has_struck)
        except Exception as error:
            raise AssertionError(
                f"{type(error).__name__}: {error}\n  table: {kind} {options}\n"
                f"  steps: {', '.join(told)}"
            ) from error
        counts["steps"] += 1
        counts["undone"] += has_struck and not is_done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, help="at most so long; none: endless")
    parser.add_argument("--operations", type=int, help="so many, to the end of a round")
    parser.add_argument("--rounds", type=int, help="at most so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda", "simt"])
    kinds = ["none", "ctrl-c", "memory", "signal"]
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=kinds,
        help="each step has one of them; a seed means the same round with the same faults only",
    )
    parser.add_argument("--keep-going", action="store_true", help="after a failure")
    parser.add_argument("--quiet", action="store_true", help="say the seeds of failures only")
    args = parser.parse_args()
    if args.faults is None:
        # A signal may come in the midst of what simulates a GPU, which is no code of a table.
        args.faults = [*kinds[: 3 if args.backend == "simt" else 4], "ctrl-c", "ctrl-c"]
    warnings.simplefilter("ignore")
    if args.backend == "simt":
        if simt.unavailable() is not None:
            note(f"simt is left out: {simt.unavailable()}.")
            return 1
        backend = simt.simt_backend()
    else:
        (backend,) = backends([args.backend])
    # Rows grow every few keys.
    backend.chunk_bytes = backend.far_chunk_bytes = 512
    backend.segment_slots = 128  # small tables have several, and grow and shrink them
    alarm, counts, failures = Alarm(), Counter[str](), 0
    start = time.monotonic()
    rounds = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        while args.rounds is None or rounds < args.rounds:
            if args.operations is not None and counts["steps"] >= args.operations:
                break
            if args.minutes is not None and time.monotonic() - start >= 60 * args.minutes:
                break
            seed = args.seed + rounds
            rounds += 1
            if not args.quiet:
                print(f"round {rounds}, seed {seed}", flush=True)
            # A kernel that never ends cannot be interrupted: the process ends with it.
            faulthandler.dump_traceback_later(_HANGS_AFTER, exit=True)
            try:
                run_round(backend, seed, args.faults, folder, alarm, counts)
            except AssertionError as error:
                failures += 1
                print(f"FAILED --seed {seed} --rounds 1\n{error}", flush=True)
                if not args.keep_going:
                    break
            except Exception:
                failures += 1
                print(f"FAILED --seed {seed} --rounds 1", flush=True)
                traceback.print_exc(file=sys.stdout)
                if not args.keep_going:
                    break
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    result(
        seed=args.seed,
        rounds=rounds,
        failures=failures,
        seconds=time.monotonic() - start,
        **{name: counts[name] for name in ("steps", "ctrl_c", "memory", "signal", "undone")},
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
