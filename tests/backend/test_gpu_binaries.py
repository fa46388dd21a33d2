"""What NVRTC is asked for, without a GPU, and compiled kernels on disk: whole or not there."""

import os
import threading
import warnings

import pytest

from sok_lite.backend.gpu_binaries import FLAGS, CompileError, DiskCache
from tests.support.helpers import need_nvrtc, run_threads

SOURCE = 'extern "C" __global__ void k(float* p) { p[0] = p[0] * p[1] + p[2]; }'
FACTS = ["source", "-arch=sm_90", "12.9"]


@pytest.fixture
def nvrtc():
    return need_nvrtc()


def test_a_gpu_that_is_known_gets_machine_code(nvrtc):
    assert nvrtc.architecture("80") == "-arch=sm_80"
    made = nvrtc.compile(SOURCE, [nvrtc.architecture("90")])
    assert made.binary.startswith(b"\x7fELF")
    assert ".target sm_90" in made.ptx and ".entry k(" in made.ptx


def test_a_newer_gpu_than_nvrtc_knows_gets_what_its_driver_can_compile(nvrtc):
    import cupy

    newest = max(cupy.cuda.nvrtc.getSupportedArchs())
    flag = nvrtc.architecture(str(newest + 100))
    assert flag == f"-arch=compute_{newest}"
    made = nvrtc.compile(SOURCE, [flag])
    assert made.binary == made.ptx.encode()


def test_a_gpu_that_is_too_old_is_refused(nvrtc):
    with pytest.raises(RuntimeError, match=r"and newer\. Received: 2\.0\. Use an older CuPy"):
        nvrtc.architecture("20")


def test_products_are_not_fused_and_small_numbers_are_kept(nvrtc):
    ptx = nvrtc.compile(SOURCE, [*FLAGS, "-arch=sm_90"]).ptx
    assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx and "ftz" not in ptx
    assert "fma.rn.f32" in nvrtc.compile(SOURCE, ["-arch=sm_90"]).ptx
    # What cupy.RawModule appends wins over what is asked for.
    assert "ftz" in nvrtc.compile(SOURCE, ["-ftz=false", "-arch=sm_90", "-ftz=true"]).ptx


def test_what_does_not_compile_is_told_in_the_compilers_words(nvrtc):
    with pytest.raises(CompileError, match=r"refused a kernel(.|\n)*nonsense"):
        nvrtc.compile("__device__ int f() { return nonsense; }", ["-arch=sm_90"])


def test_a_build_is_told_from_another_of_the_same_version(nvrtc):
    version, *comment = nvrtc.build.splitlines()
    assert version == nvrtc.version
    assert any(f"release {version}, V{version}." in line for line in comment)


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


def test_every_fact_decides(cache):
    others = [FACTS[:i] + [FACTS[i] + "."] + FACTS[i + 1 :] for i in range(len(FACTS))]
    others += [FACTS[::-1], FACTS[:2], ["".join(FACTS)], ["source-", "arch=sm_90", "12.9"]]
    for number, facts in enumerate([FACTS, *others]):
        assert cache.get(facts, Compiler(b"%d" % number)) == b"%d" % number
    for number, facts in enumerate([FACTS, *others]):
        assert cache.get(facts, Compiler(b"anew")) == b"%d" % number


def test_a_file_that_is_cut_longer_or_has_any_byte_changed_is_made_anew(cache):
    cache.get(FACTS, Compiler(b"a kernel"))
    path = only_file(cache)
    whole = path.read_bytes()
    wrong = [whole[:length] for length in range(len(whole))] + [whole + b"!"]
    wrong += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for data in wrong:
        path.write_bytes(data)
        make = Compiler(b"a kernel")
        assert cache.get(FACTS, make) == b"a kernel"
        assert make.calls == 1 and path.read_bytes() == whole  # and mended


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
