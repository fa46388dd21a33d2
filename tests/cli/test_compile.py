"""`sok-lite compile` leaves kernels where a backend finds them."""

import pytest

from sok_lite.backend.build import find_library
from sok_lite.backend.gpu_binaries import FLAGS, GpuBinaries, Nvrtc, kernel_names
from sok_lite.backend.sources import (
    all_kernels,
    find_kernel,
    inline_includes,
    kernel_files,
    kernel_folder,
)
from sok_lite.native import library
from tests.cli.helpers import fine, run
from tests.support.helpers import need_nvrtc


def test_the_kernels_of_the_cpu(monkeypatch):
    monkeypatch.setenv("SOK_LITE_BACKEND", "cpu")
    assert fine("compile") == (
        f"TensorFlow's operations are in {library.find_library()}\n"
        f"the CPU kernels are in {find_library()}\n"
    )


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """A cache with nothing in it. TensorFlow's operations, which take 20 s, are there already."""
    need_nvrtc()
    found = library.find_library()
    monkeypatch.setattr(library, "find_library", lambda: found)
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))


@pytest.fixture
def compiled(empty, monkeypatch):
    """The sources that NVRTC compiles."""
    sources, real = [], Nvrtc.compile

    def noting(self, source, flags):
        if source:
            sources.append((source, tuple(flags)))
        return real(self, source, flags)

    monkeypatch.setattr(Nvrtc, "compile", noting)
    return sources


def test_a_gpu_finds_what_was_compiled_ahead(compiled, monkeypatch, tmp_path):
    import cupy

    few = [kernel_folder() / "slots.cu", kernel_folder() / "sent_gradients.cu"]
    monkeypatch.setattr("sok_lite.cli.commands.compile.kernel_files", lambda: few)
    said = fine("compile", "--gpu", "90", "--gpu", "80")
    assert said == (
        f"TensorFlow's operations are in {library.find_library()}\n"
        f"the kernels for GPUs of compute capability 80, 90 are in {tmp_path / 'cuda'}\n"
    )
    assert len(compiled) == len(set(compiled)) == 2 * 2 * len(few)
    for path in few:
        binaries = GpuBinaries(cupy.cuda.nvrtc)
        for is_wide in binaries.forms:
            binary = binaries.get(path, "90", is_wide)
            assert binary.startswith(b"\x7fELF")
            assert {find_kernel(name, all_kernels()).path for name in kernel_names(binary)} == {
                path
            }
    assert len(compiled) == 2 * 2 * len(few)
    ptx = (
        Nvrtc(cupy.cuda.nvrtc).compile(inline_includes(few[0]), [*FLAGS, "-arch=compute_90"]).binary
    )
    assert kernel_names(ptx) == kernel_names(GpuBinaries(cupy.cuda.nvrtc).get(few[0], "90", False))


def test_every_kernel_is_compiled(empty, monkeypatch):
    """In both forms. That NVRTC compiles each is for the tests of the kernels."""
    asked = []
    monkeypatch.setattr(GpuBinaries, "get", lambda self, *form: asked.append(form))
    fine("compile", "--gpu", "90")
    assert sorted(asked) == [
        (path, "90", form) for path in kernel_files() for form in (False, True)
    ]


@pytest.mark.parametrize("capability", ["9.0", "9", "sm_90", "-90"])
def test_what_is_no_compute_capability_is_refused(capability):
    status, out, err = run("compile", f"--gpu={capability}")
    assert (status, out) == (2, "")
    assert "without its point, such as 90" in err
