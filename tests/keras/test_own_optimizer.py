"""A table with an optimizer of its own; tests/ranks/test_keras_matrix.py has what it learns."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

IDS = np.random.default_rng(0).integers(0, 30, (64, 2))
Y = (IDS.sum(1, keepdims=True) % 3).astype(np.float32)


def model_of(keras, sk, own, optimizer="sgd"):
    """A model of two tables, of which the second has an optimizer of its own."""
    keras.utils.set_random_seed(2)
    ids = keras.Input([2], dtype="int64")
    tables = [sk.Table("common", 3), sk.Table("apart", 3, optimizer=own)]
    rows = [keras.layers.Flatten()(table(ids)) for table in tables]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model.compile(optimizer, "mse")
    return model


def fit(model, epochs=2, **options):
    options = {"batch_size": 16, "shuffle": False, "verbose": 0} | options
    return model.fit(IDS, Y, epochs=epochs, **options)


def table_of(model, name="apart"):
    return model.get_layer(name)


def rows_of(model):
    return [table_of(model, name).export()[1].numpy() for name in ("common", "apart")]


def test_each_table_has_the_states_of_its_optimizer_and_its_own_rate(keras, sk):
    own = keras.optimizers.Adagrad(0.1)
    model = model_of(keras, sk, own, keras.optimizers.Adam(0.01))
    fit(model)
    assert table_of(model).optimizer is own
    states = [set(sok.optimizer_states(table_of(model, n).variable)) for n in ("common", "apart")]
    assert states == [{"m", "v"}, {"accumulator"}]
    assert int(own.iterations) == int(model.optimizer.iterations) == 8
    common, apart = rows_of(model)
    own.learning_rate.assign(0.0)
    fit(model)
    assert not np.array_equal(rows_of(model)[0], common)
    np.testing.assert_array_equal(rows_of(model)[1], apart)


def test_what_is_saved_goes_on_as_what_was_not(keras, sk, tmp_path):
    rate = keras.optimizers.schedules.ExponentialDecay(0.3, 3, 0.5)
    model = model_of(keras, sk, keras.optimizers.Adam(rate))
    fit(model)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    for each in (model, again):
        fit(each)
        assert int(table_of(each).optimizer.iterations) == 16
    for one, other in zip(rows_of(model), rows_of(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_resumes_it(keras, sk, tmp_path):
    def made():
        return model_of(keras, sk, keras.optimizers.Adam(0.1))

    whole, broken, resumed = made(), made(), made()
    fit(whole, 4)
    fit(broken, 2, callbacks=[sk.Checkpoint(tmp_path)])
    if keras.__name__ == "keras":  # the checkpoint's rate counts; under tf_keras the program's
        table_of(resumed).optimizer.learning_rate.assign(0.7)
    fit(resumed, 4, callbacks=[sk.Checkpoint(tmp_path)])
    for one, other in zip(rows_of(whole), rows_of(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_that_is_skipped_is_skipped_for_all(keras, sk):
    own = keras.optimizers.Adam(0.1)
    package = keras.optimizers if keras.__name__ == "keras" else keras.mixed_precision
    scaled = package.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model, plain = model_of(keras, sk, own, scaled), model_of(keras, sk, "adam")
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    table_of(plain).optimizer.learning_rate.assign(0.1)
    for each in (model, plain):
        fit(each)
    for one, other in zip(rows_of(model), rows_of(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # unscaled
    before, count = rows_of(model), int(own.iterations)
    model.train_on_batch(IDS, np.full_like(Y, np.inf))
    for one, other in zip(rows_of(model), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(own.iterations) == count


def test_tables_may_share_one_and_copies_have_their_own(keras, sk):
    own = keras.optimizers.Adagrad(0.1)
    tables = [sk.Table(name, 2, optimizer=own) for name in "ab"]
    ids = keras.Input([2], dtype="int64")
    rows = sk.Embeddings(tables)([ids, ids])
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(sum(rows))))
    model.compile("sgd", "mse")
    fit(model)
    assert int(own.iterations) == 8
    copy = type(tables[0]).from_config(tables[0].get_config())
    assert copy.optimizer is not own and type(copy.optimizer) is type(own)


def test_a_loop_of_a_programs_own_trains_it(keras, sk):
    own, optimizer = keras.optimizers.SGD(1.0), keras.optimizers.SGD(0.5)
    tables = [sk.Table("x", 2, "zeros"), sk.Table("y", 2, "zeros", optimizer=own)]
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(table(tf.constant([7]), training=True)) for table in tables)
    variables = [table.variable for table in tables]
    pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
    optimizer.apply_gradients(pairs)
    assert [table.export()[1].numpy().tolist() for table in tables] == [[[-0.5] * 2], [[-1.0] * 2]]
    with pytest.raises(NotImplementedError, match="'y' has an optimizer of its own"):
        sok.OptimizerWrapper(keras.optimizers.SGD(0.5)).apply_gradients(pairs)


def test_optimizers_that_cannot_are_refused(keras, sk):
    with pytest.raises(TypeError, match="`optimizer` of table 'a' must be an optimizer of"):
        sk.Table("a", 2, optimizer=tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(TypeError, match="OptimizerWrapper. Give the SGD that it wraps"):
        sk.Table("a", 2, optimizer=sok.OptimizerWrapper(keras.optimizers.SGD(0.1)))
    with pytest.raises(NotImplementedError, match="cannot update rows of table 'a': .* Use Adam"):
        sk.Table("a", 2, optimizer=keras.optimizers.Adafactor(0.1))
    with pytest.raises(ValueError):
        sk.Table("a", 2, optimizer="no such")
    with pytest.raises(ValueError, match="`partitioner` must be one of mod, hash. Received: .*'x'"):
        sk.Table("a", 2, partitioner="x")
    package = keras.optimizers if keras.__name__ == "keras" else keras.mixed_precision
    scaled = package.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(NotImplementedError, match="which is a LossScaleOptimizer. Leave that out"):
        sk.Table("a", 2, optimizer=scaled)
