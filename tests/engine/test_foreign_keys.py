"""Keys of other ranks in an update: refused where they would get a row."""

import numpy as np
import pytest

from sok_lite.engine.foreign_keys import ForeignKeysError, RankInfo
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.owner import HASH, OneRank
from tests.engine.test_update import rows_of
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_updates, prepared_updates


def step(table, keys, place, **options):
    grads = np.ones((len(keys), table.dim), np.float32)
    update = update_of(table, SGD(), np.array(keys), grads)
    apply_updates([update._replace(**options)], 1.0, 1, rank_info=place)


def test_ones_own_keys_get_a_row(backend):
    table = new_table(backend, 1, "hbm")
    step(table, [0, -2, 4, 4], RankInfo(0, 2))
    assert sorted(rows_of(table)) == [-2, 0, 4]


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


def test_the_owner_is_the_tables(backend):
    table = new_table(backend, 1, "hbm", owner=OneRank(1))
    step(table, [0, 1], RankInfo(1, 2))
    with pytest.raises(ForeignKeysError, match="key 2 of rank 1"):
        step(table, [2], RankInfo(0, 2))
    table = new_table(backend, 1, "hbm", owner=HASH)
    keys = np.arange(20)
    mine = keys[HASH.owners(keys, 2) == 0]
    step(table, mine, RankInfo(0, 2))
    with pytest.raises(ForeignKeysError, match=f"{20 - len(mine)} of 20 keys"):
        step(table, keys, RankInfo(0, 2))


def test_of_a_gradient_that_is_as_it_was_given_nobody_asks(backend):
    table = new_table(backend, 1, "hbm")
    step(table, [1], RankInfo(0, 2), of_gradient=True)
    assert sorted(rows_of(table)) == [1]


def test_unsigned_keys_are_named_as_such(backend):
    table = new_table(backend, 1, "hbm", key_type="uint64")
    with pytest.raises(ForeignKeysError, match=f"key {2**64 - 1} of rank 1"):
        step(table, np.array([2**64 - 1], np.uint64), RankInfo(0, 2))
