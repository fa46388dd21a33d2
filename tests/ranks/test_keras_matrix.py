"""What programs do with Keras, on one rank and on several: against a dense model on one rank.

Each line trains a model whose layers each have a table, on this rank's part of every batch, and a
model with all rows in dense weights, on whole batches. Both give the same to 1e-5. What else a line
is about has tests of its own in tests/keras.
"""

from itertools import compress
from operator import not_

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras
from sok_lite.bridge.variable import TableVariable
from sok_lite.comm import launched_ranks
from tests.support.datasets import batched
from tests.support.dense_rows import dense_rows
from tests.support.own_process import run_with_tensorflow
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


# Two ranks take 5 to 14 s for a line: in quick they run on one, and test_keras_fit.py on two.
if launched_ranks() > 1:
    pytestmark = pytest.mark.full_only("one rank is the smoke")


@pytest.fixture
def kit(comm, once, keras):
    return Kit(keras, comm)


def is_of_rows(weight):
    return isinstance(weight, TableVariable)


class Kit:
    """Makes models and data of this rank, and of one rank alone.

    Attributes:
      keras, sk, comm: what a line uses.
    """

    def __init__(self, keras, comm):
        self.keras, self.comm = keras, comm
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
        """Compiles a model; one of dense rows alone is never traced, which takes a second or two.

        However its steps are called, they are the same.
        """
        if not any(map(is_of_rows, model.weights)):
            compiled |= {"run_eagerly": True, "steps_per_execution": 1}
        optimizer = compiled.pop("optimizer", lambda keras: keras.optimizers.Adagrad(0.1))
        optimizer = optimizer(self.keras) if callable(optimizer) else optimizer
        if isinstance(optimizer, sok.OptimizerWrapper) and not any(map(is_of_rows, model.weights)):
            optimizer = optimizer.optimizer
        model.compile(optimizer, **{"loss": "mse"} | compiled)

    def data(self, is_ours, y=Y, *weights):
        """This rank's part of each batch, or the whole batches."""
        batches = batched((X, y, *weights), BATCH)
        return self.sk.shard(batches) if is_ours else batches

    def run(self, models, **options):
        """Trains both, and checks that losses and predictions are the same."""
        np.testing.assert_allclose(*self.fit(models, **options), rtol=1e-5, atol=1e-5)
        self.check(models)

    def fit(self, models, y=Y, callbacks=list, weights=(), **options):
        """Trains both, and returns the losses of each."""
        options = {"epochs": 2, "verbose": 0} | options
        losses = []
        for number, model in enumerate(models):
            over_ranks = [self.sk.AllRanks()] if number == 0 else []
            more = {"callbacks": [*over_ranks, *callbacks()]}
            data = self.data(number == 0, y, *weights)
            losses.append(model.fit(data, **options, **more).history["loss"])
        return losses

    def check(self, models, atol=1e-5):
        """That both predict the same, of what was trained and of what was not."""
        found, expected = (
            np.concatenate(tf.nest.flatten(model.predict(X, verbose=0)), 1) for model in models
        )
        np.testing.assert_allclose(found, expected, atol=atol)
        start = np.concatenate([ROWS["user"][X["user"]], ROWS["items"][X["items"]].mean(1)], 1)
        assert np.abs(found[:, :1] - start @ KERNEL).max() > 0.01, "nothing was trained"


def half(keras):
    """An optimizer of a class of the program's own."""

    class Half(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.built_for = [variable.name for variable in variables]

    return Half(0.5)


def by_schedule(keras):
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5)
    return keras.optimizers.Adagrad(rate)


COMPILED = {
    "SGD": {"optimizer": lambda keras: keras.optimizers.SGD(0.1)},
    "a name": {"optimizer": "sgd"},
    "a schedule": {"optimizer": by_schedule},
    "clipnorm": {"optimizer": lambda keras: keras.optimizers.SGD(0.5, global_clipnorm=0.1)},
    "wrapped": {"optimizer": lambda keras: sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1))},
    "a class of its own": {"optimizer": half},
    "eager": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 4},
    "metrics": {"weighted_metrics": ["mae"], "metrics": ["mse"]},
}
IS_HIGH = (Y > 0).astype(np.float32)
FITTED = {
    "class_weight": {"y": IS_HIGH, "class_weight": {0: 0.3, 1: 2.0}},
    "sample_weight": {"weights": [np.linspace(0, 1, N, dtype=np.float32)]},
    "validation": {"validation_data": batched((X, Y), BATCH)},
}


