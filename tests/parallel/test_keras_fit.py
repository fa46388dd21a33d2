"""`fit` over real ranks, against a dense model that one rank trains on the batches of all."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite.keras
from sok_lite.bridge import job
from sok_lite.bridge.collectives import allgather
from sok_lite.comm.single import SingleCommunicator

DIM, NUM_KEYS, FIELDS, BATCH = 3, 40, 4, 8
RNG = np.random.default_rng(0)
X = RNG.integers(0, NUM_KEYS, (43, FIELDS))  # five batches, and 3 samples that 2 ranks cut to 2
Y = RNG.normal(size=(43, 1)).astype(np.float32)
ROWS = RNG.normal(size=(NUM_KEYS, DIM)).astype(np.float32)


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if the program had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    return pytest.importorskip(request.param)


@pytest.fixture
def sk(keras):
    return sok_lite.keras.classes_for(keras)


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def with_table(comm, keras, sk, seed=7):
    keras.utils.set_random_seed(seed + comm.rank)
    table = sk.Table("ranks", DIM)
    own = np.arange(comm.rank, NUM_KEYS, comm.size)
    table.assign(own, ROWS[own])
    ids = keras.Input([FIELDS], dtype="int64")
    rows = sk.Embedding(table, "mean")(ids)
    hidden = keras.layers.Dense(5, "relu")(rows)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model, table


def with_dense(comm, keras):
    """The same model on the batches of all ranks, with the dense weights of rank 0."""
    keras.utils.set_random_seed(7)
    ids = keras.Input([FIELDS], dtype="int64")
    one_hot = keras.layers.CategoryEncoding(NUM_KEYS, "count")(ids)
    rows = keras.layers.Dense(DIM, use_bias=False)
    x = keras.layers.Rescaling(1 / FIELDS)(one_hot)
    hidden = keras.layers.Dense(5, "relu")
    head = keras.layers.Dense(1)
    model = keras.Model(ids, head(hidden(rows(x))))
    rows.set_weights([ROWS])
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model, rows, [hidden, head]


def weights_of(layers):
    return [each for layer in layers for each in layer.get_weights()]


def test_ranks_train_as_one_rank_on_all_batches(comm, keras, sk):
    model, table = with_table(comm, keras, sk)
    theirs, rows, dense = with_dense(comm, keras)
    callbacks = [sk.AllRanks()]
    first = [np.array(comm.broadcast(each)) for each in weights_of(model.layers[-2:])]
    for layer, at in ((dense[0], 0), (dense[1], 2)):
        layer.set_weights(first[at : at + 2])
    whole = batches().map(lambda x, y: (x[: len_of(x, comm)], y[: len_of(x, comm)]))
    expected = theirs.fit(whole, epochs=3, verbose=0).history["loss"]
    part = sok_lite.keras.shard(batches())
    found = model.fit(part, epochs=3, verbose=0, callbacks=callbacks).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    for ours, other in zip(weights_of(model.layers[-2:]), weights_of(dense), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-4)
        np.testing.assert_array_equal(ours, comm.broadcast(np.array(ours)))  # to the bit
    keys, values = (each.numpy() for each in table.export())
    assert (keys % comm.size == comm.rank).all() and len(keys) > 5
    np.testing.assert_allclose(values, rows.get_weights()[0][keys], atol=1e-4)


def len_of(x, comm):
    return tf.shape(x)[0] // comm.size * comm.size


def test_saved_by_all_ranks(comm, keras, sk, folder):
    model, table = with_table(comm, keras, sk)
    part = sok_lite.keras.shard(batches())
    path = f"{folder}/{keras.__name__}.keras"
    kept = keras.callbacks.ModelCheckpoint(path)
    model.fit(part, verbose=0, callbacks=[sk.AllRanks(), kept])
    loaded = keras.models.load_model(path)
    again = loaded.layers[1].tables["ranks"]
    for one, other in zip(again.export(), table.export(), strict=True):
        np.testing.assert_array_equal(one, other)
    model.fit(part, verbose=0, callbacks=[sk.AllRanks()])
    loaded.fit(part, verbose=0, callbacks=[sk.AllRanks()])
    for one, other in zip(again.export(), table.export(), strict=True):
        np.testing.assert_array_equal(one, other)
    loaded.save(path)
    keys, rows = again.export()
    of_all = allgather(tf.concat([tf.cast(keys, tf.float32)[:, None], rows], 1)).numpy()
    of_all = of_all[np.argsort(of_all[:, 0])]
    with pytest.MonkeyPatch.context() as patch:  # every rank by itself, as a job of one
        patch.setattr(job, "_communicator", SingleCommunicator())
        alone = keras.models.load_model(path)
        found = np.column_stack(alone.layers[1].tables["ranks"].export())
        np.testing.assert_array_equal(found, of_all)
        own = f"{folder}/{keras.__name__}_{comm.rank}.keras"
        alone.save(own)
    table = keras.models.load_model(own).layers[1].tables["ranks"]
    for one, other in zip(again.export(), table.export(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_ranks_that_differ_are_told_before_training(comm, keras, sk):
    if comm.size == 1:
        pytest.skip("one rank")
    model, table = with_table(comm, keras, sk)
    with pytest.raises(ValueError, match="must be equal on all ranks before training"):
        model.fit(sok_lite.keras.shard(batches()), verbose=0)
    mine = batches().take(3 + comm.rank)
    with pytest.raises(ValueError, match=r"as many steps.*\[3, 4"):
        model.fit(mine, verbose=0, callbacks=[sk.AllRanks()])
    assert len(table.export()[0]) == len(range(comm.rank, NUM_KEYS, comm.size))


def test_metrics_of_an_epoch_are_those_of_all_ranks(comm, keras, sk):
    model, _ = with_table(comm, keras, sk)
    part = sok_lite.keras.shard(batches())
    callbacks = [sk.AllRanks(), sk.TableMetrics()]
    logs = model.fit(part, validation_data=part, verbose=0, callbacks=callbacks).history
    for name in ("loss", "val_loss"):
        assert logs[name] == comm.broadcast(np.array(logs[name])).tolist()
    assert logs["ranks/keys"] == [len(range(comm.rank, NUM_KEYS, comm.size))]
