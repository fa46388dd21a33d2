"""Keys of other ranks: refused where an update or a program would give them a row, or save two."""

import re

import numpy as np
import pytest

from sok_lite.comm import run_ranks
from sok_lite.engine.foreign_keys import (
    ForeignKeysError,
    RankInfo,
    refuse_foreign_write,
    refuse_keys_on_several_ranks,
)
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.owner import HASH, MOD, AlsoLocal, FunctionOfKeys, OneRank
from tests.engine.test_update import rows_of
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_updates, prepared_updates

BY_TENS = FunctionOfKeys("by tens", lambda keys, ranks: keys // 10 % ranks)


def step(table, keys, place, **options):
    grads = np.ones((len(keys), table.dim), np.float32)
    update = update_of(table, SGD(), np.array(keys), grads)
    apply_updates([update._replace(**options)], 1.0, 1, rank_info=place)


@pytest.mark.parametrize(("rank", "foreign", "owner"), [(0, 7, 1), (1, -4, 0)])
def test_those_of_other_ranks_are_refused_before_anything_changes(backend, rank, foreign, owner):
    good, bad = new_table(backend, 1, "hbm"), new_table(backend, 1, "hbm", name="bad")
    mine = [rank, rank + 2]
    step(bad, mine[:1], RankInfo(rank, 2))
    before = rows_of(bad)
    updates = [
        update_of(table, SGD(), np.array(keys), np.ones((len(keys), 1), np.float32))
        for table, keys in ((good, mine), (bad, [*mine, foreign]))
    ]
    text = f"1 of 3 keys of the gradient of table 'bad'.*, {rank}, .* key {foreign} of rank {owner}"
    for take in (prepared_updates, apply_updates):
        with pytest.raises(ForeignKeysError, match=text):
            take(updates, 1.0, 2, rank_info=RankInfo(rank, 2))
    assert rows_of(good) == {}
    assert rows_of(bad) == before


def test_those_that_have_a_row_are_updated(backend):
    """As a lookup on one rank alone may have made it."""
    table = new_table(backend, 1, "hbm")
    step(table, [1, 2], None)
    before = rows_of(table)
    step(table, [2, 1], RankInfo(0, 2))
    assert {key: row[0] - 1 for key, row in before.items()} == {
        key: row[0] for key, row in rows_of(table).items()
    }


def test_of_a_gradient_that_is_as_it_was_given_nobody_asks(backend):
    table = new_table(backend, 1, "hbm")
    step(table, [1], RankInfo(0, 2), of_gradient=True)
    assert sorted(rows_of(table)) == [1]


def test_unsigned_keys_are_named_as_such(backend):
    table = new_table(backend, 1, "hbm", key_type="uint64")
    with pytest.raises(ForeignKeysError, match=f"key {2**64 - 1} of rank 1"):
        step(table, np.array([2**64 - 1], np.uint64), RankInfo(0, 2))


# ---------------------------------------------------------------- rows that a program writes


def write(table, keys, place):
    device = table.backend.from_host(np.array(keys, table.key_dtype.dtype))
    refuse_foreign_write(table, device, place, "A write")


@pytest.mark.parametrize("owner", [MOD, HASH, OneRank(1), BY_TENS], ids=lambda rule: rule.name)
@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_keys_of_other_ranks_are_not_written(backend, owner, key_type):
    table = new_table(backend, 1, "hbm", owner=owner, key_type=key_type)
    keys = np.arange(40)
    for rank in range(2):
        is_own = owner.owners(keys, 2) == rank
        write(table, keys[is_own], RankInfo(rank, 2))
        foreign = keys[~is_own]
        if not foreign.size:
            continue
        text = (
            f"{foreign.size} of 40 keys that A write is to write belong to other ranks than this "
            rf"one, {rank}\. Received: key {foreign[0]} of rank {1 - rank}; nothing was changed"
        )
        with pytest.raises(ForeignKeysError, match=text) as caught:
            write(table, keys, RankInfo(rank, 2))
        assert str(caught.value).endswith(f"{owner.advice}.")


def test_what_has_a_row_may_be_written(backend):
    table = new_table(backend, 1, "hbm")
    table.lookup([1, 3])  # as a lookup on one rank alone inserts them
    write(table, [0, 1, 3], RankInfo(0, 2))
    with pytest.raises(ForeignKeysError, match="1 of 4 keys .* key 5 of rank 1"):
        write(table, [0, 1, 3, 5], RankInfo(0, 2))


def test_a_table_that_is_local_too_takes_any_key(backend):
    write(new_table(backend, 1, "hbm", owner=AlsoLocal(MOD)), [0, 1], RankInfo(0, 2))


# ---------------------------------------------------------------- what is saved


def saving(backend, keys_of_rank, **options):
    """Returns what saving tables with these keys raises on each rank."""

    def save(comm):
        tables = [new_table(backend, 1, name="good"), new_table(backend, 1, **options)]
        tables[0].lookup([comm.rank])
        tables[1].lookup(keys_of_rank[comm.rank])
        try:
            refuse_keys_on_several_ranks(tables, comm, "A test")
        except ForeignKeysError as error:
            return str(error)
        return ""

    return run_ranks(len(keys_of_rank), save)


@pytest.mark.cases("text")
@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
@pytest.mark.parametrize(
    ("keys_of_rank", "text"),
    [
        ([range(6), range(6)], "6 keys of table 'it' .* key 0, of rank 0, on ranks 0, 1"),
        ([[0, 3], [1, 4], [2, 5, 3]], "1 keys of table 'it' .* key 3, of rank 0, on ranks 0, 2"),
        ([[0, 5], [1, 5], [2]], "1 keys of table 'it' .* key 5, of rank 2, on ranks 0, 1"),
        ([[0, 7, 5], [7, 1, 6], [2, 6]], "2 keys of table 'it' .* key 6, of rank 0, on ranks 1, 2"),
        ([[0, 4], [5, 7], []], ""),
    ],
)
def test_a_key_on_several_ranks_is_not_saved(backend, caplog, kind, keys_of_rank, text):
    raised = saving(backend, keys_of_rank, name="it", var_type=kind)
    if text:
        assert len(set(raised)) == 1 and re.search(f"A test must have .*{text}", raised[0])
    else:
        assert set(raised) == {""}


def test_the_logger_says_of_keys_that_no_lookup_finds(backend, caplog):
    assert set(saving(backend, [[0, 1, 5], [3], []], name="it")) == {""}
    lines = sorted(record.getMessage() for record in caplog.records)
    assert [line.split(":")[0] for line in lines] == [
        "Rank 0 has 2 keys of table 'it' that other ranks own, such as key 1 of rank 1",
        "Rank 1 has 1 keys of table 'it' that other ranks own, such as key 3 of rank 0",
    ]


def test_a_table_that_is_local_too_is_saved_as_it_is(backend, caplog):
    keys = [[0, 1, 2], [3, 2, 0]]
    assert set(saving(backend, keys, name="it", owner=AlsoLocal(MOD))) == {""}
    assert not caplog.records
