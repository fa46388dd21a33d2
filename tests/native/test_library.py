"""The library of operations: what it needs of others, and what it says where it cannot be used."""

import re
import shutil
import subprocess

import pytest

from sok_lite.backend import build
from sok_lite.native import library
from tests.support.compiler_stand_in import stand_in


def test_it_needs_tensorflow_by_its_name_and_no_library_of_cxx():
    """So one library goes into the wheel, and loads beside every supported TensorFlow."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf to list needed libraries with")
    command = ["readelf", "--dynamic", str(library.find_library())]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", text))
    assert library.NEEDED in needed
    assert not [name for name in needed if "stdc++" in name or "python" in name]


def test_it_is_compiled_again_for_other_flags_alone(tmp_path, monkeypatch):
    commands = stand_in(tmp_path, monkeypatch)
    plain = library.compile_library()
    of_plain = commands()
    assert library.compile_library() == plain and plain.is_file()
    assert commands() == of_plain
    other = library.compile_library(["-DSOK_LITE_TEST"])
    assert other != plain and other.is_file()
    of_other = [line for line in commands() if " -DSOK_LITE_TEST " in line]
    assert [line.replace(" -DSOK_LITE_TEST", "") for line in of_other] == of_plain
    assert len(commands()) == 2 * len(of_plain) > 0


def test_one_of_another_version_is_refused(monkeypatch):
    pytest.importorskip("tensorflow")
    monkeypatch.setattr(library, "ABI", 99)
    with pytest.raises(
        RuntimeError, match=r"own version, 99. Received: .*\.so of version \d+. Ins"
    ):
        library.load.__wrapped__()


def test_what_tensorflow_cannot_load_says_what_to_do(monkeypatch, tmp_path):
    pytest.importorskip("tensorflow")
    broken = tmp_path / "libsok_lite_ops.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "find_library", lambda: broken)
    with pytest.raises(RuntimeError, match=r"(?s)cannot load.*libsok_lite_ops.so.*sok-lite doctor"):
        library.load.__wrapped__()


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert not library._target().is_file()
    with pytest.raises(RuntimeError, match="no C.. compiler"):
        library.compile_library()
