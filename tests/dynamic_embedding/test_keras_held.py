"""A `Variable` that a layer of a program's own holds: never left out without a word."""

import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de


@pytest.mark.parametrize("hold", [lambda v: v, lambda v: [v], lambda v: {"a": v}])
def test_files_refuse_to_leave_it_out_and_a_checkpoint_has_it(keras, hold, tmp_path):
    def model_of(key):
        params = de.Variable(dim=2, name="held", restrict_policy=de.FrequencyRestrictPolicy)
        params.upsert([key], [[key, 0.5]])

        class Holder(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.params = hold(params)  # Keras 3 hides what is in lists from TensorFlow

            def call(self, x):
                return x

        model = keras.Sequential([Holder()])
        model.build((None, 2))
        return model, params

    model, _ = model_of(5)
    for save, name in ((model.save, "m.keras"), (model.save_weights, "m.weights.h5")):
        with pytest.raises(NotImplementedError, match=r"rows of 'held.*:0', 'held.*:0' out"):
            save(str(tmp_path / name))
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))
    saved = [name for name, _ in tf.train.list_variables(path) if name.endswith("/keys")]
    assert len(saved) == 2  # the rows, and what the policy notes
    model, params = model_of(7)
    tf.train.Checkpoint(model=model).read(path)
    keys, rows = params.export()
    assert (keys.numpy().tolist(), rows.numpy().tolist()) == ([5], [[5.0, 0.5]])
