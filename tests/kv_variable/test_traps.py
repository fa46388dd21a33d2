"""What TFPlus gets wrong (kv_variable's list of defects, by number), and this does instead.

Others are where their facts are: 1, 2, 6 and 14 in test_delta.py, 3 in test_saving.py, 4, 5 and 15
in test_admission.py, 9 and 12 in test_training.py, 10, 11 and 18 in test_get_kv_variable.py, 17 in
test_modes.py.
"""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable
from tests.support.own_process import run_program
from tests.support.patched_names import (
    OF_CHECKPOINTS,
    OF_LAYERS,
    OF_MODELS,
    OF_OPTIMIZERS,
    OF_SESSIONS,
    PROGRAM,
)

tf1 = tf.compat.v1


def in_session(function, *more):
    """Builds a graph, initializes it, and gives its session to what comes after."""
    with tf.Graph().as_default():
        built = function()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            return [after(session, *built) for after in more]


def test_defect_7_arguments_are_checked():
    variable = get_kv_variable("kv", 2)
    wide = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([1]))
    for call in (
        lambda: variable.scatter_add(wide),
        lambda: kv.insert_kv_embedding(variable, [1], [[1.0, 2.0, 3.0]]),
        lambda: variable.delete([0.5]),
        lambda: variable.export(cutoff=-1.0),
        lambda: variable.delete_with_timestamp(-1),
        lambda: variable.sparse_read_with_counts([1, 2], [1]),
        lambda: variable.sparse_read_with_counts([1], [0]),
        lambda: variable.increase_counting([1], [-1]),
    ):
        with pytest.raises((ValueError, TypeError)):
            call()


def test_defect_8_keys_that_training_has_set_to_zeros_are_not_counted():
    def build():
        variable = get_kv_variable("kv", 2, initializer=tf1.constant_initializer(0.1))
        rows = tf.nn.embedding_lookup(variable, [1, 2])
        # The gradient of key 2 is too large for the penalty.
        loss = tf.reduce_sum(rows * [[1e-3, 1e-3], [-50.0, -50.0]])
        step = kv.train.SparseGroupFtrlOptimizer(0.1, l21_regularization_strength=1.0)
        exported = variable.export(), variable.export(cutoff=None)
        return [step.minimize(loss), variable.total_count, variable.total_freq, exported]

    def after(session, step, count, freq, exported):
        session.run(step)
        (keys, _), (all_keys, rows) = session.run(exported)
        assert (rows[0] == 0).all() and (rows[1] != 0).all()
        assert (keys.tolist(), all_keys.tolist()) == ([2], [1, 2])
        assert session.run([count, freq]) == [1, 1]

    in_session(build, after)


def test_defect_16_repeated_keys_of_a_scatter_are_taken_in_order():
    values = np.random.default_rng(4).uniform(0.99, 1.01, (5000, 2)).astype(np.float32)
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    functions |= {"min": np.minimum, "max": np.maximum, "update": lambda _, value: value}
    keys = tf.zeros([5000], tf.int64)
    for operation, function in functions.items():
        row = np.ones(2, np.float32)
        for value in values:
            row = function(row, value)
        variable = get_kv_variable(operation, 2, initializer=tf1.ones_initializer())
        getattr(variable, f"scatter_{operation}")(tf.IndexedSlices(tf.constant(values), keys))
        np.testing.assert_array_equal(variable.export(cutoff=None)[1], [row], operation)


# ---- what the package changes of TensorFlow and Keras --------------------------------------------

BEFORE, _ = PROGRAM.split("import sok_lite as sok\n")
OWN = """
import sok_lite.kv_variable as kv
for name in kv.__all__:
    getattr(kv, name)
print("LOADED", *changes(first, facts()))
"""
# By these an optimizer as it comes trains tables: see bridge/optimizers/patched.py. The others keep
# a table from being left out without a word: see bridge/keras/guard.py.
GUARDED = {*OF_CHECKPOINTS, *OF_LAYERS, *OF_MODELS, *OF_OPTIMIZERS, *OF_SESSIONS}


@pytest.mark.full_only("starts a process; that of TFRA is the smoke")
def test_importing_changes_steps_of_optimizers_and_what_is_guarded():
    text = run_program(BEFORE + "first = facts()\n" + OWN, TF_USE_LEGACY_KERAS="0")
    (line,) = [line for line in text.splitlines() if line.startswith("LOADED")]
    assert set(line.split()[1:]) <= GUARDED and "apply_gradients" in line
