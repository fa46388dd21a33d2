"""What Keras would leave a table out of is refused by name; what works with tables goes on."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.own_process import run_program

X = np.arange(12).reshape(6, 2)
Y = np.linspace(0, 1, 6, dtype=np.float32)[:, None]


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    return pytest.importorskip(request.param)


class Holder:
    def __init__(self, table):
        self.table = table


def in_a_module(table):
    module = tf.Module()
    module.table = table
    return module


HOLDINGS = {
    "attribute": lambda table: table,
    "list": lambda table: [table],
    "dict": lambda table: {"a": table},
    "tuple": lambda table: (table,),
    "deep": lambda table: {"a": [{"b": (1, table)}]},
    "tf.Module": in_a_module,
}
holding = pytest.mark.parametrize("hold", HOLDINGS.values(), ids=HOLDINGS.keys())


def a_model(
    keras,
    hold=HOLDINGS["attribute"],
    trainable=True,
    own_step=False,
    own_save=False,
    compiled="if it trains the table",
):
    """A model whose sub-layer holds a table of ones, and the table.

    compiled "before it has the table" or "with it" is to be refused.
    """
    is_late = compiled == "before it has the table"
    table = sok.DynamicVariable(2, "ones", name="held", trainable=trainable)

    class Pooled(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            if not is_late:
                self.held = hold(table)

        def call(self, ids):
            return tf.reduce_mean(tf.nn.embedding_lookup(table, tf.cast(ids, tf.int64)), 1)

    class SavingPooled(Pooled):
        def save_own_variables(self, store):
            super().save_own_variables(store)
            keys, rows = sok.export(table)
            store["keys"], store["rows"] = keys.numpy(), rows.numpy()

        def load_own_variables(self, store):
            sok.assign(table, np.array(store["keys"]), np.array(store["rows"]))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.pooled = SavingPooled() if own_save else Pooled()
            self.head = keras.layers.Dense(1)

        def call(self, ids):
            return self.head(self.pooled(ids))

    class TrainedModel(Model):
        def train_step(self, data):
            ids, targets = data[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(ids) - targets) ** 2)
            variables = [table, *self.head.trainable_variables]
            gradients = tape.gradient(loss, variables)
            self.row_optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss}

    model = TrainedModel() if own_step else Model()
    model.row_optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1)) if own_step else None
    model(X)
    if own_step or not trainable or compiled != "if it trains the table":
        model.compile(keras.optimizers.SGD(0.1), "mse")
    if is_late:
        model.pooled.held = hold(table)
    return model, table


def rows_of(table):
    return sok.export(table)[1].numpy()


SAVING = {
    "save .keras": (".keras", lambda model, path: model.save(path)),
    "save .h5": (".h5", lambda model, path: model.save(path)),
    "save_weights": (".weights.h5", lambda model, path: model.save_weights(path)),
    "load_weights": (".weights.h5", lambda model, path: model.load_weights(path)),
    "get_weights": ("", lambda model, path: model.get_weights()),
    "set_weights": ("", lambda model, path: model.set_weights([])),
    "get_weights of a layer": ("", lambda model, path: model.pooled.get_weights()),
}


def refused(text="'held:0' untrained"):
    return pytest.raises(NotImplementedError, match=text)


@holding
def test_what_would_leave_rows_untrained_or_out_is_refused(keras, hold, tmp_path):
    with refused("'held:0' untrained.*compile.optimizer=None"):
        a_model(keras, hold, compiled="with it")
    model, table = a_model(keras, hold, compiled="before it has the table")
    kernel = model.head.kernel.numpy()
    for train in (lambda: model.fit(X, Y, verbose=0), lambda: model.train_on_batch(X, Y)):
        with refused("'held:0' untrained.*sok.OptimizerWrapper"):
            train()
    np.testing.assert_array_equal(model.head.kernel.numpy(), kernel)
    np.testing.assert_array_equal(rows_of(table), np.ones((12, 2)))
    for suffix, save in SAVING.values():
        path = tmp_path / f"there_before{suffix or '.txt'}"
        path.write_text("a file of worth")
        with refused("'held:0' out.*tf.train.Checkpoint.*sok.export"):
            save(model, str(path))
        assert path.read_text() == "a file of worth"
    assert len(model.head.get_weights()) == 2
    with pytest.raises((NotImplementedError, AssertionError), match="'held:0'|untracked"):
        model.export(str(tmp_path / "exported"))


def test_a_model_is_compiled_for_evaluation_alone(keras):
    model, _ = a_model(keras)
    if keras.__name__ == "keras":
        model.compile(optimizer=None, loss="mse")
        before = model.evaluate(X, Y, verbose=0)
        with refused():
            model.compile(loss="mse")  # Keras' own default trains
    model.trainable = False
    model.compile(loss="mse")
    assert keras.__name__ == "tf_keras" or model.evaluate(X, Y, verbose=0) == before


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_table_that_the_model_does_not_hold_is_refused_too(keras, run_eagerly):
    model, _ = a_model(keras, Holder)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    with refused():
        model.fit(X, Y, verbose=0)


def test_steps_that_end_in_keras_own_are_refused(keras):
    model, _ = a_model(keras)
    with refused():
        model.train_step((tf.constant(X), tf.constant(Y)))
    model(X)  # the error has left nothing behind

    class Counting(type(model)):
        def train_step(self, data):
            return super().train_step(data)

    counting = Counting()
    counting(X)
    counting.compile(keras.optimizers.SGD(0.1), "mse")
    with refused():
        counting.fit(X, Y, verbose=0)


def test_tf_keras_models_are_still_converted_by_autograph():
    keras = pytest.importorskip("tf_keras")

    class Branching(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, x):
            if tf.reduce_sum(x) > 0:  # a tensor: only AutoGraph can branch on it
                x = -x
            return self.head(x)

    sok.DynamicVariable(2)
    model = Branching()
    model.compile("sgd", "mse")
    model.fit(X.astype("f4"), Y, verbose=0)


def test_copies_of_a_model_are_refused(keras, tmp_path):
    class Own(keras.layers.Layer):
        """It makes its own table, so that its config makes it again."""

        def __init__(self, dimension=2, **kwargs):
            super().__init__(**kwargs)
            self.table = sok.DynamicVariable(dimension, "ones", name="own")

        def call(self, ids):
            return tf.reduce_mean(tf.nn.embedding_lookup(self.table, tf.cast(ids, tf.int64)), 1)

        def compute_output_shape(self, input_shape):
            return (input_shape[0], 2)

    ids = keras.Input([2], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(Own()(ids)))
    # Keras wraps what comes out of a layer's from_config into a TypeError.
    with pytest.raises((NotImplementedError, TypeError), match="clone_model.*assign them"):
        keras.models.clone_model(model)
    for make in (pickle.dumps, copy.deepcopy):
        with refused("'own:0'"):
            make(model)
    with refused("'own:0' out"):
        keras.models.save_model(model, str(tmp_path / "model.keras"))


# ---- checkpoints of TensorFlow -------------------------------------------------------------------


WAYS_TO_WRITE = {
    "write": lambda checkpoint, folder: checkpoint.write(f"{folder}/checkpoint"),
    "save": lambda checkpoint, folder: checkpoint.save(f"{folder}/checkpoint"),
    "manager": lambda checkpoint, folder: tf.train.CheckpointManager(
        checkpoint, folder, max_to_keep=1
    ).save(),
}


@pytest.mark.parametrize("write", WAYS_TO_WRITE.values(), ids=WAYS_TO_WRITE.keys())
def test_a_table_that_keras_hides_from_a_checkpoint_is_found(write, tmp_path):
    keras3 = pytest.importorskip("keras")
    model, _ = a_model(keras3, HOLDINGS["deep"])
    path = write(tf.train.Checkpoint(net=tf.train.Checkpoint(model=model)), str(tmp_path))
    assert any("held-" in name for name, _ in tf.train.list_variables(path))
    other, table = a_model(keras3, HOLDINGS["deep"])
    sok.assign(table, [1, 99], [[5.0, 5.0], [6.0, 6.0]])
    tf.train.Checkpoint(net=tf.train.Checkpoint(model=other)).read(path)
    np.testing.assert_array_equal(rows_of(table), np.ones((12, 2)))


@holding
def test_a_checkpoint_that_reaches_the_table_saves_all(keras, hold, tmp_path):
    """By the model, and as the error of `save` says to write it."""
    model, table = a_model(keras, hold)
    kernel = model.head.kernel.numpy()
    for more in ({}, {"tables": [table]}):
        checkpoint = tf.train.Checkpoint(model=model, **more)
        path = checkpoint.write(str(tmp_path / "checkpoint"))
        sok.assign(table, [1, 99], [[5.0, 5.0], [6.0, 6.0]])
        model.head.kernel.assign(kernel + 1)
        status = checkpoint.read(path)
        np.testing.assert_array_equal(rows_of(table), np.ones((12, 2)))
        np.testing.assert_array_equal(model.head.kernel.numpy(), kernel)
        if more:
            status.assert_consumed()


# ---- what goes on --------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", [HOLDINGS["attribute"], HOLDINGS["deep"]], ids=["plain", "deep"])
def test_a_train_step_of_ones_own_trains_the_table(keras, hold):
    model, table = a_model(keras, hold, own_step=True)
    model.fit(X, Y, verbose=0, batch_size=3, epochs=2)
    model.train_on_batch(X, Y)
    assert (rows_of(table) != 1).all()
    assert int(model.row_optimizer.iterations) == 5
    assert model.predict(X, verbose=0).shape == (6, 1)
    model.evaluate(X, Y, verbose=0)


def test_a_table_that_is_not_trainable_is_fitted_around(keras):
    model, table = a_model(keras, trainable=False)
    kernel = model.head.kernel.numpy()
    model.fit(X, Y, verbose=0)
    assert (model.head.kernel.numpy() != kernel).all()
    np.testing.assert_array_equal(rows_of(table), np.ones((12, 2)))


def test_a_layer_that_saves_its_table_by_itself_is_saved(keras, tmp_path):
    model, table = a_model(
        keras, HOLDINGS["dict" if keras.__name__ == "keras" else "tf.Module"], own_save=True
    )
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    sok.assign(table, [1], [[5.0, 5.0]])
    model.load_weights(path)
    np.testing.assert_array_equal(rows_of(table), np.ones((12, 2)))


def test_a_model_without_tables_is_as_before(keras, tmp_path):
    sok.DynamicVariable(2)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    early = keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
    path = str(tmp_path / "model")
    kept = keras.callbacks.ModelCheckpoint(path + ".keras")
    model.fit(X.astype("f4"), Y, verbose=0, callbacks=[early, kept])
    model.train_on_batch(X.astype("f4"), Y)
    model.set_weights(model.get_weights())
    model.save_weights(path + ".weights.h5")
    model.load_weights(path + ".weights.h5")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    again = keras.models.load_model(path + ".keras")
    assert len(again.get_weights()) == len(pickle.loads(pickle.dumps(model)).get_weights()) == 2
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.read(checkpoint.write(path)).assert_consumed()


LATE = """
import sys
import tensorflow as tf
packages = {"keras", "tf_keras"} & set(sys.modules)  # TensorFlow imports one by itself
import sok_lite as sok
table = sok.DynamicVariable(2, "ones", name="early")
tf.nn.embedding_lookup(table, [1])
tf.train.Checkpoint(table=table).write(sys.argv[1] + "/checkpoint")
assert {"keras", "tf_keras"} & set(sys.modules) == packages, "Keras was imported"
keras = __import__(sys.argv[2])
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.tables = [table]
        self.head = keras.layers.Dense(1)
    def call(self, ids):
        return self.head(tf.nn.embedding_lookup(table, tf.cast(ids, tf.int64)))
model = Model()
for call in (
    lambda: model.compile("sgd", "mse"),
    lambda: model.fit(tf.constant([1, 2]), tf.constant([[1.0], [2.0]]), verbose=0),
    lambda: model.save_weights(sys.argv[1] + "/model.weights.h5"),
):
    try:
        call()
    except Exception as error:
        print(error)
"""


@pytest.mark.full_only("a process for each Keras")
@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_keras_is_not_imported_and_may_come_later(package, tmp_path):
    pytest.importorskip(package)
    text = run_program(LATE, tmp_path, package)
    assert "'early:0' out" in text
    # AutoGraph of TensorFlow 2.16 rewrites the step of tf_keras, whose optimizer then fails.
    assert "'early:0' untrained" in text or package == "tf_keras"
