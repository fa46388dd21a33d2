"""Ids of floats: Keras would make float32 numbers of them, in which large ones are equal."""

import numpy as np
import pytest

FROM = 10**9
IDS = np.arange(FROM, FROM + 12).reshape(4, 3)
LABELS = np.ones((4, 1), np.float32)


def built(keras, sk, dtype="int64", inputs=("ids",)):
    """A model that sums the rows of its inputs."""
    taken = [keras.Input([3], dtype=dtype, name=name) for name in inputs]
    table = sk.Table("item", 4)
    rows = [keras.layers.Flatten()(table(each)) for each in taken]
    summed = rows[0] if len(rows) == 1 else keras.layers.Add()(rows)
    model = keras.Model(taken[0] if len(taken) == 1 else taken, keras.layers.Dense(1)(summed))
    model.compile("sgd", "mse")
    return model, table


def call(model, method, x):
    arguments = () if method == "predict" else (LABELS,)
    return getattr(model, method)(x, *arguments, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_ids_of_floats_that_would_become_equal_are_refused(keras, sk, method):
    model, table = built(keras, sk)
    text = r"Input 'ids' takes int64, and its array is float64 with 1000000001\. Keras would make "
    with pytest.raises(ValueError, match=text):
        call(model, method, IDS.astype(np.float64))
    assert len(table) == 0
    call(model, "fit", IDS)
    assert len(table) == IDS.size


def test_the_input_is_told_by_its_name_or_its_place(keras, sk):
    model, _ = built(keras, sk, inputs=("a", "b"))
    wrong = IDS.astype(np.float64)
    for x in ({"a": IDS, "b": wrong}, [IDS, wrong]):
        with pytest.raises(ValueError, match="Input 'b' takes int64"):
            call(model, "fit", x)


def test_a_missing_id_is_refused(keras, sk):
    model, _ = built(keras, sk)
    ids = np.arange(12, dtype=np.float64).reshape(4, 3)
    ids[1, 2] = np.nan
    with pytest.raises(ValueError, match="float64 with nan"):
        call(model, "fit", ids)


def test_other_arrays_are_taken_as_before(keras, sk):
    model, table = built(keras, sk)
    call(model, "fit", np.arange(12, dtype=np.float64).reshape(4, 3))  # float32 holds these
    assert sorted(np.asarray(table.export()[0]).tolist()) == list(range(12))
    call(model, "predict", IDS.astype(np.int32))
    # Without a table they are Keras' own matter.
    ids = keras.Input([3], dtype="int64")
    cast = keras.layers.Embedding(2, 1)(ids * 0)
    other = keras.Model(ids, keras.layers.Flatten()(cast))
    assert other.predict(IDS.astype(np.float64), verbose=0).shape == (4, 3)
