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
    "grow_segments": 4,
    "lookup_tables": 4,
    "lookup_full_tables": 4,
    "refuse_in_tables": 6,
    "update_new_of_tables": 4,
    "update_new_first_state": 2,
    "update_refused": 4,
}


@pytest.mark.parametrize(("name", "kind"), variants())
def test_ctrl_c_in_any_function(new_bench, name, kind):
    bench = new_bench(kind)
    every_place(bench, name, step=_STEPS.get(name, 1) * sized(bench.backend, 7, 105))
