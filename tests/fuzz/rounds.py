"""What the fuzzers share: rounds of a seed each, until something is found or a limit is reached.

The last line is RESULT and the counts. The exit status is 1 if something was found.
"""

import argparse
import contextlib
import faulthandler
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from scripts.bench.common.measuring import note, result
from tests.support.simt import backend as simt

_HANGS_AFTER = 180.0


def main(
    doc: str | None,
    run_round: Callable[[Any, int, Counter], None],
    on_backend: Callable[[str], AbstractContextManager[Any]],
    names: list[str],
) -> int:
    """Runs rounds as the command line says; returns the exit status.

    A round gets what `on_backend` gives, a seed and counts; it counts "operations", and raises
    AssertionError with what it found.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="at most so long on each backend")
    parser.add_argument("--rounds", type=int, help="at most so many on each backend")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--backends", nargs="+", default=["cpu"], choices=names)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    total, failures, start = Counter[str](), 0, time.monotonic()
    for name in args.backends:
        if name == "simt" and simt.unavailable() is not None:
            note(f"simt is left out: {simt.unavailable()}.")
            continue
        counts, rounds, begun = Counter[str](), 0, time.monotonic()
        with on_backend(name) as backend, contextlib.suppress(KeyboardInterrupt):
            while rounds != args.rounds and not failures:
                if args.minutes is not None and time.monotonic() - begun >= 60 * args.minutes:
                    break
                seed = args.seed + rounds
                rounds += 1
                print(f"round {rounds} on {name}, seed {seed}", flush=True)
                # What never ends cannot be interrupted: the process ends with it.
                faulthandler.dump_traceback_later(_HANGS_AFTER, exit=True)
                try:
                    run_round(backend, seed, counts)
                except Exception as error:
                    failures += 1
                    text = str(error) if isinstance(error, AssertionError) else ""
                    print(f"FAILED --seed {seed} --rounds 1 --backends {name}\n{text}", flush=True)
                    if not text:
                        print(traceback.format_exc(), flush=True)
        total += counts + Counter({"rounds": rounds})
    faulthandler.cancel_dump_traceback_later()
    result(seed=args.seed, failures=failures, seconds=time.monotonic() - start, **total)
    return 1 if failures else 0
