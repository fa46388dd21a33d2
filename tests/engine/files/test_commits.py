"""A job goes on from its last commit, whatever ranks have left it and come to it."""

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.engine.files.commits import Commits, backup_ranks
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.owner import HASH
from tests.support.filled_tables import HYBRID, all_of, held_by, rows_of, some_keys
from tests.support.helpers import new_table, sized

CPU = get_backend("cpu")
KINDS = {
    "hbm": {"var_type": "hbm", "owner": HASH},
    "kLru": HYBRID | {"evict_strategy": "kLru", "dtype": "bfloat16", "key_type": "uint64"},
    "sightings": HYBRID | {"evict_strategy": "kLfu", "enter_threshold": 2},
}


class Process:
    """A rank of a job, which may become another rank of another one: its tables and commits."""

    def __init__(self, backend, folder=None):
        self.tables = [
            new_table(backend, 3, name=name, **options) for name, options in KINDS.items()
        ]
        self.commits = Commits(self.tables, folder)

    def fill(self, comm, n, seed):
        """Gives each table rows and states of some keys, of which this rank takes its own."""
        for i, table in enumerate(self.tables):
            kind = table.key_dtype.name
            keys = some_keys(n + i, kind, seed + i)
            rows, states = (
                rows_of(n + i, 3, table.row_dtype.name, seed),
                rows_of(n + i, 3, seed=seed + 7),
            )
            own = self.owners(table, keys, comm.size) == comm.rank
            from_host = table.backend.from_host
            table.insert_or_assign(keys[own], from_host(rows[own]))
            ensure_state(table.store, "m", 0.25)
            table.assign_state("m", keys[own], from_host(states[own]))
            # Seen once, which is not enough for a row everywhere.
            others = keys[:15] ^ keys.dtype.type(1 << 20)
            table.lookup(others[self.owners(table, others, comm.size) == comm.rank])

    @staticmethod
    def owners(table, keys, size):
        kind = table.key_dtype
        return table.owner.owners(kind.to_int64(np, keys), size, kind.name)

    def expected(self, n, seed):
        """What `fill` has given each table on all ranks."""
        found = []
        for i, table in enumerate(self.tables):
            keys = some_keys(n + i, table.key_dtype.name, seed + i)
            rows = rows_of(n + i, 3, table.row_dtype.name, seed)
            found.append(held_by(keys, rows, rows_of(n + i, 3, seed=seed + 7)))
        return found


def content(table):
    keys, rows = map(table.backend.to_host, table.export())
    return held_by(keys, rows, table.backend.to_host(table.read_state("m", keys)))


def go_on(processes):
    """Lets processes be the ranks of a job that go on from the last commit."""
    return run_ranks(len(processes), lambda comm: processes[comm.rank].commits.restore(comm))


def check_owners(processes):
    for rank, process in enumerate(processes):
        for table in process.tables:
            keys = table.backend.to_host(table.export()[0])
            assert (process.owners(table, keys, len(processes)) == rank).all()


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize(
    ("size", "then"),
    [
        # The numbers of processes that go on, and - for new ones.
        *((3, "20"), (3, "0-2"), (2, "1-0-"), (4, "20"), (1, "0--")),
    ],
)
def test_a_job_goes_on_with_other_ranks(backend, tmp_path, size, then, on_disk):
    if sized(backend, False, (size, then) != (3, "0-2")):
        pytest.skip("one case of this is enough where kernels are slow")
    n, folder = sized(backend, 300, 20), str(tmp_path / "commits") if on_disk else None
    processes = [Process(backend, folder) for _ in range(size)]

    def work(comm):
        process = processes[comm.rank]
        assert process.commits.restore(comm) is None
        process.fill(comm, 15, seed=70)
        process.commits.make(comm, b"before")
        process.fill(comm, n, seed=3)
        dump(tmp_path / "oracle", process.tables, comm)
        process.commits.make(comm, b"x" * 100)
        process.fill(comm, n, seed=5)
        process.tables[0].clear()

    run_ranks(size, work)
    processes = [Process(backend, folder) if i == "-" else processes[int(i)] for i in then]
    assert go_on(processes) == [b"x" * 100] * len(then)
    check_owners(processes)
    twins = [Process(backend) for _ in then]
    run_ranks(len(then), lambda comm: load(tmp_path / "oracle", twins[comm.rank].tables, comm))
    keeps_places = len(then) == size
    for process, twin in zip(processes, twins, strict=True):
        for table, other in zip(process.tables, twin.tables, strict=True):
            assert all_of(table, keeps_places) == all_of(other, keeps_places)
    for i, expected in enumerate(processes[0].expected(n, seed=3)):
        merged = {}
        for process in processes:
            merged |= content(process.tables[i])
        assert expected.items() <= merged.items()
    # And once more, before another commit was made; then after one.
    assert go_on(processes[::-1]) == [b"x" * 100] * len(then)

    def next_one(comm):
        processes[comm.rank].commits.restore(comm)  # as this rank: it was another one
        processes[comm.rank].fill(comm, n, seed=9)
        processes[comm.rank].commits.make(comm, b"y")

    run_ranks(len(then), next_one)
    assert go_on([*processes, Process(backend, folder)]) == [b"y"] * (len(then) + 1)


