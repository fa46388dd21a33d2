"""`TableMetrics(every=N)` on several ranks: sums, the busiest rank, and one `every` for all."""

import logging

import numpy as np
import pytest

keras = pytest.importorskip("keras")
sk = pytest.importorskip("sok_lite.keras")


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
    assert ("sent_bytes_per_step" in told[0]) == (comm.size > 1)
    assert float(told[0].split("seconds_per_step ")[1].split(",")[0]) > 0
    if comm.size == 2:
        assert len(table) == 16 and "item/keys_of_busiest_rank 16," in told[0]


def test_another_every_on_one_rank_is_an_error_on_all(comm):
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    with pytest.raises(ValueError, match="`every` of TableMetrics must be the same on all ranks"):
        fit(comm, sk.TableMetrics(every=2 + comm.rank))


def test_bytes_that_go_to_other_ranks_are_counted(comm):
    import tensorflow as tf

    import sok_lite as sok
    from sok_lite.engine.work_counters import SENT_GRADIENTS, SENT_KEYS, SENT_ROWS

    table = sok.DynamicVariable(4, name="sent")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    kinds = (SENT_KEYS, SENT_ROWS, SENT_GRADIENTS)
    before = [work.num_bytes for work in kinds]
    ids = tf.RaggedTensor.from_row_lengths(
        tf.range(64 * comm.size, dtype=tf.int64), [64] * comm.size
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    keys, rows, gradients = (w.num_bytes - b for w, b in zip(kinds, before, strict=True))
    # 64 keys for each other rank, and as many rows of 4 float32; a message has a head of 24 bytes.
    others = comm.size - 1
    assert rows == gradients == others * 64 * 16
    assert keys in (others * (64 * 8 + 24), others * 64 * 8)
    assert f'content="rows"}} {SENT_ROWS.num_bytes}' in sok.metrics.prometheus(table)
