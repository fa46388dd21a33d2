"""common/turns.py: marks."""

import pytest

from scripts.bench.common.turns import Mark


@pytest.mark.parametrize(
    ("is_time", "ours", "ratio", "reached"),
    [
        (True, 6.0, "3.00x its time", "no"),
        (True, 2.6, "1.30x its time", "yes"),
        (False, 1.25, "1.60x as fast", "yes"),
        (False, 1.6, "1.25x as fast", "no"),
    ],
)
def test_a_mark_says_whether_it_is_reached(is_time, ours, ratio, reached):
    mark = Mark("work", "case", "a", "b", 1.3, is_time)
    row = mark.row({"a": ours, "b": 2.0})
    assert row == ["work", f"a: {ours:.3g} ms", "b: 2 ms", ratio, "1.3x", reached]
    assert mark.row({"a": ours}) is None and mark.row({"b": 2.0}) is None
