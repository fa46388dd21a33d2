"""How the example splits a global batch over ranks, and its small helpers."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from ctr.ranks import Ranks
from train_ctr import print_result, split


def shares(size, num_rows, batch):
    """Of ranks without the job: `share` needs no more."""
    made = [object.__new__(Ranks) for _ in range(size)]
    for rank, each in enumerate(made):
        each.rank, each.size = rank, size
    return [each.share(num_rows, batch) for each in made]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_of_a_batch_is_one_ranks_and_a_smaller_batch_keeps_the_borders(size):
    """So that one rank evaluates the same blocks of rows as several ranks do."""
    for batch in (1, 2, 31, 33, 1000):
        whole = shares(size, batch, batch)
        for num_rows in {0, 1, batch // 2, batch - 1, batch}:
            rows = np.arange(num_rows)
            parts = [rows[part] for part in shares(size, num_rows, batch)]
            np.testing.assert_array_equal(np.concatenate(parts), rows)
            assert max(map(len, parts)) <= math.ceil(batch / size)
            for part, border in zip(parts, whole, strict=True):
                np.testing.assert_array_equal(part, rows[border])


def test_what_is_not_a_number_is_null_in_the_result(capsys):
    print_result({"auc": float("nan"), "best_auc": None, "keys": 3})
    line = capsys.readouterr().out
    assert line.endswith("}\n")
    assert json.loads(line.removeprefix("RESULT ")) == {"auc": None, "best_auc": None, "keys": 3}


def test_the_last_rows_are_held_out_and_a_split_without_rows_on_both_sides_is_refused():
    assert (split(10, 0.2), split(3, 0.5)) == (8, 1)
    for wrong in ((1, 0.2), (10, 0.0), (10, 1.0), (10, -1.0)):
        with pytest.raises(ValueError, match="Expected enough rows"):
            split(*wrong)
