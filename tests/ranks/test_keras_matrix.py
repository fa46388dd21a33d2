"""What programs do with Keras, on one rank and on several: against a dense model on one rank.

Each line trains a model whose layers each have a table, on this rank's part of every batch, and a
model with all rows in dense weights, on whole batches. Both give the same to 1e-5. One line runs
the models as this file makes them; what else a line is about has tests of its own in tests/keras.
"""

import os
import subprocess
import sys
from itertools import compress
from operator import not_

import numpy as np
import pytest
import tensorflow as tf

import sok_lite.keras
from sok_lite.bridge import job
from sok_lite.comm import launched_ranks
from tests.support.datasets import batched
from tests.support.dense_rows import dense_rows
from tests.support.own_train_step import loss_and_pairs

DIM, NUM_KEYS, FIELDS, BATCH = 3, 30, 4, 8
RNG = np.random.default_rng(3)
N = 5 * BATCH
X = {
    "user": RNG.integers(0, NUM_KEYS, N),
    "items": RNG.integers(0, NUM_KEYS, (N, FIELDS)),
}
Y = RNG.normal(size=(N, 1)).astype(np.float32)
ROWS = {name: RNG.normal(size=(NUM_KEYS, DIM)).astype(np.float32) for name in X}
KERNEL = RNG.normal(size=(2 * DIM, 1)).astype(np.float32)


# On one rank each line runs with both.
IN_TURN = "keras" if launched_ranks() > 1 else None


def on_one_rank_in_quick(line):
    """Two ranks take 5 to 14 s for a line: in quick all run on one, and `fit` on two as well."""
    is_alone = launched_ranks() == 1
    return line if is_alone else pytest.mark.full_only("one rank is the smoke")(line)


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if the program had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    return pytest.importorskip(request.param)


@pytest.fixture
def kit(comm, once, keras, folder):
    return Kit(keras, comm, folder)


class Kit:
    """Makes models and data of this rank, and of one rank alone.

    Attributes:
      keras, sk, comm, folder: what a line uses.
    """

    def __init__(self, keras, comm, folder):
        self.keras, self.comm, self.folder = keras, comm, folder
        self.sk = sok_lite.keras.classes_for(keras)

    def tables(self):
        """Tables with this rank's part of the rows."""
        tables = {name: self.sk.Table(f"table_{name}", DIM) for name in X}
        for name, table in tables.items():
            self.fill(table, name)
        return tables

    def fill(self, table, name):
        keys = np.arange(NUM_KEYS)
        own = keys[table.variable.table.owner.owners(keys, self.comm.size) == self.comm.rank]
        table.assign(own, ROWS[name][own])

    def dense(self):
        """Layers that have all rows in a weight."""
        return {name: dense_rows(self.keras, rows) for name, rows in ROWS.items()}

    def layers(self, tables):
        """A layer for each table."""
        embedding = self.sk.Embedding
        return {"user": embedding(tables["user"]), "items": embedding(tables["items"], "mean")}

    def head(self, rows):
        kernel = self.keras.initializers.Constant(KERNEL)
        return self.keras.layers.Dense(1, kernel_initializer=kernel, dtype="float32")(rows)

    def model(self, layers, num_outputs=1, cls=None):
        keras = self.keras
        inputs = {
            "user": keras.Input([], dtype="int64", name="user"),
            "items": keras.Input([FIELDS], dtype="int64", name="items"),
        }
        rows = keras.layers.Concatenate()([layers[name](ids) for name, ids in inputs.items()])
        outputs = [self.head(rows) for _ in range(num_outputs)]
        return (cls or keras.Model)(inputs, outputs[0] if num_outputs == 1 else outputs)

    def both(self, num_outputs=1, classes=(None, None), **compiled):
        """(a model with tables, one with dense rows), compiled alike."""
        made = [self.layers(self.tables()), self.dense()]
        models = [
            self.model(layers, num_outputs, cls) for layers, cls in zip(made, classes, strict=True)
        ]
        for model in models:
            self.compile(model, **compiled)
        return models

    def compile(self, model, **compiled):
        if "optimizer" not in compiled:
            compiled["optimizer"] = self.keras.optimizers.Adagrad(0.1)
        model.compile(**{"loss": "mse"} | compiled)

    def data(self, is_ours, y=Y):
        """This rank's part of each batch, or the whole batches."""
        batches = batched((X, y), BATCH)
        return self.sk.shard(batches) if is_ours else batches

    def fit(self, models, y=Y, callbacks=list, **options):
        """Trains both, and returns the losses of each."""
        options = {"epochs": 2, "verbose": 0} | options
        losses = []
        for number, model in enumerate(models):
            over_ranks = [self.sk.AllRanks()] if number == 0 else []
            more = {"callbacks": [*over_ranks, *callbacks()]}
            losses.append(model.fit(self.data(number == 0, y), **options, **more).history["loss"])
        return losses

    def check(self, models, atol=1e-5):
        """That both predict the same, of what was trained and of what was not."""
        found, expected = (
            np.concatenate(tf.nest.flatten(model.predict(X, verbose=0)), 1) for model in models
        )
        np.testing.assert_allclose(found, expected, atol=atol)
        start = np.concatenate([ROWS["user"][X["user"]], ROWS["items"][X["items"]].mean(1)], 1)
        assert np.abs(found[:, :1] - start @ KERNEL).max() > 0.05, "nothing was trained"

    def path(self, name):
        return os.path.join(str(self.folder), f"{self.keras.__name__}_{name}")


