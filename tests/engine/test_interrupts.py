"""Ctrl-C leaves a table as before an operation or as after it, never between.

An operation is run on equal tables again and again, and Ctrl-C is pressed in the k-th function of
it, for every k: tests/support/fault_facts.py says what must be true then.
"""

import pytest

from tests.support.fault_cases import variants
from tests.support.fault_facts import every_place
from tests.support.helpers import sized

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
