"""`fit` over real ranks, against a dense model that one rank trains on the batches of all."""

import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok_lite.keras
from sok_lite.bridge.collectives import allgather
from sok_lite.bridge.variable import TableVariable
from sok_lite.comm.protocol import RanksDifferError
from tests.support.datasets import batched
from tests.support.dense_rows import dense_rows
from tests.support.lone_rank import lone_rank
from tests.support.own_train_step import loss_and_pairs

DIM, NUM_KEYS, FIELDS, BATCH = 3, 40, 4, 8
RNG = np.random.default_rng(0)
X = RNG.integers(0, NUM_KEYS, (41, FIELDS))  # five batches, and a sample that one rank has alone
Y = RNG.normal(size=(41, 1)).astype(np.float32)
LABELS = (RNG.normal(size=(41, 1)) > 0).astype(np.float32)
ROWS = RNG.normal(size=(NUM_KEYS, DIM)).astype(np.float32)


IN_TURN = "comm"


@pytest.fixture(autouse=True)
def seeds():
    """Takes back the seeds of a rank, which tables of other tests would take."""
    yield
    tf.random.set_seed(None)


def batches():
    return batched((X, Y), BATCH)


def batches_of_its_own(comm):
    """This rank's data, and that of a single rank which makes the same steps.

    Rank r has r + 2 batches of r + 3 samples; the last batches have no other rank's.
    """

    def of(rank):
        start = sum((r + 2) * (r + 3) for r in range(rank))
        end = start + (rank + 2) * (rank + 3)
        return [(X[i : i + rank + 3], Y[i : i + rank + 3]) for i in range(start, end, rank + 3)]

    def dataset(steps):
        spec = (tf.TensorSpec([None, FIELDS], tf.int64), tf.TensorSpec([None, 1]))
        return tf.data.Dataset.from_generator(lambda: iter(steps), output_signature=spec)

    every = [of(rank) for rank in range(comm.size)]
    whole = []
    for step in range(comm.size + 1):
        there = [batches[step] for batches in every if step < len(batches)]
        whole.append(tuple(np.concatenate(each) for each in zip(*there, strict=True)))
    return sok_lite.keras.equal_steps(dataset(every[comm.rank])), dataset(whole)


def with_table(comm, keras, sk, seed=7, run_eagerly=False):
    keras.utils.set_random_seed(seed + comm.rank)
    table = sk.Table("ranks", DIM)
    own = np.arange(comm.rank, NUM_KEYS, comm.size)
    table.assign(own, ROWS[own])
    ids = keras.Input([FIELDS], dtype="int64")
    rows = sk.Embedding(table, "mean")(ids)
    hidden = keras.layers.Dense(5, "relu")(rows)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=run_eagerly)
    return model, table


def with_dense(comm, keras):
    """The same model on the batches of all ranks, with the dense weights of rank 0."""
    keras.utils.set_random_seed(7)
    ids, rows = keras.Input([FIELDS], dtype="int64"), dense_rows(keras, ROWS)
    hidden, head = keras.layers.Dense(5, "relu"), keras.layers.Dense(1)
    model = keras.Model(ids, head(hidden(rows(ids))))
    model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=True)  # it is faster
    return model, rows, [hidden, head]


def check_rows(comm, table, rows):
    """That this rank has its part of the rows, and that they are those of a dense layer."""
    keys, values = (each.numpy() for each in table.export())
    assert (keys % comm.size == comm.rank).all() and len(keys) > 5
    np.testing.assert_allclose(values, rows.get_weights()[0][keys], atol=1e-4)


def check_dense(comm, model, dense=None):
    """That dense weights are equal on all ranks, to the bit, and those of the dense model."""
    found = weights_of(model.layers[-2:])
    for ours, other in zip(found, found if dense is None else weights_of(dense), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-4)
        np.testing.assert_array_equal(ours, comm.broadcast(np.array(ours)))


def check_equal(ours, theirs):
    for one, other in zip(ours.export(), theirs.export(), strict=True):
        np.testing.assert_array_equal(one, other)


def weights_of(layers):
    return [each for layer in layers for each in layer.get_weights()]


def begin_alike(comm, model, layers):
    """Gives dense layers the weights that those of the model have on rank 0."""
    first = [np.array(comm.broadcast(each)) for each in weights_of(model.layers[-2:])]
    for layer, at in ((layers[0], 0), (layers[1], 2)):
        layer.set_weights(first[at : at + 2])