@pytest.mark.skipif(launched_ranks() > 1, reason="of one rank; clipping: test_clipping.py")
@pytest.mark.parametrize("compiled", COMPILED)
def test_fit_however_a_model_is_compiled(kit, compiled):
    models = kit.both(**COMPILED[compiled])
    kit.run(models)
    assert not any("table" in name for name in getattr(models[0].optimizer, "built_for", []))


@pytest.mark.skipif(launched_ranks() > 1, reason="of one rank")
@pytest.mark.parametrize("fitted", [*FITTED, "rates"])
def test_fit_however_it_is_called(kit, fitted):
    rates = kit.keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (epoch + 1))
    kit.run(kit.both(), **FITTED.get(fitted, {"callbacks": lambda: [rates], "epochs": 3}))


@pytest.mark.skipif(launched_ranks() > 1, reason="of one rank")
def test_a_subclassed_model(kit):
    class Model(kit.keras.Model):
        def __init__(self, layers):
            super().__init__()
            self.user, self.items = layers["user"], layers["items"]
            kernel = kit.keras.initializers.Constant(KERNEL)
            self.head = kit.keras.layers.Dense(1, kernel_initializer=kernel)

        def call(self, x):  # without `training`, which Keras then does not give
            return self.head(tf.concat([self.user(x["user"]), self.items(x["items"])], 1))

    models = [Model(kit.layers(kit.tables())), Model(kit.dense())]
    for model in models:
        model({name: ids[:2] for name, ids in X.items()})
        kit.compile(model)
    kit.run(models)


def test_evaluate_and_predict(kit):
    models = kit.both(metrics=["mae"])
    kit.run(models)
    over_ranks = {"callbacks": [kit.sk.AllRanks()]}
    ours, theirs = (
        model.evaluate(kit.data(is_ours), verbose=0, **(over_ranks if is_ours else {}))
        for model, is_ours in zip(models, (True, False), strict=True)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    kit.check(models)
    unknown = {name: ids + 1000 for name, ids in X.items()}
    bias = models[0].layers[-1].get_weights()[1]
    np.testing.assert_allclose(models[0].predict(unknown, verbose=0), np.tile(bias, (N, 1)))


IN_A_NEW_PROCESS = """
import numpy as np
import {} as keras
import sok_lite.keras
model = keras.models.load_model("m.keras")
with np.load("x.npz") as x:
    np.save("y.npy", model.predict(dict(x), verbose=0))
"""


@pytest.mark.skipif(launched_ranks() > 1, reason="of one rank")
def test_a_new_process_loads(kit, tmp_path):
    models = kit.both()
    kit.fit(models)
    models[0].save(tmp_path / "m.keras")
    np.savez(tmp_path / "x.npz", **X)
    run_with_tensorflow(IN_A_NEW_PROCESS.format(kit.keras.__name__), tmp_path)
    expected = models[1].predict(X, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(kit, policy):
    kit.keras.mixed_precision.set_global_policy(policy)
    try:
        models = kit.both()
    finally:
        kit.keras.mixed_precision.set_global_policy("float32")
    is_scaled = type(models[0].optimizer).__name__.startswith("LossScaleOptimizer")
    assert is_scaled == (policy == "mixed_float16")
    assert models[0].layers[-2].compute_dtype == policy.removeprefix("mixed_")
    kit.fit(models)
    kit.check(models, atol=0.03)  # of bfloat16, whose sums go over ranks in another order


def test_gradient_accumulation(kit):
    """Ten batches, three of a step: the last one waits for two more."""
    if kit.keras.__name__ == "tf_keras":
        return  # it has none

    def optimizer(keras):
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8)
        return keras.optimizers.Adagrad(rate, gradient_accumulation_steps=3)

    models = kit.both(optimizer=optimizer)
    kit.run(models)
    kit.run(models, epochs=1)


def test_a_train_step_of_a_programs_own(kit):
    class Own(kit.keras.Model):
        def train_step(self, data):
            loss, pairs = loss_and_pairs(self, data)
            self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

    kit.run(kit.both(classes=(Own, Own)))


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


def test_several_outputs(kit):
    kit.run(kit.both(num_outputs=2, loss=["mse", "mae"]), y=(Y, -Y))


def test_two_models_that_share_a_table(kit):
    made = [kit.layers(kit.tables()), kit.dense()]
    first, second = ([kit.model(layers) for layers in made] for _ in range(2))
    for model in [*first, *second]:
        kit.compile(model)
    for models in (first, second, first):
        kit.fit(models, epochs=1)
    kit.check(first)
    kit.check(second)
