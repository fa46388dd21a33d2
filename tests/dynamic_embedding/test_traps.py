"""What TFRA gets wrong and no other module tries: costs, states, patches at import."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
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


def test_initial_values_are_drawn_for_missing_keys_alone(monkeypatch):
    variable = de.Variable(dim=2, initializer=keras.initializers.RandomNormal(seed=1))
    variable.upsert(np.arange(1000), np.ones((1000, 2)))
    table, drawn = variable.rows.table, []
    draw_launch = table.initializer.draw_launch

    def noted(backend, row_dtype, out, keys, seed, rows=None):
        drawn.append(keys.size if rows is None else int((rows == 2**32 - 1).sum()))
        return draw_launch(backend, row_dtype, out, keys, seed, rows)

    monkeypatch.setattr(type(table.initializer), "draw_launch", lambda _, *args: noted(*args))
    variable.lookup(np.arange(1000))
    assert sum(drawn) == 0
    rows = variable.lookup([5, 5000, 7, 6000, 5000]).numpy()
    assert 2 <= sum(drawn) <= 3 and (rows[[0, 2]] == 1).all() and (rows[1] == rows[4]).all()


def trained(variables, optimizer, ids):
    """Takes one step on the same keys of several variables."""
    shadows = [variable.get_trainable_by_name("t") for variable in variables]
    with tf.GradientTape() as tape:
        rows = [de.embedding_lookup(variable, ids, name="t") for variable in variables]
        loss = tf.add_n([tf.reduce_sum(each) for each in rows])
    optimizer.apply_gradients(zip(tape.gradient(loss, shadows), shadows, strict=True))


def test_a_graph_grows_by_the_same_for_each_table():
    def num_operations(num_tables):
        variables = [de.Variable(dim=2, name=f"v{i}") for i in range(num_tables)]
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
        step = tf.function(lambda ids: trained(variables, optimizer, ids))
        graph = step.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
        return len(graph.get_operations())

    one, two, four, eight = map(num_operations, (1, 2, 4, 8))
    assert eight - four <= 2 * (four - two) + 8 <= 4 * (two - one) + 24
    assert eight < 8 * one


def tables_after_a_step(optimizer, traced):
    """Trains a variable that nobody holds afterwards; returns references to its tables."""
    variable = de.Variable(dim=2, restrict_policy=de.FrequencyRestrictPolicy)
    shadow = variable.get_trainable_by_name("t")

    def step(ids):
        with tf.GradientTape() as tape:
            rows = de.embedding_lookup(variable, ids, name="t")
            ragged = tf.RaggedTensor.from_row_lengths(ids, [3])
            combined = de.embedding_lookup_sparse(variable, ragged, None, name="t")
            loss = tf.reduce_sum(rows) + tf.reduce_sum(combined)
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    (tf.function(step) if traced else step)(tf.range(3, dtype=tf.int64))
    assert int(variable.size()) == int(variable.restrict_policy.status.size()) == 3
    tables = variable.rows.table, variable.restrict_policy.status.rows.table
    return [weakref.ref(table) for table in tables]


@pytest.mark.parametrize("traced", [False, True])
def test_a_trained_variable_is_freed_while_its_optimizer_lives(traced):
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    tables = tables_after_a_step(optimizer, traced)
    gc.collect()
    assert [table() for table in tables] == [None, None]


def test_there_are_no_buffers_to_skip():
    assert de.shadow_ops.DEResourceVariable is de.DEResourceVariable
    variable = de.Variable(dim=2)
    shadow = variable.get_trainable_by_name("t")
    de.embedding_lookup(variable, tf.constant([1], tf.int64), name="t")
    holders = (shadow, variable, variable.rows)
    parts = [part for holder in holders for part in [holder, *vars(holder).values()]]
    assert not any(isinstance(part, de.DEResourceVariable) for part in parts)


# ---- what the package changes of TensorFlow and Keras --------------------------------------------

BEFORE, AFTER = PROGRAM.split("import sok_lite as sok\n")
OWN = """
from sok_lite import dynamic_embedding as de
for name in de.__all__:
    getattr(de, name)
print("LOADED", *changes(first, facts()))
variable = de.Variable(dim=2, restrict_policy=de.TimestampRestrictPolicy)
optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
shadow = variable.get_trainable_by_name("t")
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(de.embedding_lookup(variable, tf.constant([1], tf.int64), name="t"))
optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
variable.restrict(1)
print("TRAINED", *changes(first, facts()))
try:
    tf.TensorShape(None).as_list()
except ValueError:
    print("UNKNOWN_SHAPES_RAISE")
"""
# Those of the first three keep a table from being left out without a word: bridge/keras/guard.py.
GUARDED = {*OF_CHECKPOINTS, *OF_LAYERS, *OF_MODELS, *OF_OPTIMIZERS, *OF_SESSIONS}
# What `tf.saved_model.save` calls: models are saved in folders with their tables.
GUARDED.add("save_and_return_nodes")


@pytest.mark.full_only("tests/bridge/test_no_patches.py is the smoke")
def test_importing_changes_nothing_of_tensorflow_and_keras():
    text = run_program(BEFORE + "first = facts()\n" + OWN, TF_USE_LEGACY_KERAS="0")
    found = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert found["LOADED"] == []
    assert set(found["TRAINED"]) <= GUARDED
    assert "UNKNOWN_SHAPES_RAISE" in found
