"""Facts that hold on every rank of any communicator, for any number of ranks.

`tests/comm/test_comm.py` runs them on threads, `tests/ranks/test_comm.py` over Horovod or MPI.
What a rank sends is a function of its number, so every rank can work out what it must receive.
"""

import functools
import operator

import numpy as np
import pytest

from sok_lite.comm import Communicator
from tests.support.helpers import run_threads

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def rows_for(sender: int, receiver: int, num_rows: int, shape=(), dtype="int64") -> np.ndarray:
    """(num_rows, *shape) random bits of the dtype; the same whoever asks."""
    rng = np.random.default_rng([sender, receiver, num_rows])
    dtype = np.dtype(dtype)
    full = (num_rows, *shape)
    if dtype == np.bool_:
        return rng.integers(0, 2, full).astype(bool)
    if dtype.kind == "f":
        return rng.normal(size=full).astype(dtype)
    info = np.iinfo(dtype)
    rows = rng.integers(info.min, info.max, full, dtype=dtype, endpoint=True)
    return np.asarray(rows)


def num_rows_for(sender: int, receiver: int, most: int) -> int:
    """Uneven, and often 0."""
    return int(
        np.random.default_rng([7, sender, receiver, most]).integers(-most // 2, most + 1).clip(0)
    )


def check_alltoallv(comm: Communicator, counts, shape=(), dtype="int64", strided=False) -> None:
    """counts[sender][receiver] rows travel; every rank checks what arrives."""
    mine = [rows_for(comm.rank, r, counts[comm.rank][r], shape, dtype) for r in range(comm.size)]
    rows = np.concatenate(mine)
    if strided:
        rows = np.repeat(rows, 2, axis=0)[::2]
        assert len(rows) < 2 or not rows.flags.c_contiguous
    got = comm.alltoallv(rows, np.array(counts[comm.rank], np.int32))
    expected = [
        rows_for(s, comm.rank, counts[s][comm.rank], shape, dtype) for s in range(comm.size)
    ]
    assert got.recv_splits.dtype == np.int32
    assert got.recv_splits.tolist() == [len(part) for part in expected]
    assert got.rows.dtype == np.dtype(dtype)
    assert got.rows.shape[1:] == tuple(shape)
    np.testing.assert_array_equal(got.rows, np.concatenate(expected))


def uneven(comm: Communicator, most: int) -> list[list[int]]:
    return [[num_rows_for(s, r, most) for r in range(comm.size)] for s in range(comm.size)]


def alltoallv_carries_every_dtype(comm: Communicator) -> None:
    for dtype in DTYPES:
        check_alltoallv(comm, uneven(comm, 9), (3,), dtype)


def alltoallv_carries_rows_of_any_shape(comm: Communicator) -> None:
    for shape in [(), (1,), (5,), (2, 3), (0,), (2, 0, 3)]:
        check_alltoallv(comm, uneven(comm, 8), shape, "float32")


def alltoallv_of_awkward_sizes(comm: Communicator) -> None:
    for most in [1, 31, 33, 1000, 100_003]:
        check_alltoallv(comm, uneven(comm, most), (2,), "float32")


def alltoallv_of_nothing(comm: Communicator) -> None:
    check_alltoallv(comm, [[0] * comm.size] * comm.size, (4,), "float32")


def alltoallv_with_a_rank_that_has_nothing(comm: Communicator) -> None:
    for silent in range(comm.size):
        counts = [
            [0 if silent in (s, r) else 5 + s for r in range(comm.size)] for s in range(comm.size)
        ]
        check_alltoallv(comm, counts, (3,), "int64")


def alltoallv_takes_strided_rows(comm: Communicator) -> None:
    check_alltoallv(comm, uneven(comm, 33), (2,), "int16", strided=True)


def alltoallv_takes_recv_splits_that_are_known(comm: Communicator) -> None:
    counts = uneven(comm, 9)
    mine = [rows_for(comm.rank, r, counts[comm.rank][r]) for r in range(comm.size)]
    known = np.array([counts[s][comm.rank] for s in range(comm.size)], np.int32)
    got = comm.alltoallv(np.concatenate(mine), counts[comm.rank], known)
    np.testing.assert_array_equal(got.recv_splits, known)
    expected = [rows_for(s, comm.rank, counts[s][comm.rank]) for s in range(comm.size)]
    np.testing.assert_array_equal(got.rows, np.concatenate(expected))


def received_rows_may_be_written(comm: Communicator) -> None:
    one_each = np.ones(comm.size, np.int32)
    comm.alltoallv(np.zeros((comm.size, 2), np.float32), one_each).rows[:] = 1
    comm.allgatherv(np.zeros((2, 2), np.float32)).rows[:] = 1


def sent_rows_may_be_written_after_the_call(comm: Communicator) -> None:
    rows = np.full((comm.size, 1000), comm.rank, np.int64)
    for _ in range(20):
        got = comm.alltoallv(rows, np.ones(comm.size, np.int32)).rows.copy()
        rows[:] = -1
        np.testing.assert_array_equal(got[:, 0], np.arange(comm.size))
        rows[:] = comm.rank


def allgatherv_gives_all_rows_in_rank_order(comm: Communicator) -> None:
    for dtype in DTYPES:
        for shape in [(), (3,), (2, 0)]:
            parts = [rows_for(s, 0, num_rows_for(s, 0, 40), shape, dtype) for s in range(comm.size)]
            got = comm.allgatherv(parts[comm.rank])
            assert got.recv_splits.tolist() == [len(part) for part in parts]
            assert got.rows.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(got.rows, np.concatenate(parts))


def allgatherv_of_nothing(comm: Communicator) -> None:
    got = comm.allgatherv(np.zeros((0, 3), np.float32))
    assert got.rows.shape == (0, 3)
    assert got.recv_splits.tolist() == [0] * comm.size


def allreduce_of_every_dtype(comm: Communicator) -> None:
    for dtype in DTYPES:
        for op, reduce in [("sum", np.add), ("max", np.maximum), ("min", np.minimum)]:
            if op == "sum" and dtype == "bool":
                continue
            arrays = [rows_for(s, 1, 5, (2, 3), dtype) for s in range(comm.size)]
            expected = arrays[0]
            for other in arrays[1:]:
                expected = reduce(expected, other)
            got = comm.allreduce(arrays[comm.rank], op)
            assert got.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(got, expected)


def allreduce_of_awkward_sizes(comm: Communicator) -> None:
    # 100,003 doubles take the other way than small arrays; the sum must be the same, bit for bit.
    for n in [0, 1, 31, 33, 100_003]:
        arrays = [rows_for(s, 2, n, (), "float64") for s in range(comm.size)]
        expected = arrays[0].copy()
        for other in arrays[1:]:
            expected += other
        np.testing.assert_array_equal(comm.allreduce(arrays[comm.rank]), expected)


def allreduce_of_a_number(comm: Communicator) -> None:
    total = comm.allreduce(comm.rank + 1)
    assert total.shape == ()
    assert int(total) == comm.size * (comm.size + 1) // 2


def broadcast_gives_the_array_of_the_root(comm: Communicator) -> None:
    for root in range(comm.size):
        for dtype in ("float32", "uint64", "bool"):
            for shape in [(), (0,), (3,), (2, 5)]:
                arrays = [
                    np.asarray(rows_for(s, root, 1, shape, dtype)[0]) for s in range(comm.size)
                ]
                got = comm.broadcast(arrays[comm.rank], root)
                assert got.shape == shape
                np.testing.assert_array_equal(got, arrays[root])


def barrier_returns(comm: Communicator) -> None:
    for _ in range(3):
        comm.barrier()


def threads_of_a_rank_take_turns(comm: Communicator) -> None:
    """Each of two threads makes the same calls, so any order of theirs is the same on all ranks."""
    totals = []

    def run(number: int) -> None:
        for _ in range(40):
            totals.append(int(comm.allreduce(np.full(10_000, comm.rank + 1, np.int64))[-1]))

    run_threads(run, 2)
    assert totals == [comm.size * (comm.size + 1) // 2] * 80


def notes_of_a_rank_are_on_all_after_any_collective(comm: Communicator) -> None:
    notes, sizes = comm.connection.notes, np.full(comm.size, 20_000, np.int32)
    collectives = (
        lambda: comm.alltoallv(np.zeros(sizes.sum()), sizes),  # through memory
        lambda: comm.alltoallv(np.zeros(0), np.zeros(comm.size, np.int32)),
        lambda: comm.allgatherv(np.arange(comm.rank)),
        lambda: comm.allreduce(1),
        comm.barrier,
    )
    try:
        for collective in collectives if comm.size > 1 else ():
            for rank in range(comm.size):
                notes.mine, notes.ends = (6, True) if comm.rank == rank else (2 * comm.rank, False)
                collective()
                others = [2 * other for other in range(comm.size) if other != rank]
                assert notes.of_all == functools.reduce(operator.or_, others, 7), collective
                notes.mine, notes.ends = 0, False
                collective()
                assert notes.of_all == 0, collective
    finally:
        notes.mine, notes.ends = 0, False


def wrong_arguments_raise_on_the_rank_alone(comm: Communicator) -> None:
    """Only one rank makes the mistake; all ranks can still talk afterwards."""
    if comm.rank == comm.size - 1:
        rows, zero, size = np.zeros((4, 2)), np.zeros(comm.size, np.int32), comm.size
        bad_sum, negative = zero.copy(), zero.copy()
        bad_sum[0] = 3
        negative[0], negative[-1] = -1, 5 if size > 1 else -1
        with pytest.raises(ValueError, match=r"must sum to the number of rows.*\(4, 2\).*sum 3"):
            comm.alltoallv(rows, bad_sum)
        with pytest.raises(ValueError, match=r"0 to 2147483647 rows a rank.*-1"):
            comm.alltoallv(rows, negative)
        with pytest.raises(ValueError, match=rf"shape \({size},\).*\({size + 1},\)"):
            comm.alltoallv(rows, np.zeros(size + 1, np.int32))
        with pytest.raises(TypeError, match="must be integers.*float64"):
            comm.alltoallv(rows, zero.astype(float))
        with pytest.raises(ValueError, match="at least one dimension"):
            comm.alltoallv(np.float32(3), zero)
        with pytest.raises(ValueError, match="at least one dimension"):
            comm.allgatherv(3)
        with pytest.raises(TypeError, match="complex64"):
            comm.allgatherv(np.zeros(3, np.complex64))
        with pytest.raises(TypeError, match="dtype=<U1"):
            comm.allreduce("a")
        with pytest.raises(ValueError, match="'max', 'min', 'sum'.*'mean'"):
            comm.allreduce(rows, "mean")
        with pytest.raises(ValueError, match="cannot sum booleans"):
            comm.allreduce(np.ones(3, bool))
        with pytest.raises(ValueError, match=rf"root={size}"):
            comm.broadcast(rows, size)
    check_alltoallv(comm, uneven(comm, 5))


FACTS = [
    alltoallv_carries_every_dtype,
    alltoallv_carries_rows_of_any_shape,
    alltoallv_of_awkward_sizes,
    alltoallv_of_nothing,
    alltoallv_with_a_rank_that_has_nothing,
    alltoallv_takes_strided_rows,
    alltoallv_takes_recv_splits_that_are_known,
    received_rows_may_be_written,
    sent_rows_may_be_written_after_the_call,
    allgatherv_gives_all_rows_in_rank_order,
    allgatherv_of_nothing,
    allreduce_of_every_dtype,
    allreduce_of_awkward_sizes,
    allreduce_of_a_number,
    broadcast_gives_the_array_of_the_root,
    barrier_returns,
    threads_of_a_rank_take_turns,
    notes_of_a_rank_are_on_all_after_any_collective,
    wrong_arguments_raise_on_the_rank_alone,
]
