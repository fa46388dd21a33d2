"""Facts of the exchange that hold on every rank of any communicator, for any number of ranks.

Every rank knows the keys of all ranks (they are a function of the rank), so it can say, with a few
lines of plain Python, what it must receive.
"""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import get_backend
from sok_lite.backend.ragged import split
from sok_lite.engine.exchange import AllToAllPlan, return_rows, send_grads, send_keys
from sok_lite.engine.owner import HASH, MOD, FunctionOfKeys, OneRank, OwnerRule

I64 = np.iinfo(np.int64)
EDGE_KEYS = [0, 1, -1, -2, -3, I64.min, I64.min + 1, I64.max, I64.max - 1]


class Table(NamedTuple):
    key_type: str
    dim: int
    row_dtype: str
    num_keys: int
    owner: str = "mod"


def by_tens(keys, size):
    """Owners by the tens of keys, for which the bits of uint64 must be unsigned."""
    tens = keys // keys.dtype.type(10)
    return (tens % keys.dtype.type(size)).astype(np.uint16)


BY_TENS = FunctionOfKeys("by tens", by_tens)
OWNERS = ["mod", "hash", "rank 0", "last rank", "by tens"]


def rule_of(owner: str, size: int) -> OwnerRule:
    """The rule that bears a name in these tests."""
    last = {"rank 0": OneRank(0), "last rank": OneRank(size - 1)}
    return {"mod": MOD, "hash": HASH, "by tens": BY_TENS, **last}[owner]


def python_hash(key: int) -> int:
    """MurmurHash3's finaliser in unbounded integers."""
    h = key % 2**64
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD % 2**64
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 % 2**64
    return h ^ (h >> 33)


