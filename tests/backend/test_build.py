"""The CPU kernel library: where it is found, and what keeps it from being compiled."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from sok_lite.backend.build import cache_folder, compile_library, find_library
from sok_lite.backend.cpu import CpuBackend


@pytest.mark.full_only("compiles all kernels, which set-up does too")
def test_the_library_is_built_once_for_the_same_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    # All of the sources, in a third of the time: the last -O wins.
    compiler = tmp_path / "quick"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX") or "g++"} "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    first = compile_library()
    stamp = first.stat().st_mtime_ns
    assert compile_library() == first
    assert first.stat().st_mtime_ns == stamp
    assert CpuBackend(library=first).name == "cpu"


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler.*apt-get install g\+\+"):
        compile_library()


def test_a_compiler_that_cannot_be_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    for compiler in ("no-such-compiler", str(tmp_path), "g++ -O0"):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(RuntimeError, match=r"CXX must be .* Received: .* cannot be run") as got:
            compile_library()
        assert repr(compiler) in str(got.value) and "Unset it" in str(got.value)


def test_a_named_library_is_taken(tmp_path, monkeypatch):
    mine = Path(shutil.copy(find_library(), tmp_path / "mine.so"))
    monkeypatch.setenv("SOK_LITE_CPU_LIBRARY", str(mine))
    assert find_library() == mine
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOK_LITE_CPU_LIBRARY", "mine.so")
    assert find_library() == mine


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"", "file too short"), (b"text\n" * 99, "invalid ELF header")],
)
def test_a_named_library_that_is_none_is_refused(tmp_path, monkeypatch, content, reason):
    mine = tmp_path / "mine.so"
    if content is not None:
        mine.write_bytes(content)
    monkeypatch.setenv("SOK_LITE_CPU_LIBRARY", str(mine))
    wrong = rf"SOK_LITE_CPU_LIBRARY must be .* Received: '.*mine\.so' \(.*{reason}.* Unset it"
    with pytest.raises(ValueError, match=wrong):
        find_library()


def test_a_library_of_something_else_is_refused(monkeypatch):
    other = importlib.util.find_spec("_ctypes").origin
    monkeypatch.setenv("SOK_LITE_CPU_LIBRARY", other)
    with pytest.raises(ValueError, match=r"SOK_LITE_CPU_LIBRARY must be .*sok_launch.* Unset it"):
        find_library()


def test_an_empty_name_of_a_cache_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SOK_LITE_CACHE", "")
    assert cache_folder() == tmp_path / "sok_lite"


def test_the_home_folder_in_the_name_of_a_cache_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SOK_LITE_CACHE", "~/kernels")
    assert cache_folder() == tmp_path / "kernels"


def test_a_cache_that_is_no_folder_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for named in (file, Path("/proc/nope"), tmp_path / ("long" * 99)):
        monkeypatch.setenv("SOK_LITE_CACHE", str(named))
        with pytest.raises(RuntimeError, match="can be written to. Received: .*") as got:
            compile_library()
        assert repr(str(named / "kernels")) in str(got.value)
        assert "Set SOK_LITE_CACHE to another folder" in str(got.value)
    # The default one is wrong as well.
    monkeypatch.setenv("SOK_LITE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(RuntimeError, match="file/sok_lite/kernels' .*Set SOK_LITE_CACHE"):
        compile_library()
