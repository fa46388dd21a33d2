"""TFRA's layers over real ranks, against one rank that has the batches of all."""

import os

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de

DIM, NUM_KEYS, BATCH, STEPS = 3, 30, 6, 4


IN_TURN = "comm"


@pytest.fixture(autouse=True)
def no_names():
    tf.compat.v1.reset_default_graph()


def batch_of(rank, step, shape=None):
    """Keys and output gradients of a rank; in every third step the first rank has none."""
    rng = np.random.default_rng([rank, step])
    if shape is None:
        shape = (0 if rank == 0 and step % 3 == 2 else 5 + 3 * rank, 2)
    return rng.integers(0, NUM_KEYS, shape), rng.normal(size=(*shape, DIM)).astype(np.float32)


def together(comm, step):
    """The batches of all ranks, one after the other."""
    keys, grads = zip(*(batch_of(rank, step) for rank in range(comm.size)), strict=True)
    return np.concatenate(keys), np.concatenate(grads)


def eagerly(function):
    return function


def traced(function):
    signature = [tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None, 2, DIM])]
    return tf.function(function, input_signature=signature)


def trained(layer, optimizer, batches, run):
    """Returns the rows that each step's lookup gave."""
    optimizer = de.DynamicEmbeddingOptimizer(optimizer)

    def step(keys, grads):
        with tf.GradientTape() as tape:
            rows = layer(keys)
            loss = tf.reduce_sum(rows * grads)
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return rows

    call = run(step)
    outputs = [call(tf.constant(keys), tf.constant(grads)).numpy() for keys, grads in batches]
    return outputs, optimizer


def owned(comm, keys):
    return np.array([key for key in keys if key % comm.size == comm.rank], np.int64)


@pytest.mark.parametrize("run", [eagerly, traced], ids=["eager", "tf.function"])
def test_rows_and_states_are_those_of_one_rank_with_all_batches(comm, keras, run):
    made = de.keras.layers_for(keras)
    ours = made.HvdAllToAllEmbedding(DIM, name="table")
    tf.compat.v1.reset_default_graph()
    theirs = made.Embedding(DIM, name="table")  # the name seeds the first rows
    batches = [batch_of(comm.rank, step) for step in range(STEPS)]
    rows, optimizer = trained(ours, keras.optimizers.Adam(0.1), batches, run)
    everything = [together(comm, step) for step in range(STEPS)]
    all_rows, all_optimizer = trained(theirs, keras.optimizers.Adam(0.1), everything, eagerly)
    for step, (found, oracle) in enumerate(zip(rows, all_rows, strict=True)):
        start = sum(len(batch_of(rank, step)[0]) for rank in range(comm.rank))
        np.testing.assert_allclose(found, oracle[start : start + len(found)], atol=1e-5)
    mine = owned(comm, np.unique(np.concatenate([keys.reshape(-1) for keys, _ in everything])))
    keys, values = ours.params.export()
    np.testing.assert_array_equal(np.sort(keys), mine)
    np.testing.assert_allclose(values, theirs.params.lookup(keys), atol=1e-5)
    slots = ours.params.get_slot_variables(optimizer)
    all_slots = theirs.params.get_slot_variables(all_optimizer)
    assert len(slots) == len(all_slots) == 2
    for slot, all_slot in zip(slots, all_slots, strict=True):
        np.testing.assert_allclose(slot.lookup(keys), all_slot.lookup(keys), atol=1e-5)


def test_lookups_of_all_ranks(comm, keras):
    """They insert nothing, and combine, clip and round as one rank does."""
    made = de.keras.layers_for(keras)
    keys = tf.constant(batch_of(comm.rank, 1)[0])
    ragged = tf.ragged.constant([[1, 2], [], [3, 3, 4]][: comm.rank + 2], dtype=tf.int64)
    ours, theirs = made.HvdAllToAllEmbedding(DIM, name="table"), made.Embedding(DIM, name="table")
    rows = ours(ragged)
    assert rows.row_lengths().numpy().tolist() == [2, 0, 3][: comm.rank + 2]
    np.testing.assert_array_equal(rows.flat_values, theirs(ragged).flat_values)
    with tf.GradientTape() as tape:
        rows = de.embedding_lookup_sparse(ours.hvd_variable, ragged, None, combiner="sum")
    expected = de.embedding_lookup_sparse(theirs.shadow, ragged, None, combiner="sum")
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    gradient = tape.gradient(rows, ours.shadow)
    asked = [1, 2] if comm.size == 1 else [1, 2, 3, 4]
    assert sorted(set(gradient.indices.numpy())) == owned(comm, asked).tolist()
    assert int(ours.params.size()) == 0
    arguments = {"value_dtype": "float16", "max_norm": 0.01, "name": "halves"}
    rows = made.HvdAllToAllEmbedding(DIM, **arguments)(keys)
    assert rows.dtype == tf.float16
    tf.compat.v1.reset_default_graph()
    oracle = made.Embedding(DIM, **arguments)(keys)
    np.testing.assert_allclose(tf.cast(rows, tf.float32), tf.cast(oracle, tf.float32), rtol=2e-3)


