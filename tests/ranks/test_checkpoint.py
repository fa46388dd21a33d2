"""`Checkpoint` over real ranks: each goes on with what it had, and others with what all had."""

import os

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.bridge.variable import TableVariable
from sok_lite.comm.protocol import RanksDifferError
from sok_lite.comm.single import SingleCommunicator
from tests.support.datasets import batched
from tests.support.stopping import Stop, stopping

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 50, (23, 3)), RNG.normal(size=(23, 1)).astype(np.float32)


IN_TURN = "comm"


@pytest.fixture(autouse=True)
def seeds():
    """Takes back the seeds of a rank, which tables of other tests would take."""
    yield
    tf.random.set_seed(None)


def made(keras, sk, seed=1):
    keras.utils.set_random_seed(seed)
    ids = keras.Input([3], dtype="int64")
    x = sk.Embedding(sk.Table("rows", 2), "mean")(ids)
    x = keras.layers.BatchNormalization()(keras.layers.Dense(4)(x))  # its averages are a rank's own
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


def fit(model, sk, *callbacks):
    batches = sk.shard(batched((X, Y), 8))
    model.fit(batches, epochs=2, callbacks=[sk.AllRanks(), *callbacks], verbose=0)


def everything(model):
    table = next(each for each in model.trainable_weights if isinstance(each, TableVariable))
    saved = table.saved_tensors()
    found = {part: saved[part].numpy() for part in ("keys", "values", "states")}
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    optimizer = model.optimizer.variables
    variables = [*model.variables, *(optimizer() if callable(optimizer) else optimizer)]
    dense = [v for v in variables if not isinstance(v, TableVariable) and id(v) not in metrics]
    return found | {f"dense {i}": tf.convert_to_tensor(v).numpy() for i, v in enumerate(dense)}


# With each Keras in every way on one rank: tests/keras/test_checkpoint.py.
@pytest.mark.full_only("fits three models on two ranks; that one rank goes on is the smoke")
@pytest.mark.parametrize(
    ("keras", "scheme", "options"),
    [
        ("keras", "", {"every": 1}),
        ("tf_keras", "", {"every": 2, "background": True}),
        ("keras", "local://", {"every": 1}),
    ],
    indirect=["keras"],
)
def test_each_rank_goes_on_with_what_it_had(comm, folder, keras, sk, monkeypatch, scheme, options):
    if scheme:  # a store to fsspec, whose files all ranks see
        pytest.importorskip("fsspec")
        monkeypatch.setenv("SOK_LITE_STORES", str(folder / "stores"))
    path = f"{scheme}{folder}/all"
    whole, broken, again = made(keras, sk), made(keras, sk), made(keras, sk, seed=2)
    fit(whole, sk)
    with pytest.raises(Stop):
        fit(broken, sk, sk.Checkpoint(path, **options), stopping(keras, 5))
    fit(again, sk, sk.Checkpoint(path, **options))
    expected, found = everything(whole), everything(again)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    names = sorted(path.name for path in (folder / "all").glob("step-*"))
    assert scheme or os.readlink(folder / "all" / "latest") == names[-1]


@pytest.mark.full_only("fits three models once more")
def test_one_rank_goes_on_with_what_all_had(comm, folder, keras, sk, monkeypatch):
    model = made(keras, sk)
    fit(model, sk, sk.Checkpoint(folder / "all"))
    keys, rows = next(iter(model.layers[1].tables.values())).export()
    parts = [part.reshape(-1) for part in (keys.numpy(), rows.numpy())]
    (all_keys, all_rows) = (
        np.concatenate(list(comm.allgatherv(part, call="test").by_rank())) for part in parts
    )
    monkeypatch.setattr(job, "_communicator", SingleCommunicator())
    alone = made(keras, sk, seed=2)
    assert sk.Checkpoint(folder / "all").restore(alone).steps == 6
    found_keys, found_rows = next(iter(alone.layers[1].tables.values())).export()
    order = np.argsort(all_keys)
    np.testing.assert_array_equal(found_keys, all_keys[order])
    np.testing.assert_array_equal(found_rows, all_rows.reshape(-1, 2)[order])
    for weight, expected in zip(_trained(alone), _trained(model), strict=True):
        np.testing.assert_array_equal(weight, expected)
    monkeypatch.setattr(job, "_communicator", comm)
    comm.barrier()


def _trained(model):
    dense = [v for v in model.trainable_weights if not isinstance(v, TableVariable)]
    return [tf.convert_to_tensor(each) for each in dense]


def test_ranks_with_other_arguments_raise_before_anything_has_changed(comm, folder, keras, sk):
    if comm.size == 1:
        pytest.skip("there is one rank")
    model = made(keras, sk)
    with pytest.raises(RanksDifferError, match="A Checkpoint must be the same on all ranks"):
        fit(model, sk, sk.Checkpoint(folder / f"of rank {comm.rank}"))
    assert not list(folder.iterdir()) and not everything(model)["keys"].size
