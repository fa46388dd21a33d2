"""How long steps of `fit` wait for batches, as metrics tell it."""

import time

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras
from sok_lite.engine.work_counters import INPUT_WAITS

WAIT_S = 0.05


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    return pytest.importorskip(request.param)


def test_fit_counts_its_batches_and_its_wait_for_them(keras, monkeypatch):
    sk = sok_lite.keras.classes_for(keras)
    ids = keras.Input([3], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(sk.Embedding(sk.Table("waits", 2), "sum")(ids)))
    model.compile("sgd", "mse")
    x, y = np.arange(12).reshape(4, 3), np.ones([4, 1], np.float32)

    def rows():
        for _ in range(5):
            time.sleep(WAIT_S)
            yield x, y

    slow = tf.data.Dataset.from_generator(
        rows, output_signature=(tf.TensorSpec([4, 3], tf.int64), tf.TensorSpec([4, 1]))
    )
    monkeypatch.setattr(INPUT_WAITS, "is_read", False)
    number = INPUT_WAITS.number
    model.fit(slow, verbose=0)
    assert INPUT_WAITS.number == number  # nobody has asked
    sok.metrics.prometheus(model)
    model.compile("sgd", "mse")
    seconds, begun = INPUT_WAITS.seconds, time.monotonic()
    model.fit(slow, epochs=2, verbose=0)
    assert INPUT_WAITS.number == number + 10
    # At least the first batch of each epoch is nowhere before it is asked for.
    assert 2 * WAIT_S * 0.9 < INPUT_WAITS.seconds - seconds < time.monotonic() - begun
    text = sok.metrics.prometheus(model)
    assert f'sok_input_batches_total{{rank="0"}} {INPUT_WAITS.number}' in text


def test_a_loop_of_ones_own_counts_its_batches():
    number, seconds = INPUT_WAITS.number, INPUT_WAITS.seconds

    def slow():
        for batch in range(3):
            time.sleep(WAIT_S)
            yield batch

    assert list(sok.metrics.timed_input(slow())) == [0, 1, 2]
    assert INPUT_WAITS.number == number + 3
    assert INPUT_WAITS.seconds - seconds > 3 * WAIT_S * 0.9
