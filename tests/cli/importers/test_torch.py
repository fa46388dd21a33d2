"""Files of PyTorch. What needs the package is tried where it is installed."""

import importlib.util
import os
import zipfile

import numpy as np
import pytest

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.importers import detected_format
from sok_lite.cli.importers.torch import detect, sources, write
from tests.cli.importers.arrays import SIZES, TYPES, a_table, content, whole

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
def test_without_the_package_it_is_named(tmp_path):
    with pytest.raises(ImportError, match='need torch.*pip install "torch'):
        write(str(tmp_path / "f.pt"), [a_table(3)])
    with pytest.raises(ImportError, match='need torch.*pip install "torch'):
        sources(str(tmp_path / "f.pt"))
    assert not os.path.exists(tmp_path / "f.pt")


def test_archives_are_told_apart(tmp_path):
    """PyTorch's and NumPy's files are archives both."""
    with zipfile.ZipFile(tmp_path / "pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/data/0", b"")
    np.savez(tmp_path / "npz", keys=np.arange(3))
    assert detect(str(tmp_path / "pt")) and not detect(str(tmp_path / "npz.npz"))
    assert detected_format(str(tmp_path / "pt")) == "torch"
    assert detected_format(str(tmp_path / "npz.npz")) == "npz"
    (tmp_path / "text").write_text("archive/data.pkl")
    assert not detect(str(tmp_path / "text")) and not detect(str(tmp_path))


def test_one_table_a_file(tmp_path):
    with pytest.raises(WrongUse, match="one table, and there are 2"):
        write(str(tmp_path / "f"), [a_table(1), a_table(2)])


@needs_torch
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("key_type", "dtype"), TYPES)
def test_what_is_written_is_read(tmp_path, n, key_type, dtype):
    source = a_table(n, key_type, dtype)
    write(str(tmp_path / "f.pt"), [source])
    assert detect(str(tmp_path / "f.pt"))
    (again,) = sources(str(tmp_path / "f.pt"))
    assert content(again) == content(source)


@needs_torch
def test_tensors_of_others(tmp_path):
    import torch

    rows = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()  # not contiguous
    torch.save({"id": torch.arange(3), "weight": rows, "epoch": 7}, tmp_path / "f.pt")
    (source,) = sources(str(tmp_path / "f.pt"), columns="keys=id,values=weight", dtype="float32")
    assert whole(source, "values").tolist() == [[0, 3], [1, 4], [2, 5]]


@needs_torch
def test_nothing_in_a_file_is_executed(tmp_path):
    import torch

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"keys": Harmful()}, tmp_path / "f.pt")
    with pytest.raises(ValueError, match="f.pt is corrupt"):
        sources(str(tmp_path / "f.pt"))
    assert not os.path.exists(tmp_path / "executed")


@needs_torch
def test_a_cut_file_is_refused(tmp_path):
    write(str(tmp_path / "f.pt"), [a_table(9)])
    data = (tmp_path / "f.pt").read_bytes()
    for length in range(0, len(data), 101):
        (tmp_path / "f.pt").write_bytes(data[:length])
        with pytest.raises(ValueError, match="f.pt is corrupt"):
            sources(str(tmp_path / "f.pt"))
