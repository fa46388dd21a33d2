"""docs/file_formats.md: its commands run, and it has every option."""

import inspect
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from sok_lite.cli.importers import format_module
from sok_lite.engine.files.source import checkpoint_sources
from tests.cli.helpers import CPU, fine
from tests.cli.importers.test_hkv import saved
from tests.cli.importers.test_keras_file import archive, arrays_of, weights
from tests.cli.importers.test_sok import sok_dump
from tests.support.filled_tables import filled

PAGE = Path(__file__).resolve().parents[3] / "docs" / "file_formats.md"
# The formats of each part of the page that has a table of options.
PARTS = {
    "SOK": ["sok"],
    "HierarchicalKV": ["hkv"],
    "Files whose columns have names": ["npz", "safetensors", "parquet"],
    "TFRA and TFPlus": ["tfra", "tfra_tensorflow", "tfplus"],
}


def test_its_commands_run(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    for name in ("item_0", "user_0"):
        sok_dump(tmp_path / "sok_dump", np.arange(3), rows, name, Adam__m=rows, Adam__v=rows)
    saved(tmp_path / "hkv_files", np.arange(3), rows, np.ones(3, np.uint64))
    user = {"table": ("user", arrays_of(filled(CPU, 5)[0]))}
    archive(tmp_path / "model.keras", weights(user))
    np.savez("user.npz", id=np.arange(3, dtype=np.uint32), row=rows, adam_m=rows)
    vectors = pyarrow.FixedSizeListArray.from_arrays(rows.ravel(), 2)
    items = {"item_id": np.arange(3), "vec": vectors}
    parquet.write_table(pyarrow.table(items), "items.parquet")
    for body in re.findall(r"^```bash\n((?s:.*?))^```$", PAGE.read_text(), re.MULTILINE):
        for line in body.replace("\\\n", "").splitlines():
            fine(*shlex.split(line)[1:])
    assert [source.name for source in checkpoint_sources("runs/from_sok")] == ["item", "user"]
    assert [source.name for source in checkpoint_sources("runs/from_keras")] == ["user"]
    assert [source.name for source in checkpoint_sources("runs/item")] == ["product"]
    assert (tmp_path / "hkv_again" / "values").read_bytes() == rows.tobytes()
    assert (tmp_path / "sok_again" / "user_0-Adam-v").read_bytes()[296:] == rows.tobytes()
    (source,) = checkpoint_sources("runs/user")
    assert [state.name for state in source.states] == ["m"]


def test_it_has_every_option():
    text = PAGE.read_text()
    for title, names in PARTS.items():
        part = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        cells = [line.split("|") for line in part.splitlines() if line.startswith("| `")]
        for function, column in (("sources", 2), ("write", 3)):
            said = {
                option
                for line in cells
                if line[column].strip()
                for option in re.findall(r"`(\w+)`", line[1])
            }
            has = {
                option
                for name in names
                if hasattr(format_module(name), function)
                for option in inspect.signature(getattr(format_module(name), function)).parameters
            }
            assert said == has - {"path", "sources"}, (title, function)
