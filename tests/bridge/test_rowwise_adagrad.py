"""Row-wise Adagrad from Keras to the rows; test_every_optimizer.py compares it with its twin."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras as sk
from sok_lite.optimizers import GroupAdam, RowWiseAdagrad
from tests.support.own_process import run_with_tensorflow

KEYS = np.array([5, -7, 2**40, 3, 11])


def test_rows_of_one_element_and_dense_variables_are_those_of_adagrad(mode):
    settings = {"epsilon": 1e-3, "initial_accumulator_value": 0.2, "weight_decay": 0.05}
    found = []
    for make in (RowWiseAdagrad, keras.optimizers.Adagrad):
        optimizer = sok.OptimizerWrapper(make(0.1, **settings))
        table, dense = sok.DynamicVariable(1, initializer="ones"), tf.Variable([0.5, -1.0])

        @mode
        def step(rows, grad, optimizer=optimizer, table=table, dense=dense):
            optimizer.apply_gradients([(tf.IndexedSlices(rows, KEYS), table), (grad, dense)])

        for seed in range(4):
            drawn = np.random.default_rng(seed).normal(0, 1, 7).astype(np.float32)
            step(tf.constant(drawn[:5, None]), tf.constant(drawn[5:]))
        found.append([sok.export(table)[1].numpy(), dense.numpy()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def model_of(name):
    ids = keras.Input([2], dtype="int64")
    rows = sk.Table(name, 8)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(RowWiseAdagrad(0.1), "mse")
    return model


def test_fit_saves_and_goes_on_with_one_number_for_a_row(tmp_path):
    x = np.random.default_rng(0).integers(0, 50, (64, 2))
    y = (x[:, :1] % 3).astype(np.float32)
    model = model_of("rowwise_item")
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    states = sok.optimizer_states(model.layers[1].variable)
    assert {name: each.dimension for name, each in states.items()} == {"accumulator": 1}
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    for each in (model, again):
        assert type(each.optimizer) is RowWiseAdagrad
        each.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.predict(x, verbose=0), again.predict(x, verbose=0))


@pytest.mark.full_only("starts a process")
def test_a_program_that_only_loads_a_model_knows_it_by_its_name(tmp_path):
    ids = keras.Input([2], dtype="int64")
    rows = sk.Table("own_item", 2, optimizer=RowWiseAdagrad(0.5))(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(GroupAdam(0.1), "mse")
    model.save(tmp_path / "m.keras")
    program = """
    import keras
    import sok_lite.keras
    model = keras.models.load_model("m.keras")
    print(type(model.optimizer).__name__, type(model.get_layer("own_item").optimizer).__name__)
    """
    text = run_with_tensorflow(program, tmp_path)
    assert text.split() == ["GroupAdam", "RowWiseAdagrad"]
