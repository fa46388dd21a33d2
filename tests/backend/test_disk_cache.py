"""Compiled kernels on disk: whole or not there, and never in the way of a run."""

import os
import threading
import warnings

import pytest

from sok_lite.backend import sources
from sok_lite.backend.disk_cache import DiskCache
from sok_lite.backend.nvrtc import FLAGS
from tests.support.helpers import need_nvrtc, run_threads

FACTS = ["source", "-arch=sm_90", "12.9"]


class Compiler:
    """Counts its calls."""

    def __init__(self, result=b"made"):
        self.result = result
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.result


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "kernels")


def only_file(cache):
    (path,) = cache._folder.iterdir()
    return path


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4000])
def test_what_was_made_is_read_by_the_next_process(cache, data):
    make = Compiler(data)
    assert cache.get(FACTS, make) == data
    assert cache.get(FACTS, make) == data
    assert DiskCache(cache._folder).get(FACTS, make) == data
    assert make.calls == 1


def test_the_real_compiler_is_asked_once(cache):
    nvrtc = need_nvrtc()
    source = sources.inlined(sources.kernel_folder() / "slots.cu")
    flags = [*FLAGS, "-arch=sm_90"]
    calls = []

    def make():
        calls.append(1)
        return nvrtc.compiled(source, flags).binary

    facts = [source, *flags, nvrtc.build]
    first = cache.get(facts, make)
    assert first == cache.get(facts, make) == nvrtc.compiled(source, flags).binary
    assert first.startswith(b"\x7fELF") and b"slots_age" in first
    assert len(calls) == 1


def test_every_fact_decides(cache):
    others = [FACTS[:i] + [FACTS[i] + "."] + FACTS[i + 1 :] for i in range(len(FACTS))]
    others += [FACTS[::-1], FACTS[:2], ["".join(FACTS)], ["source-", "arch=sm_90", "12.9"]]
    for number, facts in enumerate([FACTS, *others]):
        assert cache.get(facts, Compiler(b"%d" % number)) == b"%d" % number
    for number, facts in enumerate([FACTS, *others]):
        assert cache.get(facts, Compiler(b"anew")) == b"%d" % number


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 40])
def test_a_file_that_was_cut_short_is_made_anew(cache, length):
    cache.get(FACTS, Compiler(b"a kernel"))
    path = only_file(cache)
    os.truncate(path, length) if length < 40 else path.write_bytes(path.read_bytes() + b"!")
    for calls in (1, 0):  # and mended
        make = Compiler(b"a kernel")
        assert cache.get(FACTS, make) == b"a kernel"
        assert make.calls == calls


def test_a_file_with_any_byte_changed_is_made_anew(cache):
    cache.get(FACTS, Compiler(b"a kernel"))
    path = only_file(cache)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        make = Compiler(b"a kernel")
        assert cache.get(FACTS, make) == b"a kernel"
        assert make.calls == 1 and path.read_bytes() == whole


def test_a_folder_that_cannot_be_used_costs_a_warning_once(tmp_path):
    # Not by permissions: root may write anywhere.
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file")
    make = Compiler()
    with pytest.warns(RuntimeWarning, match="compiles them anew.*Set SOK_LITE_CACHE") as warned:
        for _ in range(3):
            assert cache.get(FACTS, make) == b"made"
    assert len(warned) == 1 and make.calls == 3


def test_a_full_disk_costs_a_warning(cache, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert cache.get(FACTS, Compiler()) == b"made"
    assert list(cache._folder.iterdir()) == []


def test_an_error_of_the_compiler_is_passed_on_and_nothing_is_kept(cache):
    def broken():
        raise OSError("the compiler's own")

    with pytest.raises(OSError, match="the compiler's own"):
        cache.get(FACTS, broken)
    assert cache.get(FACTS, Compiler()) == b"made"


def test_an_interrupted_write_leaves_nothing_behind(cache, monkeypatch):
    def interrupted(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupted)
        cache.get(FACTS, Compiler())
    assert list(cache._folder.iterdir()) == []
    assert cache.get(FACTS, Compiler(b"again")) == b"again"


def test_many_at_once_never_see_half_of_a_file(tmp_path):
    """Each begins with an empty folder together with the others; the results differ in length."""
    results = [bytes([number]) * (1 << (10 + number)) for number in range(8)]
    for round_ in range(20):
        folder = tmp_path / str(round_)
        barrier = threading.Barrier(len(results))
        got = []

        def rank(number, folder=folder, barrier=barrier, got=got):
            barrier.wait()
            got.append(DiskCache(folder).get(FACTS, lambda: results[number]))
            got.append(DiskCache(folder).get(FACTS, lambda: b"none was there"))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_threads(rank, len(results))
        assert len(got) == 2 * len(results) and set(got) <= set(results)
        assert len(list(folder.iterdir())) == 1