def test_fit(kit):
    models = kit.both()
    np.testing.assert_allclose(*kit.fit(models), rtol=1e-5, atol=1e-5)
    kit.check(models)


@on_one_rank_in_quick
def test_evaluate(kit):
    models = kit.both(metrics=["mae"])
    kit.fit(models)
    ours, theirs = (
        model.evaluate(
            kit.data(number == 0),
            verbose=0,
            **({"callbacks": [kit.sk.AllRanks()]} if number == 0 else {}),
        )
        for number, model in enumerate(models)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    kit.check(models)


@on_one_rank_in_quick
def test_predict(kit):
    models = kit.both()
    kit.fit(models)
    kit.check(models)
    unknown = {name: ids + 1000 for name, ids in X.items()}
    bias = models[0].layers[-1].get_weights()[1]
    np.testing.assert_allclose(models[0].predict(unknown, verbose=0), np.tile(bias, (N, 1)))


@on_one_rank_in_quick
def test_a_loaded_model_trains_on(kit):
    models = kit.both()
    kit.fit(models)
    models[0].save(kit.path("m.keras"))
    loaded = kit.keras.models.load_model(kit.path("m.keras"))
    kit.check([loaded, models[1]])
    kit.fit([loaded, models[1]])
    kit.check([loaded, models[1]])


IN_A_NEW_PROCESS = """
import sys
import numpy as np
import {package} as keras
import sok_lite.keras
model = keras.models.load_model(sys.argv[1])
with np.load(sys.argv[2]) as x:
    np.save(sys.argv[3], model.predict(dict(x), verbose=0))
"""


@on_one_rank_in_quick
def test_a_new_process_loads(kit):
    """Of one rank, whatever ranks have saved."""
    models = kit.both()
    kit.fit(models)
    models[0].save(kit.path("m.keras"))
    expected = models[1].predict(X, verbose=0)
    if kit.comm.rank == 0:
        np.savez(kit.path("x.npz"), **X)
        files = [kit.path(name) for name in ("m.keras", "x.npz", "y.npy")]
        code = IN_A_NEW_PROCESS.format(package=kit.keras.__name__)
        of_job = ("HOROVOD", "OMPI", "PMIX", "PMI")
        env = {name: value for name, value in os.environ.items() if not name.startswith(of_job)}
        subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=300, env=env)
        np.testing.assert_allclose(np.load(files[2]), expected, atol=1e-5)
    kit.comm.barrier("wait for rank 0")


@on_one_rank_in_quick
def test_a_clone(kit):
    models = kit.both()
    kit.fit(models)
    clones = [kit.keras.models.clone_model(models[0]), kit.model(kit.dense())]
    for table in [layer.tables for layer in clones[0].layers if hasattr(layer, "tables")]:
        ((name, made),) = table.items()
        kit.fill(made, name.removeprefix("table_"))
    for each in clones:
        kit.compile(each)
    kit.fit(clones)
    kit.check(clones)


