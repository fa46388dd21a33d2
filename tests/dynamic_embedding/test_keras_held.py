"""A `Variable` that a layer of a program's own holds: never left out without a word."""

import keras
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import dynamic_embedding as de


def model_of(package, in_list):
    class Holder(package.layers.Layer):
        def __init__(self):
            super().__init__()
            policy = de.FrequencyRestrictPolicy
            params = de.Variable(dim=2, name="held", restrict_policy=policy)
            self.params = [params] if in_list else params

        def call(self, x):
            return x

    model = package.Sequential([Holder()])
    model.build((None, 2))
    return model


@pytest.mark.parametrize("package", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("in_list", [False, True])
def test_saving_refuses_to_leave_it_out(package, in_list, tmp_path):
    model = model_of(package, in_list)
    for save, name in ((model.save, "m.keras"), (model.save_weights, "m.weights.h5")):
        with pytest.raises(NotImplementedError, match=r"rows of 'held.*:0', 'held.*:0' out"):
            save(str(tmp_path / name))


@pytest.mark.parametrize("package", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("in_list", [False, True])
def test_a_checkpoint_has_it(package, in_list, tmp_path):
    model = model_of(package, in_list)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))
    saved = [name for name, _ in tf.train.list_variables(path) if name.endswith("/keys")]
    assert len(saved) == 2  # the rows, and what the policy notes