def model_of(keras, layer):
    ids = keras.Input([2], dtype="int64")
    head = keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Model(ids, head(keras.layers.Flatten()(layer(ids))))


def targets(keys):
    return np.sin(keys.sum(1, keepdims=True)).astype(np.float32)


def data_of(ranks):
    """Keys and targets of ranks, each batch those of one rank after the other."""
    keys = [batch_of(rank, step, (BATCH, 2))[0] for step in range(STEPS) for rank in ranks]
    return np.concatenate(keys), targets(np.concatenate(keys))


def fit(keras, model, optimizer, data, ranks, **options):
    """Trains with the loss of all ranks: gradients are summed over ranks, and not averaged."""

    def loss(wanted, given):
        return ranks * tf.reduce_mean((wanted - given) ** 2)

    model.compile(optimizer, loss, run_eagerly=options.pop("run_eagerly", False))
    keys, wanted = data
    arguments = {"batch_size": BATCH * ranks, "shuffle": False, "verbose": 0, "epochs": 2}
    return model.fit(keys, wanted, **arguments | options)


def test_fit_trains_as_one_rank_with_all_batches_would(comm, keras):
    made = de.keras.layers_for(keras)
    ours = made.HvdAllToAllEmbedding(DIM, name="table")
    model = model_of(keras, ours)
    adagrad = de.DynamicEmbeddingOptimizer(keras.optimizers.Adagrad(0.1), synchronous=True)
    fit(keras, model, adagrad, data_of([comm.rank]), 1)
    tf.compat.v1.reset_default_graph()
    theirs = made.Embedding(DIM, name="table")
    oracle = model_of(keras, theirs)
    adagrad = de.DynamicEmbeddingOptimizer(keras.optimizers.Adagrad(0.1))
    fit(keras, oracle, adagrad, data_of(range(comm.size)), comm.size, run_eagerly=True)
    keys, values = ours.params.export()
    np.testing.assert_array_equal(np.sort(keys), owned(comm, np.sort(theirs.params.export()[0])))
    np.testing.assert_allclose(values, theirs.params.lookup(keys), atol=1e-4)
    for found, wanted in zip(model.layers[-1].weights, oracle.layers[-1].weights, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-4)
    size = int(ours.params.size())
    keys = batch_of(comm.rank, 99, (BATCH, 2))[0] + NUM_KEYS
    model.evaluate(keys, targets(keys), verbose=0)
    assert model.predict(keys, verbose=0).shape == (BATCH, 1)
    assert int(ours.params.size()) == size


