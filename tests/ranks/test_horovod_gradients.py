"""Horovod's tape and optimizers with tables: what goes wrong there raises, and what works."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras
from sok_lite.comm.horovod import HorovodCommunicator

hvd = pytest.importorskip("horovod.tensorflow")
tf_keras = pytest.importorskip("tf_keras")


TRANSPORT = HorovodCommunicator  # its tape reaches ranks in no other way


class Model:
    """A table of rows [1], a static one and a dense variable, and the loss of this rank's ids."""

    def __init__(self, comm, name):
        self.table = sok.DynamicVariable(1, initializer="ones", name=name)
        self.static, self.dense = sok.Variable(np.ones((8, 1), np.float32)), tf.Variable([1.0])
        self.ids = tf.RaggedTensor.from_tensor(tf.constant([[0], [1], [2 + comm.rank]], tf.int64))
        self.factor = comm.rank + 1.0

    @property
    def variables(self):
        return [self.table, self.static, self.dense]

    def tape(self):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse([self.table, self.static], [self.ids] * 2, combiners="sum")
            total = tf.reduce_sum(rows[0]) + tf.reduce_sum(rows[1])
            loss = self.factor * (total + self.dense[0])
        return tape, loss


@pytest.mark.full_only("traces for 7 s")
def test_a_gradient_that_horovod_has_gathered_raises_and_changes_nothing(comm, run):
    model = Model(comm, "gathered")
    inner = keras.optimizers.SGD(1.0)
    optimizer = sok.OptimizerWrapper(inner)

    @run
    def step():
        tape, loss = model.tape()
        tape = hvd.DistributedGradientTape(tape)
        variables = [model.table, model.dense]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    text = "2 of 4 keys of the gradient of table 'gathered' .*register_local_source"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=text):
        step()
    keys, rows = sok.export(model.table)
    assert keys.numpy().tolist() == [key for key in range(4) if key % 2 == comm.rank]
    assert set(rows.numpy()[:, 0]) == {1.0}
    assert (float(model.dense[0]), int(inner.iterations), int(optimizer.iterations)) == (1.0, 0, 0)


def test_tables_that_the_tape_knows_as_local_train_on_the_mean_of_all_losses(comm, run):
    model = Model(comm, "local")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))

    @run
    def step():
        tape, loss = model.tape()
        tape = hvd.DistributedGradientTape(tape)
        for table in model.variables[:2]:
            tape.register_local_source(table)
        grads = tape.gradient(loss, model.variables)
        optimizer.apply_gradients(zip(grads, model.variables, strict=True))

    step()
    sums = {0: 1 + 2, 1: 1 + 2, 2: 1, 3: 2}
    keys, rows = sok.export(model.table)
    expected = [1 - sums[key] / 2 for key in keys.numpy().tolist()]
    assert keys.numpy().tolist() == [key for key in range(4) if key % 2 == comm.rank]
    np.testing.assert_array_equal(rows[:, 0], expected)
    np.testing.assert_array_equal(model.static[:, 0], [*expected, 1.0, 1.0])
    np.testing.assert_array_equal(model.dense, [1 - 3 / 2])


@pytest.mark.parametrize("module", [keras.optimizers, tf_keras.optimizers], ids=["k3", "tf_keras"])
def test_an_optimizer_of_horovod_averages_nothing_that_it_is_given(comm, module):
    model = Model(comm, f"given {module.__name__}")
    optimizer = sok.OptimizerWrapper(hvd.DistributedOptimizer(module.SGD(1.0)))
    tape, loss = model.tape()
    variables = [model.table, model.dense]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    keys, rows = sok.export(model.table)
    sums = {0: 1 + 2, 1: 1 + 2, 2: 1, 3: 2}
    np.testing.assert_array_equal(rows[:, 0], [1 - sums[key] for key in keys.numpy().tolist()])
    np.testing.assert_array_equal(model.dense, [-comm.rank])


def test_what_an_optimizer_of_horovod_would_do_to_tables_is_refused(comm):
    model = Model(comm, "refused")
    optimizer = sok.OptimizerWrapper(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    with pytest.raises(NotImplementedError, match="register_local_source"):
        optimizer.minimize(lambda: model.tape()[1], [model.table])
    adding = hvd.DistributedOptimizer(
        tf_keras.optimizers.legacy.SGD(1.0), backward_passes_per_step=2
    )
    grad = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([comm.rank], tf.int64))
    with pytest.raises(NotImplementedError, match="backward_passes_per_step"):
        sok.OptimizerWrapper(adding).apply_gradients([(grad, model.table)])
    assert len(sok.export(model.table)[0]) == 0


# ---- Keras' own training -------------------------------------------------------------------------


@pytest.fixture(params=[keras, tf_keras], ids=["keras", "tf_keras"])
def package(request):
    return request.param


def with_table(package, optimizer):
    """A compiled model, and its table."""
    sk = sok_lite.keras.classes_for(package)
    table = sk.Table("of horovod", 2)
    ids = package.Input([3], dtype="int64")
    model = package.Model(ids, package.layers.Dense(1)(sk.Embedding(table, "mean")(ids)))
    model.compile(optimizer, "mse")
    return model, table


def test_an_optimizer_of_horovod_is_refused_before_keras_trains_with_it(comm, package):
    optimizers = [hvd.DistributedOptimizer(package.optimizers.SGD(0.1))]
    if package is keras:
        optimizers.append(package.optimizers.LossScaleOptimizer(optimizers[0]))
    for optimizer in optimizers:
        if comm.size == 1:
            with_table(package, optimizer)
            continue
        text = "'of horovod.*SGD of hvd.Dist.*Do not wrap.*keras.AllRanks"
        with pytest.raises(NotImplementedError, match=text):
            with_table(package, optimizer)
        model, table = with_table(package, "sgd")
        table.trainable = False  # what is dense may be Horovod's
        model.compile(optimizer, "mse")


def test_an_optimizer_of_horovod_takes_no_wrapper(comm, package):
    ours = sok.OptimizerWrapper(package.optimizers.SGD(0.1))
    with pytest.raises(TypeError, match="Received: a sok.OptimizerWrapper. Leave it out"):
        hvd.DistributedOptimizer(ours)


def test_a_broadcast_of_all_variables_says_what_to_do_in_a_job(comm, package):
    _, table = with_table(package, "sgd")
    for read in (lambda: hvd.broadcast_variables([table.variable], 0), table.variable.numpy):
        with pytest.raises(NotImplementedError, match="table.export.. for all") as raised:
            read()
        text = str(raised.value)
        assert ("broadcast the other variables" in text) == (comm.size > 1)
        assert ("sok_lite.keras.AllRanks()" in text) == (comm.size > 1)


def test_a_callback_of_horovod_that_broadcasts_is_refused_before_training(comm, package):
    module = "horovod.keras" if package is keras else "horovod.tensorflow.keras"
    callbacks = pytest.importorskip(module).callbacks
    model, table = with_table(package, "sgd")
    broadcasts = callbacks.BroadcastGlobalVariablesCallback(0)
    x = np.arange(6).reshape(2, 3)
    with pytest.raises(NotImplementedError, match=r"Broadcast.*sok_lite.keras.AllRanks\(\) in its"):
        model.fit(x, np.zeros([2, 1]), verbose=0, callbacks=[broadcasts])
    assert len(table) == 0
