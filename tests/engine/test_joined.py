"""Which states of several parts are one."""

import itertools
from typing import NamedTuple

import pytest

from sok_lite.engine.table.content import join_states


class State(NamedTuple):
    name: str
    group: int | None
    dim: int = 2
    initial: float = 0.0


def joined(*parts):
    """[(names and parts of a group's states)], as texts such as "m01 v1"; the last is the free one.

    Args:
      parts: texts such as "m v/m/a?": groups of states, "?" after those that belong to none.
    """
    lists = [
        [
            State(name.rstrip("?"), None if "?" in name else number)
            for number, group in enumerate(part.split("/"), start=1)
            for name in group.split()
        ]
        for part in parts
    ]
    found = join_states(lists)
    for state in found:
        assert all(lists[i][place].name == state.name for i, place in state.places.items())
    found.sort(key=lambda state: state.group or 99)
    return [
        " ".join(state.name + "".join(map(str, state.places)) for state in states)
        + ("?" if number is None else "")
        for number, states in itertools.groupby(found, lambda state: state.group)
    ]


@pytest.mark.parametrize(
    "parts, expected",
    [
        (["m v", "m v"], ["m01 v01"]),
        (["m v", "v m"], ["m01 v01"]),
        (["m", ""], ["m0"]),
        (["", "m"], ["m1"]),
        (["m/m", "m/m"], ["m01", "m01"]),
        (["m/m", "m"], ["m01", "m0"]),
        (["m/m v", "m v/m"], ["m01", "m01 v01"]),
        (["m/m v", "m v"], ["m0", "m01 v01"]),
        (["m", "m v"], ["m01 v1"]),
        (["m v", "m"], ["m01 v0"]),
        (["m", "m v/a"], ["m01 v1", "a1"]),
        (["m v", "a"], ["m0 v0", "a1"]),
        (["m", "m v", "m"], ["m012 v1"]),
        (["m?", "m"], ["m10"]),
        (["m", "m?"], ["m01"]),
        (["m? v?", "m/v"], ["m10", "v10"]),
        (["m?", "m?"], ["m01?"]),
        (["m m?", "m"], ["m01", "m0?"]),
        (["m? a?", "m v"], ["m10 v1", "a0?"]),
    ],
)
def test_states_are_one_by_what_their_groups_have(parts, expected):
    assert joined(*parts) == expected


def test_states_of_other_lengths_or_beginnings_are_others():
    kinds = [{}, {"dim": 3}, {"initial": 1.0}]
    parts = [[State("m", 1, **kind)] for kind in kinds]
    assert [state.places for state in join_states(parts)] == [{0: 0}, {1: 0}, {2: 0}]
