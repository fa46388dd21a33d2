"""Facts about how the example splits a global batch over ranks, and about its small helpers."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from ctr.ranks import Ranks
from train_ctr import print_result, split


def ranks(rank, size):
    """A rank without the job: `share` needs no more."""
    made = object.__new__(Ranks)
    made.rank, made.size = rank, size
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 2, 31, 33, 1000])
def test_every_row_of_a_batch_is_one_ranks(size, batch):
    for num_rows in {0, 1, batch // 2, batch - 1, batch}:
        rows = np.arange(num_rows)
        shares = [rows[ranks(rank, size).share(num_rows, batch)] for rank in range(size)]
        np.testing.assert_array_equal(np.concatenate(shares), rows)
        # no rank has more than its part of a whole batch
        assert max(map(len, shares)) <= math.ceil(batch / size)


def test_a_smaller_batch_keeps_the_borders_of_a_whole_one():
    # so that one rank evaluates the same blocks of rows as several ranks do
    assert [ranks(rank, 3).share(10, 12) for rank in range(3)] == [
        slice(0, 4),
        slice(4, 8),
        slice(8, 10),
    ]
    assert ranks(2, 3).share(5, 12) == slice(5, 5)


def test_what_is_not_a_number_is_null_in_the_result(capsys):
    print_result({"auc": float("nan"), "best_auc": None, "keys": 3})
    line = capsys.readouterr().out
    assert line.endswith("}\n")
    assert json.loads(line.removeprefix("RESULT ")) == {"auc": None, "best_auc": None, "keys": 3}


@pytest.mark.parametrize(("num_rows", "held_out", "expected"), [(10, 0.2, 8), (3, 0.5, 1)])
def test_the_last_rows_are_held_out(num_rows, held_out, expected):
    assert split(num_rows, held_out) == expected


@pytest.mark.parametrize(("num_rows", "held_out"), [(1, 0.2), (10, 0.0), (10, 1.0), (10, -1.0)])
def test_a_split_without_rows_on_both_sides_is_refused(num_rows, held_out):
    with pytest.raises(ValueError, match="Expected enough rows"):
        split(num_rows, held_out)
