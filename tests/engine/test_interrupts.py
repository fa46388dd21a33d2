"""Ctrl-C leaves a table as before an operation or as after it, never between.

An operation is run on equal tables again and again, and Ctrl-C is pressed in the k-th function of
it, for every k. Then
(a) keys, rows and optimizer states are as before the operation or as after it;
(b) nothing inside of the table contradicts anything else (tests/support/table_audit.py);
(c) its lock is free for another thread;
(d) the next lookup, write and removal, and the same operation again, do what they do to a dict.
Tables that are made of the same are checked once (tests/support/fault_facts.py).
tests/support/table_state.py says what "as before" allows.
"""

import pytest

from tests.conftest import QUICK
from tests.support.fault_cases import CASES
from tests.support.fault_facts import every_place
from tests.support.helpers import sized
from tests.support.own_process import run_limited
from tests.support.simt.backend import is_simulated

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


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, case in CASES.items() for kind in case.kinds]
)
def test_ctrl_c_in_any_function(new_bench, backend, name, kind):
    is_usual = kind in CASES[name].of_each_index
    if is_simulated(backend) and not is_usual:
        pytest.skip("the functions that differ are those of other kinds too")
    bench = new_bench(kind)
    step = _STEPS.get(name, 1) * sized(bench.backend, 4, 60)
    every_place(bench, name, step=step if is_usual else 4 * step)


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
@pytest.mark.parametrize("seed", [0, 1])
def test_signals_at_random_times(kind, seed):
    """Large batches, as a Ctrl-C in a notebook finds them."""
    program = """
        import sys
        from tests.support.signal_rounds import rounds

        rounds(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    """
    count = 40 if QUICK else 120
    assert run_limited(program, kind, count, seed, timeout=500)[:2] == ["interrupted", str(count)]