def test_ranks_train_as_one_rank_on_all_batches(comm, keras, sk):
    model, table = with_table(comm, keras, sk)
    theirs, rows, dense = with_dense(comm, keras)
    callbacks = [sk.AllRanks()]
    begin_alike(comm, model, dense)
    part, whole = batches_of_its_own(comm)
    expected = theirs.fit(whole, epochs=2, verbose=0).history["loss"]
    found = model.fit(part, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    check_dense(comm, model, dense)
    check_rows(comm, table, rows)


def test_a_function_that_was_traced_before_a_step_counts_by_its_rows_too(comm, once, keras, sk):
    table = sk.Table("ranks", DIM)
    own = np.arange(comm.rank, NUM_KEYS, comm.size)
    table.assign(own, ROWS[own])

    class Traced(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = sk.Embedding(table, "mean")
            self.rows = tf.function(self.embedding)
            self.head = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, ids):
            return self.head(self.rows(ids))

    model, end = Traced(), 2 * comm.size + 1
    model.compile(keras.optimizers.SGD(1.0), "mse")
    mine = slice(2 * comm.rank, end if comm.rank == comm.size - 1 else 2 * comm.rank + 2)
    with tf.GradientTape():  # of as many rows as this rank has in the step
        model(tf.constant(X[mine]))
    data = tf.data.Dataset.from_tensors((X[mine], Y[mine]))
    model.fit(data, verbose=0, callbacks=[sk.AllRanks()])
    predicted = ROWS[X[:end]].mean(axis=1).sum(axis=1, keepdims=True)
    expected = ROWS.copy()
    for ids, gradient in zip(X[:end], 2 * (predicted - Y[:end]) / end, strict=True):
        np.subtract.at(expected, ids, gradient / FIELDS)
    keys, rows = (each.numpy() for each in table.export())
    np.testing.assert_allclose(rows, expected[keys], atol=1e-5)


def test_a_step_of_a_programs_own_with_an_optimizer_for_what_is_dense(comm, once, keras, sk):
    class Own(keras.Model):
        def train_step(self, data):
            loss, pairs = loss_and_pairs(self, data)
            of_tables = [pair for pair in pairs if isinstance(pair[1], TableVariable)]
            if of_tables:
                self.optimizer.apply_gradients(of_tables)
            self.held["of what is dense"][0].apply_gradients(pairs[len(of_tables) :])
            return {"loss": loss}  # and keeps no metrics

    def own(model):
        made = Own(model.inputs, model.outputs)
        made.compile(keras.optimizers.Adagrad(0.1))
        made.held = {"of what is dense": [keras.optimizers.Adagrad(0.1)]}
        return made

    even = batches().take(len(X) // BATCH)  # ranks count alike in such a step
    model, table = with_table(comm, keras, sk, 7 - comm.rank)  # the same on all ranks
    theirs, rows, dense = with_dense(comm, keras)
    for layer, ours in zip(dense, model.layers[-2:], strict=True):
        layer.set_weights(ours.get_weights())
    trained = [own(each) for each in (model, theirs)]
    part = sok_lite.keras.shard(even, drop_remainder=True)
    trained[0].fit(part, epochs=2, verbose=0, callbacks=[sk.AllRanks()])
    trained[1].fit(even, epochs=2, verbose=0)
    check_dense(comm, model, dense)
    check_rows(comm, table, rows)
    if comm.size == 1:
        return
    table.trainable = False  # what is dense is trained alone then
    trained[0].compile(keras.optimizers.Adagrad(0.1))
    trained[0].fit(part, verbose=0, callbacks=[sk.AllRanks()])
    check_dense(comm, model)


def training_what_is_dense(keras, model, apply):
    """The same model with a step of its own, which applies the gradients of dense weights alone."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            dense = [each for each in variables if not isinstance(each, TableVariable)]
            apply(tape.gradient(loss, dense), dense)
            return {"loss": loss}

    return Own(model.inputs, model.outputs)


@pytest.mark.parametrize("keras", ["keras"], indirect=True)  # others take pairs alone
def test_gradients_that_come_without_variables_are_averaged_too(comm, once, keras, sk):
    beside = keras.optimizers.SGD(0.1)
    model, _ = with_table(comm, keras, sk)
    own = training_what_is_dense(keras, model, lambda grads, _: beside.apply(grads))
    own.beside = beside
    own.beside.build([w for w in own.trainable_variables if not isinstance(w, TableVariable)])
    own.compile("sgd")
    own.fit(sok_lite.keras.shard(batches()), verbose=0, callbacks=[sk.AllRanks()])
    check_dense(comm, model)


@pytest.mark.parametrize("is_ours", [False, True])
def test_dense_weights_that_a_step_has_made_unequal_are_told(comm, once, keras, sk, is_ours):
    if comm.size == 1:
        pytest.skip("one rank")
    elsewhere = keras.optimizers.Adagrad(0.1)

    def apply(grads, variables):
        elsewhere.apply_gradients(zip(grads, variables, strict=True))

    model, _ = with_table(comm, keras, sk, 7 - comm.rank)  # the same on all ranks
    own = training_what_is_dense(keras, model, apply)
    own.compile("sgd")
    with pytest.raises(RanksDifferError, match="no longer equal on all ranks: its train_step"):
        callbacks = [sk.AllRanks()] if is_ours else []
        own.fit(sok_lite.keras.shard(batches().take(1)), verbose=0, callbacks=callbacks)


@pytest.mark.full_only("test_keras_matrix.py saves on one rank")
def test_what_ranks_have_trained_is_saved_and_served(comm, keras, sk, folder):
    model, table = with_table(comm, keras, sk)
    dense, _, layers = with_dense(comm, keras)
    begin_alike(comm, model, layers)
    part = sok_lite.keras.shard(batches())
    path = f"{folder}/{keras.__name__}.keras"
    kept = keras.callbacks.ModelCheckpoint(path)
    model.fit(part, verbose=0, callbacks=[sk.AllRanks(), kept])
    sok_lite.export_serving(model, f"{folder}/{keras.__name__}")
    dense.fit(batches(), shuffle=False, verbose=0)
    if comm.rank == 0:
        served = tf.saved_model.load(f"{folder}/{keras.__name__}")(tf.constant(X)).numpy()
        np.testing.assert_allclose(served, dense.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
    comm.barrier()
    loaded = keras.models.load_model(path)
    again = loaded.layers[1].tables["ranks"]
    check_equal(again, table)
    model.fit(part, verbose=0, callbacks=[sk.AllRanks()])
    loaded.fit(part, verbose=0, callbacks=[sk.AllRanks()])
    check_equal(again, table)
    loaded.save(path)
    keys, rows = again.export()
    of_all = allgather(tf.concat([tf.cast(keys, tf.float32)[:, None], rows], 1)).numpy()
    of_all = of_all[np.argsort(of_all[:, 0])]
    with lone_rank():
        alone = keras.models.load_model(path)
        found = np.column_stack(alone.layers[1].tables["ranks"].export())
        np.testing.assert_array_equal(found, of_all)
        own = f"{folder}/{keras.__name__}_{comm.rank}.keras"
        alone.save(own)
    check_equal(keras.models.load_model(own).layers[1].tables["ranks"], again)


def test_ranks_that_differ_are_told_before_training(comm, keras, sk):
    if comm.size == 1:
        pytest.skip("one rank")
    model, table = with_table(comm, keras, sk)
    with pytest.raises(ValueError, match="must be equal on all ranks before training"):
        model.fit(sok_lite.keras.shard(batches()), verbose=0)
    mine = batches().take(3 + comm.rank)
    with pytest.raises(RanksDifferError, match=r"as many steps.*\[3, 4"):
        model.fit(mine, verbose=0, callbacks=[sk.AllRanks()])
    assert len(table.export()[0]) == len(range(comm.rank, NUM_KEYS, comm.size))


def test_a_callback_on_rank_0_alone_is_told_before_training(comm, once, keras, sk, folder):
    if comm.size == 1:
        pytest.skip("one rank")
    model, table = with_table(comm, keras, sk, 7 - comm.rank)  # the same on all ranks
    for callback in (
        keras.callbacks.ModelCheckpoint(f"{folder}.keras"),
        sk.Checkpoint(f"{folder}/checkpoint"),
        *(sk.TableMetrics(), sk.AllRanks()),
    ):
        mine = [callback] if comm.rank == 0 else []
        expected = re.escape(f"Received, by rank: {type(callback).__name__}; none")
        with pytest.raises(RanksDifferError, match=expected):
            model.fit(sok_lite.keras.shard(batches()), verbose=0, callbacks=mine)
    assert len(table) == len(range(comm.rank, NUM_KEYS, comm.size))


def test_steps_are_compared_without_a_callback_of_ours(comm, once, keras, sk):
    if comm.size == 1:
        pytest.skip("one rank")
    model, _ = with_table(comm, keras, sk, 7 - comm.rank)  # the same on all ranks
    mine, seen = batches().take(3 + comm.rank), []
    one = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    by_place = [None, None, 1, 0, [one]]  # y, batch_size, epochs, verbose, callbacks
    for given, named in (
        *(([], {}), (by_place, {})),
        ([], {"verbose": 0, "callbacks": one}),
    ):
        with pytest.raises(RanksDifferError, match=r"as many steps.*\[3, 4"):
            model.fit(mine, *given, **named)
    assert seen == []
    # What a program gives is still called.
    model.fit(batches().take(3), verbose=0, callbacks=one)
    assert seen == [0, 1, 2]


def on_labels(batch=BATCH):
    return batched((X, LABELS), batch)


@pytest.mark.full_only("fits twice on two ranks; ranks that train as one rank are the smoke")
def test_metrics_are_those_of_one_rank_on_all_data(comm, once, keras, sk):
    model, _ = with_table(comm, keras, sk, 7 - comm.rank)  # the same on all ranks
    model.compile("sgd", "mse", metrics=[keras.metrics.AUC(from_logits=True), "mae"])
    part = sok_lite.keras.shard(on_labels())
    before = model.get_weights()
    counts = sk.TableMetrics()
    callbacks = [sk.AllRanks(), counts]
    logs = model.fit(part, validation_data=part, verbose=0, callbacks=callbacks).history
    outputs = model.predict(on_labels(), verbose=0)  # of all data, on each rank
    auc = keras.metrics.AUC(from_logits=True)
    auc.update_state(LABELS, outputs)
    error = outputs - LABELS
    expected = [np.mean(error**2), float(auc.result()), np.mean(np.abs(error))]
    found = [value for name, (value,) in logs.items() if name.startswith("val_")]
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(part, verbose=0), expected, rtol=1e-5)
    by_name = model.evaluate(part, verbose=0, return_dict=True)
    np.testing.assert_allclose(by_name["loss"], expected[0], rtol=1e-5)
    # Of training, against the same steps whose metrics one rank counts.
    model.set_weights(before)
    trained = [logs[name][0] for name in logs if "auc" in name.lower() and "val" not in name]
    steps = []
    for (x, y), (ours, labels) in zip(on_labels(), part, strict=True):
        steps.append((y, model(x)))
        model.train_on_batch(ours, labels)
    auc = keras.metrics.AUC(from_logits=True)
    for y, given in steps:
        auc.update_state(y, given)
    np.testing.assert_allclose(trained, [float(auc.result())], rtol=1e-5)
    sizes = {name: logs[f"tables/{name}"] for name in ("keys", "new_keys", "evicted")}
    assert sizes == {"keys": [NUM_KEYS], "new_keys": [0], "evicted": [0]}  # of all ranks
    assert counts.history["ranks/keys"] == [NUM_KEYS]


@pytest.mark.full_only("test_metrics_are_those_of_one_rank_... is the smoke")
def test_a_metric_of_a_model_that_the_first_batch_builds_keeps_its_own_rank(comm, once, keras, sk):
    """tf_keras counts its variables among the weights of the model."""
    _, table = with_table(comm, keras, sk)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.head = table, keras.layers.Dense(1)
            self.mean_label = keras.metrics.Mean(name="mean_label")

        def call(self, ids):
            return self.head(tf.reduce_mean(self.table(ids), 1))

        def train_step(self, data):
            self.mean_label.update_state(data[1])
            return super().train_step(data)

    model = Model()
    model.compile("sgd", "mse")
    model.fit(sok_lite.keras.shard(batches()), verbose=0, callbacks=[sk.AllRanks()])
    total, count = (float(each.numpy()) for each in model.mean_label.variables)
    mine = [y for _, y in sok_lite.keras.shard(batches())]
    expected = [np.sum(np.concatenate(mine)), sum(map(len, mine))]
    np.testing.assert_allclose([total, count], expected, rtol=1e-5)


def test_other_models_on_ranks_are_told(comm, keras, sk):
    if comm.size == 1:
        pytest.skip("one rank")
    model, table = with_table(comm, keras, sk)
    for other in (
        [keras.layers.Dense(5 + comm.rank)],
        [keras.layers.Dense(5) for _ in range(1 + comm.rank)],
    ):
        ids = keras.Input([FIELDS], dtype="int64")
        hidden = sk.Embedding(table, "mean")(ids)
        for layer in other:
            hidden = layer(hidden)
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="the same model and optimizer.*On this rank: float"):
            model.fit(batches(), verbose=0, callbacks=[sk.AllRanks()])


def test_a_metric_that_is_no_sum_is_a_mean_over_ranks(comm, keras, sk):
    class Most(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="most")
            if keras.__name__ == "keras":
                self.most = self.add_variable((), "zeros", aggregation="none", name="most")
            else:
                how = tf.VariableAggregation.NONE
                self.most = self.add_weight("most", aggregation=how, initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.most.assign(tf.maximum(self.most, tf.reduce_max(tf.cast(y_true, "float32"))))

        def result(self):
            return tf.convert_to_tensor(self.most)

    model, _ = with_table(comm, keras, sk)
    model.compile("sgd", "mse", metrics=[Most()])
    y = np.full((4, 1), comm.rank + 1.0, np.float32)
    found = model.evaluate(X[:4], y, verbose=0, return_dict=True)
    assert found["most"] == pytest.approx((comm.size + 1) / 2)


@pytest.mark.full_only("traces a step for each of two models")
def test_a_step_without_rows_leaves_what_no_gradient_changes(comm, once, keras, sk):
    keras.utils.set_random_seed(3)
    table, ids = sk.Table("normed", DIM), keras.Input([FIELDS], dtype="int64")
    normed = keras.layers.BatchNormalization()(sk.Embedding(table, "mean")(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(normed))
    model.compile("sgd", "mse", metrics=["mae"])
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            moving = [each.numpy() for each in self.model.layers[2].non_trainable_variables]
            seen.append((moving, dict(logs or {})))

    sizes = [4, 4, 1]  # of the last one all ranks but one have nothing
    spec = (tf.TensorSpec([None, FIELDS], tf.int64), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(
        lambda: ((X[:n], Y[:n]) for n in sizes), output_signature=spec
    )
    watches = [sk.AllRanks(), keras.callbacks.TerminateOnNaN(), Watch()]
    logs = model.fit(sok_lite.keras.shard(data), verbose=0, callbacks=watches).history
    assert len(seen) == 3 and np.isfinite(logs["loss"] + logs["mae"]).all()
    for one, other in zip(seen[1][0], seen[2][0], strict=True):
        assert np.isfinite(other).all()
        assert np.array_equal(one, other) is (comm.rank > 0)
    assert all(np.isfinite(each["loss"]) for _, each in seen)
    assert (seen[1][1] == seen[2][1]) is (comm.rank > 0)
    cut = [len(x) for x, _ in sok_lite.keras.shard(batches(), drop_remainder=True)]
    parts = [len(x) // comm.size for x, _ in batches()]
    assert cut == [part for part in parts if part]  # of one sample no rank of several has a part
    predicted = model.predict(sok_lite.keras.shard(batches()), verbose=0)
    assert len(allgather(predicted)) == len(X)


def test_data_that_does_not_fit_is_an_error_on_all_ranks(comm):
    if comm.size == 1:
        pytest.skip("one rank")
    none = batches().take(comm.rank)
    with pytest.raises(ValueError, match=r"Every rank must have a batch.*\[0, 1"):
        sok_lite.keras.equal_steps(none)
    endless = batches().repeat() if comm.rank else batches()
    with pytest.raises(ValueError, match=r"endless"):
        sok_lite.keras.equal_steps(endless)


# ---- the same data, and other data ---------------------------------------------------------------


def test_what_is_no_dataset_of_batches_is_refused_on_one_rank_too(comm):
    array = r"{}. Make one of arrays: .*from_tensor_slices"
    rows = r"elements of .*Call batch\(\) before"
    sparse = batches().map(lambda x, y: (tf.sparse.from_dense(x), y))
    for data, error, text in (
        ((X, Y), TypeError, array.format("a tuple")),
        (X, TypeError, array.format("a ndarray")),
        (batches().unbatch(), ValueError, rows),
        (batched((X[:, 0], Y), 8).unbatch(), ValueError, rows),
        (sparse, TypeError, "a SparseTensor. .*from_sparse"),
    ):
        for function in (sok_lite.keras.shard, sok_lite.keras.equal_steps):
            with pytest.raises(error, match=f"{function.__name__}.*Received: {text}"):
                function(data)


def shuffled(**seed):
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(41, **seed).batch(BATCH)


def with_a_global_seed(rank):
    tf.random.set_seed(rank)
    return shuffled(seed=3)


OTHER_BATCHES = [
    (with_a_global_seed, r"other seeds of shuffle.*here \[\({rank}, 3\)\].*set_seed"),
    (lambda rank: shuffled(seed=3 + rank), r"other seeds of shuffle.*Give it the same one"),
    (lambda rank: shuffled(), r"without a seed. Give it one"),
    (lambda rank: shuffled(seed=None if rank else 3), r"without a seed"),
    (lambda rank: shuffled(seed=3).take(2 + rank), r"\[2, 3.*batches, by rank"),
    (lambda rank: batched((X + rank, Y), BATCH), r"other arrays.*equal_steps"),
    (lambda rank: batched((X.astype([np.int64, np.int32][rank % 2]), Y), 8), r"other types"),
    (lambda rank: batched((X, Y), 21 + rank), r"other sizes of batches; here \[2"),
    (
        lambda rank: batches().map(lambda *a: a, num_parallel_calls=2, deterministic=False),
        "leaves its order open",
    ),
    (lambda rank: batches().with_options(at_any_time()), "leaves its order open"),
]


def test_shard_tells_of_other_batches_on_all_ranks(comm, once):
    for data, text in OTHER_BATCHES:
        tf.random.set_seed(None)
        batches = data(comm.rank)
        if comm.size == 1:
            assert sok_lite.keras.shard(batches) is batches
            continue
        with pytest.raises(RanksDifferError, match=f"same order.*{text.format(rank=comm.rank)}"):
            sok_lite.keras.shard(batches)


def at_any_time():
    options = tf.data.Options()
    options.deterministic = False
    return options


def test_shard_with_equal_seeds_takes_every_row_once(comm, once):
    tf.random.set_seed(5)
    for data in (shuffled(seed=3), shuffled()):
        mine = np.concatenate([y for _, y in sok_lite.keras.shard(data)])
        assert sorted(allgather(mine).numpy().ravel()) == sorted(Y.ravel())


def test_shard_cuts_ragged_ids_and_texts(comm, once):
    """Of what TensorFlow keeps as parts of another kind no element is looked at."""
    ids = tf.ragged.constant([[i] * (i % 3) for i in range(12)], dtype=tf.int64)
    texts = tf.constant([f"of {i}" for i in range(12)])
    sharded = sok_lite.keras.shard(batched((ids, texts), 4))
    for number, (rows, said) in enumerate(sharded):
        own = range(4 * number, 4 * number + 4)[comm.rank :: comm.size]
        taken = {int(each.decode().split()[1]) for each in said.numpy()}
        assert len(taken) == len(own)
        assert rows.to_list() == [[i] * (i % 3) for i in sorted(taken)]


def told(model, *data, **options):
    """Trains; returns what ranks are told that train the same rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*data, verbose=0, **options)
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "each trains on all rows" in text]


