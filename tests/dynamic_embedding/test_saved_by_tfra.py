"""Checkpoints that TFRA has written, in a program that has changed the import and nothing else."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import dynamic_embedding as de
from sok_lite.bridge.tf_private import SaveableObject, SaveSpec
from sok_lite.cli.main import main

# Of the real TFRA, with what it said of itself: tools/record_tfra_files.py.
RECORDED = Path(__file__).parents[1] / "cli" / "data" / "tfra"
CHECKPOINT = str(RECORDED / "checkpoint_of_tensorflow" / "saved")
FOUND = json.loads((RECORDED / "expected.json").read_text())["cases"]["checkpoint_of_tensorflow"]
Trackable = tf.__internal__.tracking.Trackable


def held(table):
    keys, rows = (each.numpy().tolist() for each in table.export())
    return dict(zip(keys, rows, strict=True))


def recorded(name):
    return dict(zip(FOUND[name]["keys"], FOUND[name]["values"], strict=True))


def variables(shards=1):
    devices = ["/CPU:0"] * shards
    made = {
        "table": de.get_variable("ck/emb", dim=3, devices=devices),
        "other": de.get_variable("pair", dim=2, value_dtype=tf.float64, devices=devices),
        "empty": de.get_variable("none", dim=4, devices=devices),
    }
    for variable in made.values():
        variable.upsert([12345], np.ones([1, variable.dim], variable.value_dtype.as_numpy_dtype))
    return made


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_of_tfra_is_restored(tables_on, shards):
    made = variables(shards)
    with pytest.warns(RuntimeWarning, match="'ck/emb' were restored from a checkpoint of TFRA"):
        status = tf.train.Checkpoint(**made).read(CHECKPOINT)
    status.assert_existing_objects_matched()
    for variable in made.values():
        assert held(variable) == recorded(variable.name)


def test_the_command_of_the_warning_converts_the_states(tmp_path):
    with pytest.warns(RuntimeWarning, match="`sok-lite convert") as told:
        tf.train.Checkpoint(**variables()).restore(CHECKPOINT)
    command = re.search("`sok-lite (.*?)`", str(told[0].message))[1]
    folder = str(tmp_path / "converted")
    # An older TensorFlow does not tell a variable what it is restored from.
    given = {"FOLDER": folder, "CHECKPOINT.index": f"{CHECKPOINT}.index"}
    assert main([given.get(word, word) for word in shlex.split(command)]) == 0
    assert main(["inspect", folder]) == 0


def test_what_is_made_after_the_restore_has_its_rows():
    checkpoint = tf.train.Checkpoint()
    checkpoint.restore(CHECKPOINT)
    with pytest.warns(RuntimeWarning, match="of TFRA"):
        checkpoint.table = de.Variable(name="ck/emb", dim=3)
    assert held(checkpoint.table) == recorded("ck/emb")


def test_a_graph_restores_it():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = de.get_variable("ck/emb", dim=3)
        session.run(variable.upsert([12345], np.ones([1, 3], np.float32)))
        with pytest.warns(RuntimeWarning, match="of TFRA"):
            status = tf.train.Checkpoint(table=variable).restore(CHECKPOINT)
        status.run_restore_ops(session)
        keys, rows = session.run(variable.export())
    assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == recorded("ck/emb")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": "users"}, "'ck/emb' where 'users' is to be restored.*name='ck/emb'"),
        ({"dim": 4}, "Expected shape .9, 4. for value of 'ck/emb', got .9, 3."),
        ({"value_dtype": tf.float64}, "expected dtype double|dtype"),
    ],
)
def test_another_variable_is_refused_and_as_it_was(arguments, error):
    variable = de.Variable(**{"name": "ck/emb", "dim": 3} | arguments)
    row = np.ones([1, variable.dim], variable.value_dtype.as_numpy_dtype)
    variable.upsert([12345], row)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=error):
        tf.train.Checkpoint(table=variable).restore(CHECKPOINT)
    assert held(variable) == {12345: row[0].tolist()}


class Table(Trackable):
    """Saves tensors by the names that a table of TFRA has for them."""

    def __init__(self, tensors):
        self.tensors = tensors

    def _gather_saveables_for_checkpoint(self):
        def saveable(name):
            specs = [SaveSpec(tensor, "", name + end) for end, tensor in self.tensors.items()]
            return SaveableObject(None, specs, name)

        return {"table": saveable}


def as_of_tfra(name, *shards):
    """Returns what has the children of a variable of TFRA, with the tensors of each shard."""
    params, listed = Trackable(), Trackable()
    for number, tensors in enumerate(shards):
        listed._track_trackable(Table(tensors), str(number))
    params._track_trackable(listed, f"tables_of_{name}")
    return params


KEYS, ROWS = np.arange(6), np.arange(12, dtype=np.float32).reshape(6, 2)
WHOLE = {"-keys": tf.constant(KEYS), "-values": tf.constant(ROWS)}


def model_with(layer):
    ids = tf_keras.Input([3], dtype="int64")
    rows = tf_keras.layers.Flatten()(layer(ids))
    return tf_keras.Model(ids, tf_keras.layers.Dense(1)(rows))


def test_load_weights_of_a_model_of_tfra(tmp_path):
    class Embedding(tf_keras.layers.Layer):
        def build(self, shape):
            self.shadow = self.add_weight(shape=[0, 2], name="shadow")
            self.params = as_of_tfra("user-parameter", WHOLE)

        def call(self, ids):
            return tf.gather(tf.constant(ROWS), ids)

    theirs = model_with(Embedding())
    theirs.save_weights(str(tmp_path / "w"))
    layer = de.keras.layers_for(tf_keras).Embedding(2, name="user")
    ours = model_with(layer)
    with pytest.warns(RuntimeWarning, match="'user-parameter' were restored"):
        ours.load_weights(str(tmp_path / "w"))
    np.testing.assert_array_equal(layer.params.lookup(KEYS), ROWS)
    ids = np.array([[0, 1, 5]])
    np.testing.assert_allclose(ours(ids), theirs(ids), rtol=1e-6)


def test_files_of_a_saver_are_read(tmp_path):
    folder = tmp_path / "TFRADynamicEmbedding-1"
    folder.mkdir()
    flag = {"-shard_upsert_restore": tf.constant(False)}
    path = tf.train.Checkpoint(v=as_of_tfra("v", flag)).save(str(tmp_path / "c"))
    KEYS.tofile(folder / "v_mht_1of1_rank0_size1-keys")
    ROWS.tofile(folder / "v_mht_1of1_rank0_size1-values")
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver())
    variable = de.Variable(name="v", dim=2, kv_creator=creator)
    variable.upsert([12345], [[1.0, 1.0]])
    with pytest.warns(RuntimeWarning, match="of TFRA"):
        de.train.Checkpoint(v=variable).restore(path)
    assert held(variable) == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))
    with pytest.raises(ValueError, match="does not say where files are. Use de.train.Checkpoint"):
        tf.train.Checkpoint(v=variable).restore(path)