@pytest.mark.parametrize("end", ["keras", "weights.h5", "ckpt"])
def test_each_rank_loads_the_tables_that_it_saved(comm, keras, folder, end):
    layer = de.keras.layers_for(keras).HvdAllToAllEmbedding(DIM, name="table")
    model = model_of(keras, layer)
    adam = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1), synchronous=True)
    fit(keras, model, adam, data_of([comm.rank]), 1)
    path = os.path.join(folder, f"m.{end}")
    # The path of the first counts.
    own = path if comm.rank == 0 else os.path.join(folder, f"rank{comm.rank}.{end}")
    de.keras.models.save_model(model, own)
    assert len(os.listdir(folder)) == comm.size
    if end == "keras":
        again = de.keras.models.load_model(path, package=keras, compile=False)
    else:
        tf.compat.v1.reset_default_graph()
        again = model_of(keras, de.keras.layers_for(keras).HvdAllToAllEmbedding(DIM, name="table"))
        de.keras.models.load_weights(again, path)
    for found, wanted in zip(again.layers[1].params.export(), layer.params.export(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    keys = batch_of(comm.rank, 7, (BATCH, 2))[0]
    np.testing.assert_allclose(
        again.predict(keys, verbose=0), model.predict(keys, verbose=0), rtol=1e-5
    )


def test_one_rank_alone_saves_no_part_of_a_table(comm, keras, folder):
    if comm.size == 1:
        pytest.skip("one rank has all rows")
    model = model_of(keras, de.keras.layers_for(keras).HvdAllToAllEmbedding(DIM))
    path = os.path.join(folder, "m.keras")
    de.keras.models.de_hvd_save_model(model, path)
    for save in (model.save, model.save_weights):
        end = "weights.h5" if save == model.save_weights else "keras"
        with pytest.raises(NotImplementedError, match="rows on .* ranks.*de_hvd_save_model"):
            save(os.path.join(folder, f"rank{comm.rank}.{end}"))


def test_a_rank_that_cannot_save_tells_the_others(comm, keras, folder):
    model = model_of(keras, de.keras.layers_for(keras).HvdAllToAllEmbedding(DIM))
    path = os.path.join(folder, "m.keras")
    if comm.rank == 0:
        open(path, "w").close()
    error = FileExistsError if comm.rank == 0 else RuntimeError
    with pytest.raises(error, match="not to be replaced"):
        de.keras.models.de_hvd_save_model(model, path, overwrite=False)
    model(tf.zeros([1, 2], tf.int64))
    for below in ("m", "m.keras"):  # a file is there in place of their folder
        error = FileExistsError if comm.rank == 0 else RuntimeError
        with pytest.raises(error, match="File exists"):
            de.keras.models.de_hvd_save_model(model, os.path.join(path, below))
    de.keras.models.de_hvd_save_model(model, path)


@pytest.mark.full_only("fits for three epochs; each rank that loads what it saved is the smoke")
def test_checkpoints_of_fit_are_decided_by_the_first_rank(comm, keras, folder):
    layer = de.keras.layers_for(keras).HvdAllToAllEmbedding(DIM, name="table")
    model = model_of(keras, layer)
    callback = de.keras.callbacks_for(keras).ModelCheckpoint(
        os.path.join(folder, "{epoch}-{loss:.6f}.keras"), monitor="loss", save_best_only=True
    )
    adam = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1), synchronous=True)
    history = fit(keras, model, adam, data_of([comm.rank]), 1, callbacks=[callback], epochs=3)
    losses = comm.broadcast(np.array(history.history["loss"]), 0).tolist()
    best = [i for i, loss in enumerate(losses) if loss <= min(losses[: i + 1])]
    names = [f"{i + 1}-{losses[i]:.6f}.keras" for i in best]
    of_ranks = [f"{name}.rank{r}of{comm.size}.npz" for name in names for r in range(1, comm.size)]
    assert sorted(os.listdir(folder)) == sorted([*names, *of_ranks])


def test_dense_weights_are_the_roots(comm, keras):
    layer = de.keras.layers_for(keras).Embedding(DIM, initializer=float(comm.rank))
    model = model_of(keras, layer)
    root = comm.size - 1
    model.layers[-1].set_weights([np.full((2 * DIM, 1), comm.rank + 1.0), np.ones(1)])
    adam = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    callback = de.keras.callbacks_for(keras).DEHvdBroadcastGlobalVariablesCallback(root)
    keys, wanted = data_of([comm.rank])
    data = (keys[:BATCH], wanted[:BATCH])
    fit(keras, model, adam, data, 1, callbacks=[callback], epochs=1)
    assert callback.broadcast_done
    variables = adam.variables() if callable(adam.variables) else adam.variables
    for weight in [*model.layers[-1].weights, *variables]:
        mine = np.asarray(weight, np.float64).reshape(-1)
        np.testing.assert_array_equal(mine, comm.broadcast(mine, root))
    keys, rows = layer.params.export()
    assert np.abs(rows.numpy() - comm.rank).max() < 0.5  # each has its own


def test_what_ranks_cannot_look_up_is_refused_before_any_waits(comm, keras):
    if comm.size == 1:
        pytest.skip("one rank looks up what any layer does")
    made = de.keras.layers_for(keras)
    before = comm.turn
    for arguments in ({"key_dtype": "string"}, {"value_dtype": "int32", "initializer": 0}):
        with pytest.raises(TypeError, match="integer keys, of rows of float32"):
            made.HvdAllToAllEmbedding(DIM, name="_".join(arguments), **arguments)
    with pytest.raises(ValueError, match="mpi_size"):
        made.HvdAllToAllEmbedding(DIM, mpi_size=comm.size + 1)
    assert comm.turn == before
