"""What a TableState keeps and refuses, on one rank; ranks/test_elastic.py has jobs of several."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import collectives, job
from sok_lite.comm import CommunicatorError, ElasticCommunicator, SingleCommunicator

pytest.importorskip("horovod.tensorflow")
pytestmark = pytest.mark.usefixtures("initialised")


@pytest.mark.parametrize("on_disk", [False, True])
def test_all_goes_back_to_the_last_commit(tmp_path, on_disk):
    table = sok.DynamicVariable(3, name="t", initializer="ones")
    of_keras = pytest.importorskip("sok_lite.keras").Table("item", 2)
    dense = tf.Variable([1.0, 2.0])
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.5))
    optimizer.optimizer.build([dense])
    path = tmp_path if on_disk else None
    parts = [table, of_keras, dense]
    state = sok.elastic.TableState(parts, optimizer, path, step=0, seen=["a"])

    def step(keys):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(table, tf.ragged.constant([keys], tf.int64), combiners="sum")
            loss = tf.reduce_sum(rows) * tf.reduce_sum(dense**2)
        gradients = tape.gradient(loss, [table, dense])
        optimizer.apply_gradients(zip(gradients, [table, dense], strict=True))
        of_keras.assign(keys, tf.random.uniform([len(keys), 2]))

    def everything():
        keys, rows = sok.export(table)
        states = [table.table.read_state(name, keys) for name in table.table.store.state_names]
        others = [np.asarray(each) for each in (dense, *optimizer.optimizer.variables)]
        others += [each.numpy() for each in of_keras.export()]
        arrays = [keys.numpy(), rows.numpy(), *states, *others]
        return [array.tobytes() for array in arrays], state.step, state.seen

    state.sync()
    step([1, 2])
    state.step, state.seen = 1, ["a", "b"]
    state.commit()
    before = everything()
    for _ in range(2):
        step([2, 3, 4])
        state.step, state.seen = 7, []
        assert everything() != before
        state.restore()
        state.sync()
        assert everything() == before


def test_what_it_refuses():
    table = sok.DynamicVariable(3, name="t")
    with pytest.raises(TypeError, match="static variable, whose rows"):
        sok.elastic.TableState([sok.Variable(tf.ones([4, 2]))])
    with pytest.raises(TypeError, match="must be a sok_lite.OptimizerWrapper. Received: Adam"):
        sok.elastic.TableState(table, keras.optimizers.Adam())
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())
    with pytest.raises(ValueError, match="must be built"):
        sok.elastic.TableState([table, tf.Variable(1.0)], optimizer).save()
    state = sok.elastic.TableState(table)
    state.save()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1]]), combiners="sum"))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    with pytest.raises(ValueError, match="must have the optimizer of its tables.* states of t"):
        state.save()


def test_a_traced_alltoall_takes_other_numbers_of_ranks(monkeypatch):
    def num_counts():
        _, counts = collectives.alltoall(tf.range(3.0), tf.constant([3]))
        return counts.shape

    with tf.Graph().as_default():
        assert num_counts().as_list() == [1]
        monkeypatch.setattr(job, "_communicator", ElasticCommunicator(SingleCommunicator))
        assert num_counts().as_list() == [None]


class Stub:
    """A state of elastic training that ends where it is restored."""

    def on_reset(self):
        pass

    sync = on_reset

    def restore(self):
        raise StopIteration("it is restored")


@pytest.mark.parametrize("in_graph", [False, True])
def test_the_death_of_a_rank_is_told_to_horovod_and_said(in_graph, caplog):
    def dies():
        raise CommunicatorError("Rank 1 has died")

    @sok.elastic.run
    def train(state):
        if in_graph:
            tf.function(lambda: tf.py_function(dies, [], tf.int64))()
        dies()

    with pytest.raises(StopIteration, match="it is restored"):
        train(Stub())
    assert "as the ranks failed: " in caplog.text and "Rank 1 has died" in caplog.text


def test_a_program_that_always_fails_ends():
    """Such as one whose ranks are in different calls; a commit in between starts counting anew."""
    state = sok.elastic.TableState(sok.DynamicVariable(3, name="t"))
    for _ in range(9):
        state.restore()
        state.sync()
    state.commit()
    for _ in range(9):
        state.restore()
        state.sync()
    with pytest.raises(RuntimeError, match="10 failures in a row on 1 ranks, with no commit in be"):
        state.restore()
