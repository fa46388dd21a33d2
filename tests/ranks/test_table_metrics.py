"""`TableMetrics(every=N)` on several ranks: sums, the busiest rank, and one `every` for all."""

import logging

import numpy as np
import pytest

keras = pytest.importorskip("keras")
sk = pytest.importorskip("sok_lite.keras")


@pytest.fixture(autouse=True)
def joined():
    """`fit` needs the job's own communicator."""
    import sok_lite as sok

    sok.init()


def fit(comm, callback):
    table = sk.Table("item", 2)
    ids = keras.Input([], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    model.compile("sgd", "mse")
    # Twice as many even keys as odd ones, so that rank 0 of two has more.
    x = np.where(np.arange(24) % 3 == 2, np.arange(24) * 2 + 1, np.arange(24) * 2)
    callbacks = [sk.AllRanks(), callback]
    model.fit(x, np.zeros([24, 1]), 6, shuffle=False, verbose=0, callbacks=callbacks)
    return table


def test_rank_0_tells_the_numbers_of_all(comm, caplog):
    with caplog.at_level(logging.INFO, "sok_lite"):
        table = fit(comm, sk.TableMetrics(every=4))
    told = [line for line in caplog.messages if line.startswith("step ")]
    if comm.rank:
        assert told == []
        return
    assert len(told) == 1 and told[0].startswith("step 4: item/keys 24,")
    if comm.size == 2:
        assert len(table) == 16 and "item/keys_of_busiest_rank 16," in told[0]


def test_another_every_on_one_rank_is_an_error_on_all(comm):
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    with pytest.raises(ValueError, match="`every` of TableMetrics must be the same on all ranks"):
        fit(comm, sk.TableMetrics(every=2 + comm.rank))
