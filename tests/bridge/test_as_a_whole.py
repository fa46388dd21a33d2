"""A SavedModel that is written again is the old one or the new one, and what is not of it stays."""

import os
import uuid

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.serving import as_a_whole as module

pytestmark = pytest.mark.usefixtures("initialised")


@pytest.fixture(params=["local", "mounted", "ram://"])
def path(request, tmp_path, monkeypatch):
    """A folder on this machine, one that cannot be moved, or one of TensorFlow's file systems."""
    if request.param == "ram://":
        return f"ram://{uuid.uuid4().hex}/served"
    if request.param == "mounted":
        (tmp_path / "served").mkdir()
        monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("served"))
    return str(tmp_path / "served")


def lookup_of(table):
    return tf.function(lambda ids: table.sparse_read(ids))


IDS = [tf.TensorSpec([None], tf.int64, "ids")]


def rows_in(path):
    return tf.saved_model.load(path)(tf.constant([1, 2, 3], tf.int64)).numpy()[:, 0].tolist()


def test_the_old_one_is_whole_until_the_new_one_is(path, monkeypatch):
    table, save = sok.DynamicVariable(2, initializer="zeros"), tf.saved_model.save
    loaded = []

    def saving(model, there, *arguments):
        save(model, there, *arguments)
        loaded.append(rows_in(path) if tf.io.gfile.exists(f"{path}/saved_model.pb") else None)
        if len(loaded) == 3:
            raise OSError("full")

    monkeypatch.setattr(tf.saved_model, "save", saving)
    for number in (1, 2):
        sok.assign(table, np.arange(number) + 1, np.full((number, 2), number, np.float32))
        sok.export_serving(lookup_of(table), path, IDS)
    with pytest.raises(OSError, match="full"):
        sok.export_serving(lookup_of(table), path, IDS)
    assert loaded == [None, [1, 0, 0], [2, 2, 0]] and rows_in(path) == [2, 2, 0]
    parent, name = os.path.split(path)
    assert [each.rstrip("/") for each in tf.io.gfile.listdir(parent)] == [name]
    files = {each.rstrip("/") for each in tf.io.gfile.listdir(path)}
    assert files - {"assets"} == {"fingerprint.pb", "saved_model.pb", "variables"}


def test_what_a_server_looks_for_comes_last(path, monkeypatch):
    moved, rename = [], tf.io.gfile.rename

    def renaming(source, target, overwrite):
        # Where it is made beside, TensorFlow moves files of its own.
        if target.startswith(f"{path}/") and not target.startswith(f"{path}/."):
            moved.append(target[len(path) + 1 :])
        rename(source, target, overwrite)

    monkeypatch.setattr(tf.io.gfile, "rename", renaming)
    monkeypatch.setattr(module, "_is_all_replaced", lambda *_: False)
    sok.export_serving(lookup_of(sok.DynamicVariable(2)), path, IDS)
    assert moved[-2:] == ["variables/variables.index", "saved_model.pb"] and len(moved) == 5


@pytest.mark.parametrize("name", ["notes.txt", "assets.extra/of_a_user", "variables.old/part"])
def test_files_of_others_stay(tmp_path, name):
    path = tmp_path / "served"
    (path / name).parent.mkdir(parents=True)
    (path / name).write_text("mine")
    (tmp_path / "served.part").mkdir()
    table = sok.DynamicVariable(2, initializer="zeros")
    for _ in range(2):
        sok.export_serving(lookup_of(table), path, IDS)
    assert (path / name).read_text() == "mine" and rows_in(str(path)) == [0, 0, 0]
    assert sorted(os.listdir(tmp_path)) == ["served", "served.part"]


def test_a_folder_is_replaced_in_one_step(tmp_path):
    """Not file by file: tests/engine/files/test_atomic_write.py."""
    table, path = sok.DynamicVariable(2, initializer="zeros"), tmp_path / "served"
    folders = []
    for _ in range(2):
        sok.export_serving(lookup_of(table), path, IDS)
        folders.append(os.open(path, os.O_RDONLY))  # or the number would be given again
    assert os.fstat(folders[0]).st_ino != path.stat().st_ino == os.fstat(folders[1]).st_ino
    for folder in folders:
        os.close(folder)


def test_no_path_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("", "s3:/bucket/served"):
        with pytest.raises(ValueError, match="must be in a folder of this machine"):
            sok.export_serving(lookup_of(sok.DynamicVariable(2)), path, IDS)
    assert os.listdir() == []
