"""What Python opens is on this machine: an address is no folder of that name."""

import os
from pathlib import Path

import pytest

from sok_lite.backend import get_backend
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.atomic_write import write_file
from sok_lite.engine.files.dump import dump, dump_in_background
from sok_lite.engine.files.load import load
from sok_lite.engine.files.readonly import open_readonly
from sok_lite.engine.files.source_writer import write_checkpoint
from sok_lite.engine.local_path import local_path
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.reports.report import Report
from tests.support.helpers import new_table

ONE = SingleCommunicator()
ADDRESSES = ["s3://bucket/c", "file://host/c", Path("gs://bucket/c"), "hdfs:///c", ""]
ADDRESSES += [" s3://bucket/c", "simplecache::s3://bucket/c", "1s3://bucket/c"]


@pytest.mark.cases("given")
@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("rows", "rows"),
        ("./s3:/rows", "./s3:/rows"),
        ("rows/a://b", "rows/a://b"),
        ("a:b", "a:b"),
        ("file:///rows/c", "/rows/c"),
        (Path("file:///rows/c"), "/rows/c"),
        (Path("rows"), "rows"),
        (b"rows", "rows"),
    ],
)
def test_a_path_of_this_machine(given, path):
    assert local_path(given) == path


@pytest.mark.parametrize("address", ADDRESSES)
def test_any_other_is_refused_by_its_name(address):
    with pytest.raises(ValueError, match=r"`far_path` must be in a folder of this machine") as said:
        local_path(address, "far_path")
    assert repr(str(address)) in str(said.value)
    assert ("pathlib" in str(said.value)) == isinstance(address, Path)


@pytest.mark.parametrize("address", ["file://host/c", Path("gs://bucket/c"), ""])
def test_nothing_is_made_in_the_current_folder(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    table = new_table(get_backend("cpu"), 2)
    for open_it in (
        lambda: dump(address, [table], ONE),
        lambda: dump_in_background(address, [table], ONE),
        lambda: load(address, [table], ONE),
        lambda: open_readonly(address),
        lambda: write_checkpoint(address, []),
        lambda: FarFile(address),
        lambda: write_file(address, b""),
        lambda: Report((), 1, 0.0, "x").save_html(address),
    ):
        with pytest.raises(ValueError, match="must be in a folder of this machine"):
            open_it()
    assert os.listdir() == []


def test_an_address_of_a_local_file_is_that_file(tmp_path):
    table = new_table(get_backend("cpu"), 2, name="t")
    table.find_or_insert([7])
    dump(f"file://{tmp_path}/c", [table], ONE)
    assert open_readonly(f"file://{tmp_path}/c")["t"].keys().tolist() == [7]
    assert len(open_readonly(tmp_path / "c")) == 1
