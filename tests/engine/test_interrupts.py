"""An exception between any two steps leaves a table as before or as after, never between.

An operation is run on equal tables again and again, and at the k-th line of it that runs an
exception is raised, for every k. Then
(a) keys, rows and optimizer states are as before the operation or as after it;
(b) nothing inside of the table contradicts anything else (tests/support/table_audit.py);
(c) its lock is free for another thread;
(d) the next lookup, write and removal, and the same operation again, do what they do to a dict.
Some are hit a second time while the first exception unwinds. Tables that are made of the same are
checked once (tests/support/fault_facts.py). tests/support/table_state.py says what "as before"
allows.
"""

import pytest

from tests.conftest import QUICK
from tests.support.fault_cases import CASES
from tests.support.fault_facts import every_pair, every_place
from tests.support.helpers import sized
from tests.support.own_process import run_limited
from tests.support.simt.backend import is_simulated

# Kinds of tables that are tried at every fifth line of an operation, by far most of which are those
# of others as well: one of each index, and none where another operation does all that it does. Of
# all other kinds most lines are left out.
_AT_EVERY_LINE = {name: case.of_each_index for name, case in CASES.items()} | {
    "evict": ("kLru", "kLru log"),
    "erase_many": ("hbm", "kLru", "hbm log"),
    "clear": ("hbm", "kLru", "kLru log"),
    "restore": ("hbm", "kLru", "hbm log"),
    "age": ("hbm", "kLru", "kLru log"),
    "lookup_new": (),
    "lookup_mixed": ("hbm", "kLru", "sighting"),
    "lookup_drawn": (),
    "insert_and_evict": (),
    "insert_or_assign_scores": ("kCustomized",),
    "accum_or_assign": ("hbm",),
    "erase_if": ("hbm",),
    "erase_below": ("kLru",),
    "grow": ("hbm", "roomy"),
    "grow_segments": ("hbm", "roomy"),
    "shrink_segments": ("hbm", "roomy"),
    "update_state": (),
    "update_two_tables": ("hbm",),
    "update_new": ("hbm", "kLru", "roomy"),
    "update_new_of_tables": ("kLru",),
    "export_if": ("kLru",),
    "restore_into_empty": ("hbm",),
}
ALL = [(name, kind) for name, case in CASES.items() for kind in case.kinds]


# Of calls with thousands of lines every so many.
_STEPS = {
    "grow_segments": 7,
    "lookup_tables": 7,
    "lookup_full_tables": 7,
    "refuse_in_tables": 11,
    "update_new_of_tables": 7,
    "update_new_first_state": 3,
    "update_refused": 7,
}


def skip_if_the_same_there(backend, name, kind):
    """On a simulated GPU the backend differs, and that is seen with one table of each index."""
    if is_simulated(backend) and kind not in CASES[name].of_each_index:
        pytest.skip("the lines that differ are those of other kinds too")


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_an_exception_at_any_line(new_bench, backend, name, kind):
    skip_if_the_same_there(backend, name, kind)
    bench = new_bench(kind)
    step = _STEPS.get(name, 1) * sized(bench.backend, 12, 180)
    if kind not in _AT_EVERY_LINE[name]:
        step *= sized(bench.backend, 4, 2)
    every_place(bench, name, step=step)


@pytest.mark.full_only("raises at thousands of instructions")
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in _AT_EVERY_LINE for kind in _AT_EVERY_LINE[name]]
)
@pytest.mark.parametrize("places", ["instructions", "lines of backends too"])
def test_an_exception_at_even_more_places(new_bench, backend, name, kind, places):
    if is_simulated(backend) and places == "instructions":
        pytest.skip("they are the same instructions on a CPU")
    is_fine, bench = places == "instructions", new_bench(kind)
    step = sized(bench.backend, 1300, 6000)
    every_place(bench, name, step=step, everywhere=not is_fine, opcodes=is_fine)


PAIRS = ("lookup_mixed", "insert_or_assign", "erase_many", "evict", "promote", "clear", "restore")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in PAIRS for kind in CASES[name].kinds],
)
def test_a_second_exception_while_the_first_unwinds(new_bench, backend, name, kind):
    skip_if_the_same_there(backend, name, kind)
    bench = new_bench(kind)
    every_pair(bench, name, step=sized(bench.backend, 140, 450))


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
