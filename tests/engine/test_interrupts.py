"""Ctrl-C leaves a table as before an operation or as after it, never between.

An operation is run on equal tables again and again, and Ctrl-C is pressed in the k-th function of
it, for every k: tests/support/fault_facts.py says what must be true then.
"""

import pytest

from tests.conftest import QUICK
from tests.support.fault_cases import variants
from tests.support.fault_facts import every_place
from tests.support.helpers import sized
from tests.support.own_process import run_limited

# Of operations with hundreds of functions every so many.
_STEPS = {
    "grow_segments": 7,
    "lookup_tables": 7,
    "lookup_full_tables": 7,
    "refuse_in_tables": 11,
    "update_new_of_tables": 7,
    "update_new_first_state": 3,
    "update_refused": 7,
}


@pytest.mark.parametrize(("name", "kind"), variants())
def test_ctrl_c_in_any_function(new_bench, name, kind):
    bench = new_bench(kind)
    every_place(bench, name, step=_STEPS.get(name, 1) * sized(bench.backend, 4, 60))


# Large batches, as a Ctrl-C in a notebook finds them.
SIGNALS = """
    import random, sys, time
    from sok_lite.backend import get_backend
    from tests.support.fault_bench import Bench
    from tests.support.fault_cases import CASES
    from tests.support.fault_facts import Facts
    from tests.support.tripwire import Alarm

    kind, count, dice = sys.argv[1], int(sys.argv[2]), random.Random(sys.argv[1])
    bench, known, struck = Bench(get_backend("cpu"), kind, 2000), {}, 0
    # Larger segments have room for all keys of "reseed".
    names = [n for n, c in CASES.items() if kind in c.kinds and not c.others and n != "reseed"]
    while struck < count:
        name = dice.choice(names)
        if name not in known:
            facts = Facts.of(bench, name, ())
            tables, start = facts.spare.pop(), time.perf_counter()
            facts.case.work(bench, tables)
            known[name] = facts, time.perf_counter() - start
        facts, took = known[name]
        alarm = Alarm(dice.uniform(1e-5, 1.2 * took))
        wrong = facts.attempt(alarm)
        assert wrong is None, f"{name} of {kind} interrupted after {alarm.place}: {wrong}"
        struck += alarm.place is not None
"""


@pytest.mark.parametrize(("kind", "threads"), [("hbm", "2"), ("kLru", "1"), ("roomy", "1")])
def test_signals_at_random_times(kind, threads):
    count = 30 if QUICK else 120
    run_limited(SIGNALS, kind, count, timeout=500, SOK_LITE_NUM_THREADS=threads)