def test_the_same_rows_on_all_ranks_are_told_once(comm, once, keras, sk):
    model, _ = with_table(comm, keras, sk)
    own, callbacks = X + NUM_KEYS * comm.rank, [sk.AllRanks()]
    for given in (
        told(model, batches(), epochs=2, callbacks=callbacks),
        told(model, batches(), epochs=2),  # by itself `fit` looks too
        told(model, X, Y, epochs=2),  # of arrays also where each rank shuffles by itself
    ):
        assert len(given) == (comm.size > 1)
        assert all(f"All {comm.size} ranks" in text and "keras.shard" in text for text in given)
    for data in (sok_lite.keras.shard(batches()), batched((own, Y), BATCH)):
        assert told(model, data) == told(model, data, callbacks=callbacks) == []
    assert told(model, own, Y) == []
    # By chance or on purpose.
    assert told(model, batched((X[:8], Y[:8]), 4)) == []
    assert told(model, batched((X * 0, Y * 0), BATCH)) == []


def test_a_first_batch_of_ragged_ids_and_texts_is_looked_at(comm, once, keras, sk):
    """The model is built by its first step: its weights are made equal before they are compared."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows = sk.Embedding(sk.Table("ragged", DIM), "sum")
            self.head = keras.layers.Dense(1)

        def call(self, features):
            return self.head(self.rows(features["ids"]))

    def data(first):
        features = {"ids": tf.ragged.constant([[first + i] * (i % 3) for i in range(8)])}
        features["text"] = tf.constant([str(i) for i in range(8)])
        return tf.data.Dataset.from_tensors((features, Y[:8])).repeat(2)

    for first, is_told in ((0, comm.size > 1), (100 * comm.rank, False)):
        model = Model()
        model.compile("sgd", "mse")
        assert bool(told(model, data(first), callbacks=[sk.AllRanks()])) is is_told


# ---- backups and checkpoints ---------------------------------------------------------------------


@pytest.mark.full_only("tests/ranks/test_checkpoint.py is the smoke")
def test_a_backup_of_all_ranks_goes_on_as_if_nothing_had_been(comm, once, keras, sk, folder):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 13:  # in the third epoch, on all ranks
                raise KeyboardInterrupt

    def made(seed=7):
        """To trace steps takes longer than all of them."""
        return with_table(comm, keras, sk, seed, run_eagerly=True)

    part, all_ranks = sok_lite.keras.shard(batches()), sk.AllRanks()
    expected, table = made()
    expected.fit(part, epochs=4, verbose=0, callbacks=[all_ranks])
    for number in range(3):  # two ranks do not make one folder at the same time every time
        backup = keras.callbacks.BackupAndRestore(f"{folder}/{keras.__name__}/backup{number}")
        model, _ = made()
        if keras.__name__ == "tf_keras" and comm.size > 1:
            with pytest.raises(NotImplementedError, match="Have all ranks give ModelCheckpoint"):
                model.fit(part, epochs=4, verbose=0, callbacks=[all_ranks, backup])
            return
        with pytest.raises(KeyboardInterrupt):
            model.fit(part, epochs=4, verbose=0, callbacks=[all_ranks, backup, Fails()])
        again, ours = made(9)
        kept = f"{folder}/kept{number}/m.keras"
        callbacks = [all_ranks, backup, keras.callbacks.ModelCheckpoint(kept)]
        again.fit(part, epochs=4, verbose=0, callbacks=callbacks)
        assert not list((folder / keras.__name__).glob(f"backup{number}/*"))
        check_equal(ours, table)
        for one, other in zip(again.layers[-2:], expected.layers[-2:], strict=True):
            np.testing.assert_array_equal(one.get_weights()[0], other.get_weights()[0])


@pytest.mark.parametrize("keras", ["keras"], indirect=True)  # tf_keras' is refused anyway
def test_a_backup_in_folders_of_each_rank_is_refused(comm, once, keras, sk, folder):
    if comm.size == 1:
        pytest.skip("one rank")
    model, _ = with_table(comm, keras, sk)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/rank{comm.rank}")
    with pytest.raises(ValueError, match="one folder that all ranks see.*rank0'.*rank1'"):
        model.fit(batches(), verbose=0, callbacks=[sk.AllRanks(), backup])


def test_a_checkpoint_of_another_rank_is_refused(comm, keras, sk, folder):
    model, table = with_table(comm, keras, sk)
    checkpoint, path = tf.train.Checkpoint(model=model), f"{folder}/{keras.__name__}"
    if comm.size > 1:
        with pytest.warns(UserWarning, match=f"rows of one rank, here of rank {comm.rank} of"):
            checkpoint.write(f"{path}{comm.rank}")
    else:
        checkpoint.write(f"{path}{comm.rank}")
    table.assign([comm.rank], [[9.0] * DIM])
    checkpoint.read(f"{path}{comm.rank}")
    own = np.arange(comm.rank, NUM_KEYS, comm.size)
    np.testing.assert_array_equal(table.export()[1], ROWS[own])
    comm.barrier()
    if comm.size == 1:
        return
    other = (comm.rank + 1) % comm.size
    with pytest.raises(ValueError, match=f"part that rank {other} of {comm.size} has of table"):
        checkpoint.read(f"{path}{other}")
    with lone_rank():
        with pytest.raises(ValueError, match="Received: a restore on rank 0 of 1"):
            checkpoint.read(f"{path}{comm.rank}")
    np.testing.assert_array_equal(table.export()[1], ROWS[own])
    if keras.__name__ == "tf_keras":
        for call in (model.save_weights, model.load_weights):
            with pytest.raises(NotImplementedError, match=r"write over the others'.*weights\.h5"):
                call(path)