@pytest.mark.parametrize("left", ["1", "2"])
def test_a_part_that_nobody_has_is_an_error(left):
    processes = [Process(CPU) for _ in range(3)]

    def work(comm):
        processes[comm.rank].fill(comm, 40, seed=1)
        processes[comm.rank].commits.make(comm, b"")

    run_ranks(3, work)
    going_on = [processes[int(left)], Process(CPU)]
    before = [content(table) for table in going_on[0].tables]
    lost = {"1": "2", "2": "0"}[left]  # each rank has a copy of the one before it
    with pytest.raises(RuntimeError, match=rf"of 3 ranks the parts of {lost} are lost.*path"):
        go_on(going_on)
    assert [content(table) for table in going_on[0].tables] == before


@pytest.mark.full_only("a commit for each message in which a rank may die")
@pytest.mark.parametrize(("late", "on_disk"), [(0, False), (2, False), (2, True)])
def test_whenever_a_rank_dies_there_is_a_whole_commit(tmp_path, late, on_disk):
    """Rank 1 dies in its 1st, 2nd, ... message of a commit; the others go on together.

    What it has sent has reached one of them, and not the one that is `late`.
    """
    found = set()
    for number in range(1, 100, 5 if on_disk else 3):
        folder = str(tmp_path / str(number)) if on_disk else None
        processes = [Process(CPU, folder) for _ in range(3)]
        is_over = _commit_twice(processes, number, late)
        going_on = [processes[2], Process(CPU, folder), processes[0]]
        values = set(go_on(going_on))
        assert len(values) == 1
        found |= values
        check_owners(going_on)
        last = 1 if values == {b"old"} else 2
        for i, expected in enumerate(going_on[0].expected(30, seed=last)):
            merged = {}
            for process in going_on:
                merged |= content(process.tables[i])
            assert expected.items() <= merged.items()
            newer = going_on[0].expected(30, seed=2)[i].keys() - expected.keys()
            assert not newer & merged.keys()
        if is_over:
            break
    assert is_over
    assert found == {b"old", b"new"}


def _commit_twice(processes, number, late):
    """Whether the second commit has fewer messages than that of which rank 1 dies."""
    is_over = []

    def work(comm):
        process, meet = processes[comm.rank], comm._meet
        process.fill(comm, 30, seed=1)
        process.commits.make(comm, b"old")
        process.fill(comm, 30, seed=2)
        left = iter(range(number - 1))

        def dying(call, item):
            items = meet(call, item)
            if comm.rank in (1, late) and next(left, None) is None:
                raise CommunicatorError("rank 1 has died")
            return items

        comm._meet = dying
        process.commits.make(comm, b"new")
        is_over.append(comm.rank)
        raise CommunicatorError("rank 1 has died")

    with pytest.raises(CommunicatorError):
        run_ranks(3, work)
    return 1 in is_over


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([7], [None]),
        ([7, 7, 7], [1, 2, 0]),
        ([1, 1, 2, 2], [2, 3, 0, 1]),
        ([1, 1, 1, 2], [3, 3, 3, 0]),
        ([1, 2, 3], [1, 2, 0]),
        ([1, 1, 2, 2, 3, 3], [2, 3, 4, 5, 0, 1]),
    ],
)
def test_a_copy_is_kept_on_another_machine_where_there_is_one(machines, expected):
    assert backup_ranks(machines) == expected


def test_a_checkpoint_of_another_job_is_no_commit_of_this_one(tmp_path):
    """Not where the first commit was not made, nor where somebody wrote into the folder since."""
    folder = str(tmp_path / "commits")
    earlier = [Process(CPU, folder) for _ in range(2)]
    run_ranks(2, lambda comm: earlier[comm.rank].commits.make(comm, b"earlier"))
    processes = [Process(CPU, folder) for _ in range(2)]

    def dying(comm):
        meet = comm._meet

        def dies_in_dump(call, item):
            if call.startswith("dump "):
                raise CommunicatorError("rank 1 has died")
            return meet(call, item)

        comm._meet = dies_in_dump
        processes[comm.rank].commits.make(comm, b"first")

    with pytest.raises(CommunicatorError):
        run_ranks(2, dying)
    assert go_on(processes) == [None, None]

    def work(comm):
        processes[comm.rank].commits.make(comm, b"")
        dump(folder, processes[comm.rank].tables, comm)

    run_ranks(2, work)
    with pytest.raises(RuntimeError, match="no commit of this job"):
        go_on(processes)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_key_on_several_ranks_is_not_committed(tmp_path, on_disk):
    folder = str(tmp_path / "commits") if on_disk else None
    processes = [Process(CPU, folder) for _ in range(2)]

    def work(comm):
        process = processes[comm.rank]
        process.fill(comm, 20, seed=1)
        process.commits.make(comm, b"one")
        process.tables[0].lookup([12345])  # on each rank by itself
        with pytest.raises(ValueError, match="A .* must have each key once.* key 12345, of rank"):
            process.commits.make(comm, b"two")

    run_ranks(2, work)
    assert go_on(processes) == [b"one", b"one"]
