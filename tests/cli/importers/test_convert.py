"""Every format by the command line, there and back."""

import numpy as np
import pytest

from sok_lite.engine.files.source import checkpoint_sources
from sok_lite.engine.files.source_writer import write_checkpoint
from tests.cli.helpers import fine, run
from tests.cli.importers.arrays import a_table, content


def adam(n, **options):
    """A table with the states of Adam, which every format but HierarchicalKV's has a place for."""
    source = a_table(n, least=0, name="t", **options)
    source.states = source.states[:2]
    source.states = tuple(state._replace(initial=0.0) for state in source.states)
    source.columns = ("stamps",)
    return source


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        ("sok", [], []),
        ("hkv", ["states=no"], ["name=t", "dim=3"]),
        ("npz", ["compress=yes"], []),
        ("safetensors", [], []),
        ("parquet", ["wide=yes"], []),
    ],
)
def test_there_and_back(tmp_path, name, write, read):
    if name == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    source = adam(20)
    write_checkpoint(tmp_path / "a", [source], ranks=2)
    to = [text for each in write for text in ("--to-option", each)]
    fine("convert", tmp_path / "a", tmp_path / "f", "--to-format", name, *to)
    given = [text for each in read for text in ("--from-option", each)]
    fine("convert", tmp_path / "f", tmp_path / "b", *given)  # and the format is found
    (again,) = checkpoint_sources(tmp_path / "b")
    columns, *facts = content(again)
    expected, *expected_facts = content(source)
    assert columns["keys"] == expected["keys"] and columns["values"] == expected["values"]
    if name != "hkv":
        states = [state.tensor for state in source.states]
        assert [columns[state] for state in states] == [expected[state] for state in states]
        assert facts == expected_facts
    status, _, error = run("convert", tmp_path / "a", tmp_path / "f", "--to-format", name, *to)
    assert status == 2 and "is there already" in error
    fine("convert", tmp_path / "a", tmp_path / "f", "--to-format", name, *to, "--force")


@pytest.mark.parametrize(
    ("stored", "dtype", "most"),
    [
        ("float32", "float16", 65504.0),
        ("float64", "float32", np.finfo(np.float32).max),
        ("float64", "bfloat16", 2.0**127),
        ("float32", "bfloat16", 2.0**127),
    ],
)
def test_no_number_becomes_infinite(tmp_path, stored, dtype, most):
    path, option = tmp_path / "rows.npz", f"dtype={dtype}"
    rows = np.array([[most], [np.inf], [np.nan]], stored)
    np.savez(path, keys=[1, 2, 3], values=rows)
    fine("convert", path, tmp_path / "fits", "--from-option", option)
    greatest = np.finfo(np.float32).max if stored == "float32" else 1e300
    greatest = 1e9 if dtype == "float16" else greatest
    rows[0] = greatest
    np.savez(path, keys=[1, 2, 3], values=rows)
    status, _, err = run("convert", path, tmp_path / "not", "--from-option", option)
    assert status == 3 and f"values must fit {dtype}. Received: " in err
    assert not (tmp_path / "not").exists()
