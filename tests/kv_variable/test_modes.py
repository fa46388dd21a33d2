"""Lookups that train and lookups that predict: by flag, by variable, by call, by block."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable, kv_variable_ops

tf1 = tf.compat.v1
IDS = np.array([[3, -4], [3, 2**40]])


def ones(made, **arguments):
    return made(initializer=tf1.ones_initializer(), **arguments)


def is_inserting(here, variable, look_up):
    """Looks new keys up; returns whether they were inserted and have begun with ones."""
    before = len(here.run(variable.export)[0])
    rows = here.run(look_up, IDS)
    count = len(here.run(variable.export)[0]) - before
    assert (count, rows.min(), rows.max()) in [(3, 1.0, 1.0), (0, 0.0, 0.0)]
    return count == 3


def plain(variable, **arguments):
    function = kv.embedding_lookup if arguments else tf.nn.embedding_lookup
    return lambda ids: function(variable, ids, **arguments)


def sparse(variable, **arguments):
    function = kv.embedding_lookup_sparse if arguments else tf.nn.embedding_lookup_sparse
    return lambda ids: function(
        variable, tf.RaggedTensor.from_tensor(ids), None, combiner="mean", **arguments
    )


@pytest.mark.parametrize("kind", [plain, sparse])
def test_the_flag_of_the_module_a_variable_and_a_call_say_the_mode(here, made, kind, monkeypatch):
    """The narrower outweighs the wider one, when a lookup is built."""

    def inserts(variable, **arguments):
        return is_inserting(here, variable, kind(variable, **arguments))

    first, second, third = ones(made), ones(made, name="second"), ones(made, name="third")
    monkeypatch.setattr(kv_variable_ops, "IS_TRAINING", False)
    assert not inserts(first)
    if here.is_graph:
        built = here.step(kind(first), IDS)
        monkeypatch.setattr(kv_variable_ops, "IS_TRAINING", True)
        assert (built() == 0).all()  # as it was built
    monkeypatch.setattr(kv_variable_ops, "IS_TRAINING", True)
    with kv.training_mode(False):
        assert not kv_variable_ops.IS_TRAINING
        with kv.training_mode(True):
            assert kv_variable_ops.IS_TRAINING
        assert not inserts(first)
    assert kv_variable_ops.IS_TRAINING and inserts(first)
    second.training = False
    assert not inserts(second)
    second.training = True
    assert not inserts(second, training=False)
    with kv.training_mode(False):
        assert inserts(second)
        third.training = False
        assert inserts(third, training=True)


def test_a_mode_is_a_bool_and_ends_with_its_block():
    for wrong in (None, 1, "no"):
        with pytest.raises(TypeError, match="training"), kv.training_mode(wrong):
            pass
    with pytest.raises(TypeError, match="`training` must be"):
        kv.embedding_lookup(get_kv_variable("kv", 2), [1], training=1)
    with pytest.raises(KeyError), kv.training_mode(False):
        raise KeyError
    assert kv_variable_ops.IS_TRAINING


@pytest.mark.parametrize("kind", [plain, sparse])
def test_inference_mode_holds_when_a_lookup_runs(here, made, kind):
    variable = ones(made)
    step = here.step(kind(variable), IDS)
    here.run(variable.export)  # of a graph: initializes it
    with sok.inference_mode():
        assert (step() == 0).all()
    assert here.run(variable.export)[0].shape == (0,)
    with sok.inference_mode("initial"):
        assert (step() == 1).all()
    assert here.run(variable.export)[0].shape == (0,)
    assert (step() == 1).all()
    assert len(here.run(variable.export)[0]) == 3


def test_what_a_missing_key_gives_may_be_said(here, made):
    variable = ones(made)
    for missing, number in (("initial", 1.0), ("zeros", 0.0)):
        rows = here.run(lambda ids, m=missing: variable.sparse_read(ids, None, False, m), IDS)
        assert (rows == number).all()
    assert here.run(variable.export)[0].shape == (0,)
    with pytest.raises(ValueError, match="`missing`"):
        variable.sparse_read([1], missing="ones")


def test_a_gradient_of_a_prediction_inserts_what_it_trains():
    variable = get_kv_variable("kv", 2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(kv.embedding_lookup(variable, [1], training=False))
    gradient = tape.gradient(loss, variable)
    assert gradient.indices.numpy().tolist() == [1] and variable.export()[0].shape == (0,)


# ---- names of TFPlus -----------------------------------------------------------------------------


def test_the_sizes_of_a_graph_by_name():
    with tf.Graph().as_default():
        with tf1.name_scope("user"):
            tf.constant(1)
        user = get_kv_variable("user", 2)
        with tf1.variable_scope("a"):
            item = get_kv_variable("item", 2, partitioner=tf1.fixed_size_partitioner(2))
        rows = [tf.nn.embedding_lookup(user, [1]), tf.nn.embedding_lookup(item, [1, 2, 3])]
        sizes = kv_variable_ops.get_kv_feature_size()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(rows)
            assert session.run(sizes) == {"user": 1, "a/item": 3}
        assert [part.get_generic_name() for part in item] == ["a/item"] * 2
        assert user.get_generic_name() == "user"


def test_the_module_has_the_functions_of_savers():
    from sok_lite import kv_variable as package

    names = [name for name in package.__all__ if name.startswith(("enable_", "disable_", "set_"))]
    assert len(names) == 8
    for name in names:
        assert getattr(kv_variable_ops, name) is getattr(package, name)


def test_what_tfplus_has_and_a_table_lacks_says_what_to_use():
    variable = get_kv_variable("kv", 2)
    for method, instead in (
        ("apply_snapshot", "Saver"),
        ("dynamic_restore", "any number of partitions"),
        ("load_remote_storage", "kv_options"),
        ("add_multi_level_hash", "get_kv_variable"),
    ):
        with pytest.raises(NotImplementedError, match=rf"{method}\(\).*{instead}"):
            getattr(variable, method)()