def python_owner(key: int, size: int, key_type: str, owner: str = "mod") -> int:
    """Who owns an int64 key, in Python's unbounded integers, whose % is the floor mod."""
    if owner == "hash":
        return (python_hash(key) >> 32) * size >> 32
    if owner in ("rank 0", "last rank"):
        return 0 if owner == "rank 0" else size - 1
    key = key % 2**64 if key_type == "uint64" else key
    return (key // 10 if owner == "by tens" else key) % size


def keys_of(rank: int, number: int, table: Table, silent: int | None) -> np.ndarray:
    """Distinct int64 keys of a rank for a table; other ranks have many of them too."""
    if rank == silent:
        return np.zeros(0, np.int64)
    rng = np.random.default_rng([rank, number])
    edge = [3, 0, -3, -4] if table.key_type == "int32" else EDGE_KEYS
    drawn = [*edge, *rng.integers(-2 * table.num_keys, 2 * table.num_keys + 1, 2 * table.num_keys)]
    distinct = np.array(list(dict.fromkeys(int(key) for key in drawn)), np.int64)
    return rng.permutation(distinct)[: table.num_keys]


def row_of(key: int, number: int, dim: int, dtype: str) -> np.ndarray:
    """The row of a key: small whole numbers that float16 holds."""
    return ((key % 97) * 7 + number + np.arange(dim)).astype(dtype)


def grad_of(rank: int, key: int, number: int, dim: int) -> np.ndarray:
    return (rank * 1000 + key % 89 + 0.5 * number + np.arange(dim)).astype(np.float32)


def expected_keys(rank, size, number, table, silent) -> list[tuple[int, int]]:
    """(sender, key) of every key that this rank must receive, in order."""
    return [
        (sender, int(key))
        for sender in range(size)
        for key in keys_of(sender, number, table, silent)
        if python_owner(int(key), size, table.key_type, table.owner) == rank
    ]


def stacked(rows, dim, dtype):
    return np.array(rows, dtype).reshape(len(rows), dim)


def send(backend, comm, keys, key_types, rules=None, tag=0):
    """`send_keys` of an array for each table; the received keys cut into tables again."""
    together = np.concatenate([np.zeros(0, np.int64), *keys])
    sizes = [len(each) for each in keys]
    rules = [MOD] * len(keys) if rules is None else rules
    received, plan = send_keys(
        backend, comm, backend.from_host(together), sizes, key_types, rules, tag
    )
    return split(received, plan.num_received), plan


def round_trip(comm, tables, silent=None, backend=None, repack=False):
    """Checks all three trips of one lookup."""
    backend = backend or get_backend("cpu")
    mine = [keys_of(comm.rank, i, table, silent) for i, table in enumerate(tables)]
    rules = [rule_of(t.owner, comm.size) for t in tables]
    recv_keys, plan = send(backend, comm, mine, [t.key_type for t in tables], rules)
    expected = [
        expected_keys(comm.rank, comm.size, i, table, silent) for i, table in enumerate(tables)
    ]
    for keys, pairs in zip(recv_keys, expected, strict=True):
        assert keys.dtype == np.int64
        np.testing.assert_array_equal(
            backend.to_host(keys), np.array([key for _, key in pairs], np.int64)
        )
    if repack:
        assert plan.numbers.dtype == np.int64
        plan = AllToAllPlan.restore(backend, comm, plan.numbers, plan.order, plan.num_sent)

    served = [
        stacked([row_of(k, i, t.dim, t.row_dtype) for _, k in pairs], t.dim, t.row_dtype)
        for i, (t, pairs) in enumerate(zip(tables, expected, strict=True))
    ]
    rows = return_rows(plan, [backend.from_host(rows) for rows in served])
    for i, (got, table, keys) in enumerate(zip(rows, tables, mine, strict=True)):
        want = [row_of(int(key), i, table.dim, table.row_dtype) for key in keys]
        assert got.dtype == np.dtype(table.row_dtype)
        np.testing.assert_array_equal(
            backend.to_host(got), stacked(want, table.dim, table.row_dtype)
        )

    mine_grads = [
        stacked([grad_of(comm.rank, int(k), i, t.dim) for k in keys], t.dim, np.float32)
        for i, (t, keys) in enumerate(zip(tables, mine, strict=True))
    ]
    grads = send_grads(plan, [backend.from_host(g) for g in mine_grads])
    for i, (got, table, pairs) in enumerate(zip(grads, tables, expected, strict=True)):
        want = [grad_of(sender, key, i, table.dim) for sender, key in pairs]
        np.testing.assert_array_equal(backend.to_host(got), stacked(want, table.dim, np.float32))


def one_table(comm, backend=None):
    for num_keys in [0, 1, 31, 33, 1000]:
        round_trip(comm, [Table("int64", 5, "float32", num_keys)], backend=backend)


def many_keys(comm, backend=None):
    rng = np.random.default_rng(comm.rank)
    backend = backend or get_backend("cpu")
    keys = rng.permutation(400_000)[:100_003].astype(np.int64) - 200_000
    (recv_keys,), plan = send(backend, comm, [keys], ["int64"])
    assert (backend.to_host(recv_keys) % comm.size == comm.rank).all()
    served = backend.to_host(recv_keys)[:, None] * np.array([1, -1]).astype(np.float32)
    (rows,) = return_rows(plan, [backend.from_host(served.astype(np.float32))])
    np.testing.assert_array_equal(
        backend.to_host(rows), (keys[:, None] * np.array([1, -1])).astype(np.float32)
    )


def several_tables_of_different_dims_and_dtypes(comm, backend=None):
    tables = [
        Table("int64", 4, "float32", 33),
        Table("int32", 7, "float16", 31),
        Table("uint64", 4, "float32", 40),
        Table("int64", 1, "uint16", 1),
        Table("uint64", 4, "float16", 0),
        Table("int64", 3, "float64", 12),
        Table("int64", 7, "float16", 100),
        Table("int32", 3, "uint8", 20),
    ]
    round_trip(comm, tables, backend=backend)
    round_trip(comm, tables, backend=backend, repack=True)


def tables_of_one_format_share_a_trip(comm, backend=None):
    tables = [Table("int64", 4, "float32", n) for n in (0, 33, 1, 100)]
    round_trip(comm, tables, backend=backend)


def a_rank_with_no_keys(comm, backend=None):
    tables = [Table("int64", 4, "float32", 33), Table("uint64", 2, "float16", 20)]
    for silent in range(comm.size):
        round_trip(comm, tables, silent, backend=backend)


def no_tables_at_all(comm, backend=None):
    round_trip(comm, [], backend=backend)


def tables_with_owners_of_their_own(comm, backend=None):
    formats = [("int64", 4, "float32"), ("uint64", 3, "float16"), ("int32", 7, "float32")]
    tables = [
        Table(*formats[i % 3], (33, 0, 100, 1)[i % 4], OWNERS[i % 5]) for i in range(2 * 3 * 5)
    ]
    round_trip(comm, tables, backend=backend, repack=True)
    round_trip(comm, tables, comm.size - 1, backend=backend)  # the owner of some wants nothing
    for owner in OWNERS:
        round_trip(comm, [Table("uint64", 2, "float32", 200, owner)], backend=backend)
        of_one_rule = [Table(*each, 50, owner) for each in formats]
        round_trip(comm, of_one_rule, backend=backend)


def tables_on_one_rank_each(comm, backend=None):
    tables = [Table("int64", 4, "float32", 40, OWNERS[2 + i % 2]) for i in range(5)]
    round_trip(comm, tables, backend=backend)


FACTS = [
    one_table,
    many_keys,
    several_tables_of_different_dims_and_dtypes,
    tables_of_one_format_share_a_trip,
    a_rank_with_no_keys,
    no_tables_at_all,
    tables_with_owners_of_their_own,
    tables_on_one_rank_each,
]