@on_one_rank_in_quick
def test_early_stopping(kit):
    models = kit.both()

    def stop():
        options = {"patience": 1, "min_delta": 100.0, "restore_best_weights": True}
        return [kit.keras.callbacks.EarlyStopping("loss", **options)]

    losses = kit.fit(models, callbacks=stop, epochs=5)
    assert list(map(len, losses)) == [2, 2]
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-5)
    kit.check(models)


@on_one_rank_in_quick
def test_model_checkpoint(kit):
    models = kit.both()
    path = kit.path("best.weights.h5")
    best = kit.keras.callbacks.ModelCheckpoint(path, "loss", save_weights_only=True)
    kit.fit(models[:1], callbacks=lambda: [best])
    kit.fit(models[:1])  # what is taken back
    models[0].load_weights(path)
    models[1].fit(kit.data(False), epochs=2, verbose=0)
    kit.check(models)


@on_one_rank_in_quick
def test_mixed_precision(kit):
    kit.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        models = kit.both()
    finally:
        kit.keras.mixed_precision.set_global_policy("float32")
    kit.fit(models)
    kit.check(models, atol=0.03)  # of bfloat16, whose sums go over ranks in another order


@on_one_rank_in_quick
def test_gradient_accumulation(kit):
    """Ten batches, three of a step: the last one waits for two more."""
    if kit.keras.__name__ == "tf_keras":
        return  # it has none
    models = kit.both()
    for model in models:
        rate = kit.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8)
        made = kit.keras.optimizers.Adagrad(rate, gradient_accumulation_steps=3)
        kit.compile(model, optimizer=made)
    losses = kit.fit(models)
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-5)
    kit.check(models)
    kit.fit(models, epochs=1)
    kit.check(models)


@on_one_rank_in_quick
def test_learning_rate_scheduler(kit):
    models = kit.both()

    def rates():
        return [kit.keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (epoch + 1))]

    np.testing.assert_allclose(*kit.fit(models, callbacks=rates, epochs=3), rtol=1e-5, atol=1e-5)
    kit.check(models)


@on_one_rank_in_quick
def test_a_train_step_of_a_programs_own(kit):
    class Own(kit.keras.Model):
        def train_step(self, data):
            loss, pairs = loss_and_pairs(self, data)
            self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

    models = kit.both(classes=(Own, Own))
    kit.fit(models)
    kit.check(models)


@on_one_rank_in_quick
def test_a_table_with_an_optimizer_and_owners_of_its_own(kit):
    """The dense model parts the gradients in a step of its own."""
    rate = kit.keras.optimizers.schedules.ExponentialDecay(0.4, 3, 0.7)
    own, twin = (kit.keras.optimizers.Adagrad(rate, clipvalue=0.05) for _ in range(2))
    tables, layers = kit.tables(), kit.dense()
    tables["items"] = kit.sk.Table("table_items", DIM, partitioner="hash", optimizer=own)
    kit.fill(tables["items"], "items")

    class Parted(kit.keras.Model):
        def train_step(self, data):
            loss, pairs = loss_and_pairs(self, data)
            is_apart = [variable is layers["items"].rows for _, variable in pairs]
            twin.apply_gradients(list(compress(pairs, is_apart)))
            self.optimizer.apply_gradients(list(compress(pairs, map(not_, is_apart))))
            return {"loss": loss}

    models = [kit.model(kit.layers(tables)), kit.model(layers, cls=Parted)]
    for model in models:
        kit.compile(model)
    kit.fit(models)
    kit.check(models)
    assert int(own.iterations) == int(twin.iterations) == int(models[0].optimizer.iterations)


@on_one_rank_in_quick
def test_several_outputs(kit):
    models = kit.both(num_outputs=2, loss=["mse", "mae"])
    kit.fit(models, y=(Y, -Y))
    kit.check(models)


@on_one_rank_in_quick
def test_two_models_that_share_a_table(kit):
    made = [kit.layers(kit.tables()), kit.dense()]
    first, second = ([kit.model(layers) for layers in made] for _ in range(2))
    for model in [*first, *second]:
        kit.compile(model)
    for models in (first, second, first):
        kit.fit(models, epochs=1)
    kit.check(first)
    kit.check(second)
