"""What fails on one rank fails on all, with one reason."""

import numpy as np
import pytest

from sok_lite.comm import run_ranks
from sok_lite.engine.failure import together


class OwnError(Exception):
    """None of those that Python has."""


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (ValueError("wrong"), ValueError, "Rank 1: wrong"),
        (UnicodeEncodeError("a", "b", 0, 1, "c"), ValueError, "Rank 1: "),
        (FileNotFoundError(2, "No such file", "x"), OSError, "No such file: 'x'"),
        (MemoryError("none"), MemoryError, "Rank 1: none"),
        (OwnError("odd"), RuntimeError, "Rank 1: OwnError: odd"),
        (ValueError("x" * 10_000), ValueError, "Rank 1: xxx"),
    ],
)
def test_all_ranks_raise_what_one_raised(failure, kind, text):
    def program(comm):
        def fail_on_one():
            if comm.rank == 1:
                raise failure
            return comm.rank

        with pytest.raises(kind) as caught:
            together(comm, fail_on_one)
        assert comm.allreduce(np.int64(1)) == 3  # they are still in step
        return str(caught.value)

    (said,) = set(run_ranks(3, program))
    assert text in said and len(said) < 5000


def test_the_first_rank_that_failed_is_named():
    def program(comm):
        def fail():
            if comm.rank:
                raise ValueError(f"at {comm.rank}")

        with pytest.raises(ValueError, match="Rank 1: at 1"):
            together(comm, fail)

    run_ranks(3, program)


@pytest.mark.parametrize("size", [1, 3])
def test_what_does_not_fail_is_returned(size):
    assert run_ranks(size, lambda comm: together(comm, lambda: comm.rank)) == list(range(size))


def test_one_rank_raises_its_own_exception():
    with pytest.raises(OwnError, match="odd"):
        run_ranks(1, lambda comm: together(comm, lambda: (_ for _ in ()).throw(OwnError("odd"))))
