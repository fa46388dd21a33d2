"""KvVariables in `tf.train.Checkpoint`: eager and in graphs, whole and in partitions."""

import keras
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from tests.support.saved_graphs import DIM, Trained, adam, saved, tf1

KEYS = [4, -7, 2**63 - 1, -(2**63), 0]


def variable(parts, name="kv", **arguments):
    if parts is not None:
        arguments["partitioner"] = tf1.fixed_size_partitioner(parts)
    return kv.get_kv_variable(name, DIM, **arguments)


def train(ours, optimizer, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.sin(tf.nn.embedding_lookup(ours, tf.constant(keys, tf.int64))))
    watched = list(tape.watched_variables())
    optimizer.apply_gradients(zip(tape.gradient(loss, watched), watched, strict=True))


def known(ours):
    keys, rows = ours.export(cutoff=None)
    return dict(
        zip(
            keys.numpy().tolist(),
            zip(map(tuple, rows.numpy().tolist()), ours.get_counting(keys).numpy(), strict=True),
            strict=True,
        )
    )


def holds(how, ours):
    """Returns what a program may give to a checkpoint, that holds a variable."""
    if how == "variable":
        return {"kv": ours}
    if how == "list":
        return {"kv": list(ours)} if isinstance(ours, kv.PartitionedKvVariable) else {"kv": [ours]}
    module = tf.Module()
    module.table = ours
    module.parts = ours.parts
    return {"kv": module}


@pytest.mark.parametrize("how", ["variable", "list", "module"])
@pytest.mark.parametrize(("parts", "then"), [(None, None), (1, 1), (3, 2)])
def test_a_checkpoint_has_rows_states_and_counts(tmp_path, parts, then, how):
    ours, optimizer = variable(parts), keras.optimizers.Adam(0.1)
    for keys in (KEYS, KEYS[:2], [1, 1]):
        train(ours, optimizer, keys)
    expected = known(ours)
    path = tf.train.Checkpoint(**holds(how, ours), optimizer=optimizer).save(
        str(tmp_path / "model")
    )
    names = [name for name in saved(path) if name.endswith("/values")]
    assert len(names) == 1  # once, by however many ways there is one to it
    train(ours, optimizer, [4, 1, 99])
    after = known(ours)

    again, its_optimizer = variable(then, name="again"), keras.optimizers.Adam(0.1)
    train(again, its_optimizer, [5, 6])
    checkpoint = tf.train.Checkpoint(**holds(how, again), optimizer=its_optimizer)
    checkpoint.restore(path).assert_consumed()
    assert known(again) == expected
    # A new key begins by the name of its table.
    train(again, its_optimizer, [4, 1])
    assert {key: known(again)[key] for key in (4, 1)} == {key: after[key] for key in (4, 1)}


def test_a_restore_that_waits_for_the_variable(tmp_path):
    ours, module = variable(2), tf.Module()
    tf.nn.embedding_lookup(ours, tf.constant(KEYS, tf.int64))
    module.table = ours
    path = tf.train.Checkpoint(module).save(str(tmp_path / "model"))
    late = tf.Module()
    status = tf.train.Checkpoint(late).restore(path)
    late.table = variable(2, name="late")
    status.assert_consumed()
    assert known(late.table) == known(ours)


@pytest.mark.parametrize("parts", [None, 2])
def test_a_checkpoint_in_a_graph(tmp_path, parts):
    def checkpoint(graph):
        return tf.train.Checkpoint(kv=graph.variable, dense=graph.dense)

    ours = Trained(parts, adam)
    with ours.session() as session:
        ours.train([1, 2, 2**63 - 1], [2])
        expected = ours.known([3])
        path = checkpoint(ours).save(str(tmp_path / "model"))
    again = Trained(parts, adam)
    with again.session(initialized=False) as session:
        missing = tf1.report_uninitialized_variables([*again.variable.parts, again.dense])
        assert session.run(missing).size == len(again.variable.parts) + 1
        checkpoint(again).restore(path).assert_consumed().run_restore_ops(session)
        assert not session.run(missing).size
        assert again.known([3]) == expected


def test_a_file_of_a_saver_is_refused(tmp_path):
    ours = Trained(2)
    with ours.session() as session:
        path = tf1.train.Saver().save(session, str(tmp_path / "model"))
    with pytest.raises(RuntimeError, match="restored by a tf.compat.v1.train.Saver"):
        tf.train.Checkpoint(kv=variable(2)).restore(path)
