"""What is known of the keys of a KvVariable, after a change."""

import numpy as np

from sok_lite.engine.optimizer_states import State
from sok_lite.engine.table.content import Content, concatenate
from sok_lite.kv_variable.saved_tensors import apply_delta


def content(keys, pending=(), states=()):
    keys, pending = np.array(keys, np.int64), np.array(pending, np.int64)
    columns, of_pending = ({"counts": each + 100, "times": each + 0.5} for each in (keys, pending))
    values = np.stack([keys, keys * 2], 1).astype(np.float32)
    of_states = [
        State(name, dim, initial, np.full((keys.size, dim), value, np.float32), group)
        for name, dim, initial, value, group in states
    ]
    return Content(keys, values, of_states, columns, pending, of_pending, {})


def test_a_state_that_one_part_lacks_is_what_it_begins_with():
    """An optimizer has got `v` after the first, and another one came."""
    first = content([1, 4], states=[("m", 2, 0.0, 5.0, 1)])
    more = [("m", 2, 0.0, 6.0, 1), ("v", 1, 0.5, 7.0, 1), ("a", 2, 0.0, 8.0, 2)]
    second = content([2], states=more)
    for whole in (
        concatenate([first, second], "a table"),
        apply_delta(first, second, np.empty(0, np.int64), "a table"),
    ):
        states = whole.states
        assert [(s.name, s.dim, s.initial, s.group) for s in states] == [
            ("m", 2, 0.0, 1),
            ("v", 1, 0.5, 1),
            ("a", 2, 0.0, 2),
        ]
        expected = [[[5, 5], [6, 6], [5, 5]], [[0.5], [7], [0.5]], [[0, 0], [8, 8], [0, 0]]]
        for state, rows in zip(states, expected, strict=True):
            np.testing.assert_array_equal(state.rows, rows)


def test_a_free_state_goes_on_in_the_optimizer_that_has_it_later():
    first = content([1], states=[("m", 1, 0.0, 5.0, None)])
    second = content([2], states=[("m", 1, 0.0, 6.0, 1)])
    (state,) = concatenate([first, second], "a table").states
    assert state.group == 1 and state.rows.tolist() == [[5], [6]]
