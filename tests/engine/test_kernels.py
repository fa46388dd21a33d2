"""Every kernel source compiles for the GPU too, whether or not there is one here."""

import re
import subprocess

import pytest

from sok_lite.backend import cpu, sources
from sok_lite.backend.build import compile_library, find_library

FILES = sources.kernel_files()
# The flags of sok_lite/backend/cuda.py, which cannot be imported without CuPy.
FLAGS = ["--std=c++17", "--fmad=false"]


def nvrtc():
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy raises RuntimeError or OSError by the way it was installed
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return nvrtc


def compile_for(nvrtc, source, arch):
    """Returns the compiler's words, or None if it was content."""
    program = nvrtc.createProgram(source, "kernel.cu", [], [])
    try:
        nvrtc.compileProgram(program, [*FLAGS, f"-arch={arch}"])
        assert len(nvrtc.getPTX(program)) > 0
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
    return None


def entry_points(nvrtc, source):
    """Returns the names of the kernels in the code that NVRTC makes of a source."""
    program = nvrtc.createProgram(source, "kernel.cu", [], [])
    try:
        nvrtc.compileProgram(program, [*FLAGS, "-arch=sm_90"])
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return re.findall(r"\.entry (\w+)", ptx.decode() if isinstance(ptx, bytes) else ptx)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_compile_with_nvrtc_without_any_include_path(path, arch):
    assert compile_for(nvrtc(), sources.inlined(path), arch) is None


def test_the_gpu_has_the_kernels_of_the_cpu_and_they_are_found_by_name():
    library = find_library()
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    on_cpu = set(re.findall(r"\bsok_run_(\w+)", symbols.stdout))
    kernels = sources.all_kernels()
    on_gpu = set()
    for path in FILES:
        for name in entry_points(nvrtc(), sources.inlined(path)):
            assert sources.find_kernel(name, kernels).path == path
            on_gpu.add(name)
    assert on_gpu == on_cpu
    assert sources.find_kernel("rows_read_u32", kernels).is_row_kernel
    assert not sources.find_kernel("unique_insert", kernels).is_row_kernel
    with pytest.raises(AttributeError, match="No kernel 'rows_eat_u32'"):
        sources.find_kernel("rows_eat_u32", kernels)


def test_nvrtc_refuses_what_is_no_kernel():
    source = sources.inlined(FILES[0]) + "\nSOK_KERNEL(broken)(i64 n) { not_a_function(n); }\n"
    assert "not_a_function" in compile_for(nvrtc(), source, "sm_90")


def test_nvrtc_flags_are_the_ones_that_the_cuda_backend_uses():
    text = (sources.kernel_folder().parent / "sok_lite" / "backend" / "cuda.py").read_text()
    named = re.search(r"NVRTC_FLAGS = \((.*)\)", text).group(1)
    assert re.findall(r'"(.*?)"', named) == FLAGS


def exported_names():
    """Names that the sources export, macro-made ones as written (with ##)."""
    return {
        name for path in FILES for name in re.findall(r"SOK_EXPORT\(([\w#]+)\)", path.read_text())
    }


def test_every_kernel_is_exported_to_the_cpu():
    for path in FILES:
        text = path.read_text()
        kernels = set(re.findall(r"SOK_(?:ROW_)?KERNEL\(([\w#]+)\)", text))
        assert kernels, path.name
        assert kernels <= set(re.findall(r"SOK_EXPORT\(([\w#]+)\)", text)), path.name


def test_every_kernel_is_launched_by_the_engine():
    # Names are put together from parts: the first word of each has to start a string.
    python = "\n".join(
        path.read_text() for path in (sources.kernel_folder().parent / "sok_lite").rglob("*.py")
    )
    for name in exported_names():
        assert re.search(rf'"{name.split("_")[0]}_', python), name


def test_kernels_include_only_their_own_headers():
    for path in [*FILES, *sources.kernel_folder().rglob("*.cuh")]:
        if path.name == "platform.cuh":
            continue
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                assert re.fullmatch(r'#include "\w+\.cuh"', line), f"{path.name}: {line}"
        assert "std::" not in path.read_text(), path.name


def test_the_library_is_built_once_for_the_same_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    first = compile_library()
    stamp = first.stat().st_mtime_ns
    assert compile_library() == first
    assert first.stat().st_mtime_ns == stamp
    assert cpu.CpuBackend(library=first).name == "cpu"


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler.*apt-get install g\+\+"):
        compile_library()


def test_a_named_library_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("SOK_LITE_CPU_LIBRARY", str(tmp_path / "mine.so"))
    assert find_library() == tmp_path / "mine.so"
