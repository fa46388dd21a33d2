"""Models that are published again and again, as a server finds them."""

import os
import signal
import uuid

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.files.versions import lock_versions
from tests.support.own_process import run_with_tensorflow

pytestmark = pytest.mark.usefixtures("initialised")
IDS = [tf.TensorSpec([None], tf.int64, "ids")]


def lookup_of(table):
    return tf.function(lambda ids: table.sparse_read(ids))


def served(folder):
    """What a server loads: the version of the largest number, and what it gives for key 1."""
    numbers = [int(name) for name in os.listdir(folder) if name.isdecimal()]
    loaded = tf.saved_model.load(os.path.join(folder, str(max(numbers))))
    return sorted(numbers), float(loaded(tf.constant([1], tf.int64))[0, 0])


def latest(folder):
    return float(tf.saved_model.load(str(folder / "latest"))(tf.constant([1], tf.int64))[0, 0])


def test_versions_come_and_go_and_are_gone_back_to(tmp_path):
    table, folder = sok.DynamicVariable(2, initializer="zeros"), tmp_path / "models" / "ctr"

    def publish(value, **options):
        sok.assign(table, [1], np.full((1, 2), value, np.float32))
        return sok.publish(lookup_of(table), folder, signature=IDS, **options)

    paths = [publish(value, keep=2) for value in (1, 2, 3)]
    assert paths == [str(folder / name) for name in "123"]
    assert served(folder) == ([2, 3], 3.0) and latest(folder) == 3
    assert sok.rollback(folder) == paths[1]
    assert served(folder) == ([2], 2.0) and latest(folder) == 2
    assert publish(4, keep=2) == str(folder / "4")
    assert served(folder) == ([2, 4], 4.0) and latest(folder) == 4
    publish(5, keep=None, quantize="float16")
    assert served(folder) == ([2, 4, 5], 5.0)
    publish(6, keep=1)
    assert served(folder) == ([6], 6.0) and latest(folder) == 6
    assert sorted(os.listdir(folder)) == ["6", "latest"]


def test_versions_at_an_address(tmp_path, stores_here):
    fsspec = pytest.importorskip("fsspec")
    system, name = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    table = sok.DynamicVariable(2, initializer="zeros")

    def publish(value):
        sok.assign(table, [1], np.full((1, 2), value, np.float32))
        return sok.publish(lookup_of(table), f"memory:/{name}", keep=2, signature=IDS)

    def read(number):
        for file in system.find(f"{name}/{number}"):
            system.get_file(file, f"{tmp_path}/{file.removeprefix(name)}")
        loaded = tf.saved_model.load(tmp_path / number)
        return float(loaded(tf.constant([1], tf.int64))[0, 0])

    def names():
        return sorted(path.rpartition("/")[2] for path in system.ls(name, detail=False))

    assert publish(1) == f"memory:/{name}/1" and read("1") == 1
    (here,) = stores_here.rglob(name[1:])
    (here / "9" / "variables").mkdir(parents=True)  # of a process that was killed
    (here / "9" / "saved_model.pb").write_bytes(b"x")
    publish(2)
    system.pipe(f"{name}/3/variables/half", b"of an upload that was ended")
    publish(4)
    assert names() == ["2", "4"] and read("4") == 4
    assert sok.rollback(f"memory:/{name}") == f"memory:/{name}/2"
    assert names() == ["2", "4.withdrawn"] and read("4.withdrawn") == 4
    publish(5)
    assert names() == ["2", "4.withdrawn", "5"] and read("5") == 5
    with pytest.raises(ValueError, match=f"memory:/{name} must have version 4. It has: 2, 5"):
        sok.rollback(f"memory:/{name}", 4)
    assert not list(stores_here.rglob("saved_model.pb"))


def test_what_is_wrong_is_told_before_anything_is_written(tmp_path, monkeypatch):
    table = sok.DynamicVariable(2, initializer="zeros")
    function = lookup_of(table)
    for keep in (0, True, "3"):
        with pytest.raises((TypeError, ValueError), match="`keep` must be"):
            sok.publish(function, tmp_path / "m", keep=keep, signature=IDS)
    with pytest.raises(ValueError, match="`folder` must be a folder of this machine, or an addr"):
        sok.publish(function, "ram://bucket/m", signature=IDS)
    assert not (tmp_path / "m").exists()
    sok.publish(function, tmp_path / "m", signature=IDS)
    with lock_versions(str(tmp_path / "m")), pytest.raises(BlockingIOError, match="published at"):
        sok.publish(function, tmp_path / "m", signature=IDS)
    with pytest.raises(NotImplementedError):
        sok.publish(lambda ids: table.contains(ids), tmp_path / "m", signature=IDS)
    assert sorted(os.listdir(tmp_path / "m")) == ["1", "latest"]
    os.unlink(tmp_path / "m" / "latest")
    (tmp_path / "m" / "latest").write_text("mine")
    with pytest.raises(FileExistsError, match="latest must be a link to a version"):
        sok.publish(function, tmp_path / "m", signature=IDS)
    assert sorted(os.listdir(tmp_path / "m")) == ["1", "latest"]


KILLED = """
import os, signal
import numpy as np
import tensorflow as tf
import sok_lite as sok

sok.init("single")
table = sok.DynamicVariable(2, initializer="zeros")
sok.assign(table, [1], np.ones((1, 2), np.float32))
function = tf.function(lambda ids: table.sparse_read(ids))
signature, save = [tf.TensorSpec([None], tf.int64, "ids")], tf.saved_model.save
sok.publish(function, "m", keep=1, signature=signature)


def end(*arguments):
    save(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


tf.saved_model.save = end
sok.publish(function, "m", keep=1, signature=signature)
"""


def test_a_publisher_that_is_killed_leaves_what_was_there(tmp_path):
    with pytest.raises(AssertionError, match=f"exit status {-signal.SIGKILL}"):
        run_with_tensorflow(KILLED, tmp_path)
    folder = tmp_path / "m"
    assert served(folder) == ([1], 1.0) and latest(folder) == 1
    (left,) = [name for name in os.listdir(folder) if name.startswith(".2.part-")]
    table = sok.DynamicVariable(2, initializer="zeros")
    sok.assign(table, [1], np.full((1, 2), 2, np.float32))
    sok.publish(lookup_of(table), folder, keep=1, signature=IDS)
    assert served(folder) == ([2], 2.0) and latest(folder) == 2
    assert sorted(os.listdir(folder)) == ["2", "latest"] and left
