"""Numbered folders of models: going back to an older one, and what goes."""

import os

import pytest

from sok_lite.engine.files.versions import link_latest, remove_old, rollback, versions_in


def folder_with(path, *names):
    for name in names:
        (path / name).mkdir(parents=True)
        (path / name / "saved_model.pb").write_text(name)
    return path


def names_in(path):
    return sorted(name for name in os.listdir(path) if not name.startswith("."))


def test_rollback_leaves_the_older_one_as_the_newest(tmp_path):
    folder_with(tmp_path, "1", "2", "3", "10", "assets", "007", "0")
    link_latest(tmp_path, 10)
    assert rollback(tmp_path) == str(tmp_path / "3")
    found = versions_in(tmp_path)
    assert (found.served, found.withdrawn, found.next) == ([1, 2, 3], [10], 11)
    assert (tmp_path / "latest" / "saved_model.pb").read_text() == "3"
    assert rollback(f"file://{tmp_path}", version=1) == str(tmp_path / "1")
    assert rollback(tmp_path, 1) == str(tmp_path / "1")
    assert names_in(tmp_path) == sorted(
        ["1", "2.withdrawn", "3.withdrawn", "10.withdrawn", "assets", "007", "0", "latest"]
    )
    assert (tmp_path / "10.withdrawn" / "saved_model.pb").read_text() == "10"


def test_what_cannot_be_gone_back_to_is_told(tmp_path):
    folder_with(tmp_path, "4")
    for version, message in (
        (None, "must have a version before the newest. It has: 4. Nothing was changed"),
        (5, "must have version 5. It has: 4. Nothing was changed"),
    ):
        with pytest.raises(ValueError, match=message):
            rollback(tmp_path, version)
    with pytest.raises(TypeError, match="`version` must be an integer"):
        rollback(tmp_path, "4")
    with pytest.raises(ValueError, match="`folder` must be in a folder of this machine"):
        rollback("file://host/models")
    folder_with(tmp_path, "5", "latest")
    with pytest.raises(FileExistsError, match="latest must be a link to a version"):
        rollback(tmp_path)
    assert names_in(tmp_path) == ["4", "5", "latest"]


def test_old_ones_go_and_so_does_what_was_withdrawn_before_them(tmp_path):
    names = ["1", "2", "3", "4", "5.withdrawn", "6", "7"]
    folder_with(tmp_path, *names, ".removed-1", "2.withdrawn")
    remove_old(tmp_path, None)
    assert names_in(tmp_path) == sorted([*names, "2.withdrawn"])
    assert not (tmp_path / ".removed-1").exists()
    remove_old(tmp_path, 3)
    assert names_in(tmp_path) == ["4", "5.withdrawn", "6", "7"]
    remove_old(tmp_path, 2)
    assert names_in(tmp_path) == ["6", "7"]
    assert sorted(os.listdir(tmp_path)) == ["6", "7"]
