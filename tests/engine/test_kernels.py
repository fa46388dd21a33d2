"""Every kernel source compiles for the GPU too, whether or not there is one here."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sok_lite.backend import cpu, sources
from sok_lite.backend.build import compile_library, find_library

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sources.kernel_files()


def load_script(name):
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


registers = load_script("kernel_registers")


@functools.cache
def nvrtc():
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy raises RuntimeError or OSError by the way it was installed
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return nvrtc


@functools.cache
def compiled(path, arch):
    """What NVRTC makes of a file: compiled once for all tests."""
    return registers.compile_source(nvrtc(), sources.inlined(path), arch)


@pytest.mark.parametrize("arch", registers.ARCHS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_compile_with_nvrtc_without_any_include_path(path, arch):
    assert compiled(path, arch).error is None


@pytest.mark.parametrize("arch", registers.ARCHS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_kernel_spills(path, arch):
    usage = compiled(path, arch).kernels
    assert set(usage) == set(re.findall(r"\.entry (\w+)", compiled(path, arch).ptx))
    assert usage, path.name
    assert {name: each for name, each in usage.items() if each.spill_bytes} == {}


def test_a_kernel_that_spills_is_seen():
    source = sources.inlined(sources.kernel_folder() / "update" / "rmsprop.cu")
    few = registers.compile_source(nvrtc(), source, "sm_80", ["--maxrregcount=24"]).kernels
    assert any(usage.spill_bytes for usage in few.values())
    assert max(usage.registers for usage in few.values()) <= 24


def test_a_report_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="another format"):
        registers.parse_usage("ptxas info : Compiling entry function 'k' for 'sm_90'\nUsed many")


def test_the_gpu_has_the_kernels_of_the_cpu_and_they_are_found_by_name():
    library = find_library()
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    on_cpu = set(re.findall(r"\bsok_run_(\w+)", symbols.stdout))
    kernels = sources.all_kernels()
    on_gpu = set()
    for path in FILES:
        for name in re.findall(r"\.entry (\w+)", compiled(path, "sm_90").ptx):
            assert sources.find_kernel(name, kernels).path == path
            on_gpu.add(name)
    assert on_gpu == on_cpu
    # The cuda backend reads the parameters in the sources; the CPU's compiler knew them.
    backend = cpu.CpuBackend()
    for name in on_cpu:
        pairs = zip(
            sources.find_kernel(name, kernels).signature,
            backend._kernel(name).signature,
            strict=True,
        )
        assert all(mine == theirs or (mine == "?" and theirs not in "#.") for mine, theirs in pairs)
    assert sources.find_kernel("rows_read_u32", kernels).kind == "row"
    assert sources.find_kernel("unique_insert", kernels).kind == ""
    assert sources.find_kernel("det_find", kernels).kind == "tile"
    with pytest.raises(AttributeError, match="No kernel 'rows_eat_u32'"):
        sources.find_kernel("rows_eat_u32", kernels)


def test_nvrtc_refuses_what_is_no_kernel():
    source = sources.inlined(FILES[0]) + "\nSOK_KERNEL(broken)(i64 n) { not_a_function(n); }\n"
    assert "not_a_function" in registers.compile_source(nvrtc(), source, "sm_90").error


def test_nvrtc_flags_are_the_ones_that_the_cuda_backend_uses():
    text = (sources.kernel_folder().parent / "sok_lite" / "backend" / "cuda.py").read_text()
    named = re.search(r"NVRTC_FLAGS = \((.*)\)", text).group(1)
    assert re.findall(r'"(.*?)"', named) == list(registers.FLAGS)


def exported_names():
    """Names that the sources export, macro-made ones as written (with ##)."""
    return {
        name for path in FILES for name in re.findall(r"SOK_EXPORT\(([\w#]+)\)", path.read_text())
    }


def test_every_kernel_is_exported_to_the_cpu():
    for path in FILES:
        text = path.read_text()
        kernels = set(re.findall(r"SOK_(?:ROW_|TILE_)?KERNEL\(([\w#]+)\)", text))
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
                assert re.fullmatch(r'#include "[\w/]+\.cuh"', line), f"{path.name}: {line}"
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


def test_tunables_reach_both_compilers(tmp_path, monkeypatch):
    recorder = tmp_path / "cxx"
    recorder.write_text('#!/bin/sh\necho "$@" > "$0.log"\nfor last; do :; done\n: > "$last"\n')
    recorder.chmod(0o755)
    monkeypatch.setenv("CXX", str(recorder))
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", "")
    default = compile_library()
    monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", " SOK_LINE=8  SOK_TILE=2")
    assert sources.kernel_defines() == {"SOK_LINE": 8, "SOK_TILE": 2}
    # Another library: one with other tunables must not be taken from the cache.
    assert compile_library() != default
    assert "-DSOK_LINE=8 -DSOK_TILE=2" in (tmp_path / "cxx.log").read_text()
    assert find_library() not in (default, None)
    source = 'extern "C" __global__ void k(int* p) { p[0] = 7000 + SOK_LINE; }'
    assert "7008" in registers.compile_source(nvrtc(), source, "sm_90").ptx


def test_the_cuda_backend_compiles_with_the_tunables():
    # A stand-in for CuPy that records what would be compiled and launched.
    program = """
import os, sys, types
from unittest import mock
sys.modules["cupy"] = cupy = mock.MagicMock()
cupy.ndarray = type("ndarray", (), {})
cupy.cuda.runtime.getDeviceCount.return_value = 1
cupy.cuda.Device.return_value.attributes = {"MultiProcessorCount": 4}
cupy.cuda.compiler.compile_using_nvrtc.return_value = b"", None
from sok_lite.backend.cuda import CudaBackend
backend = CudaBackend()
# One thread an item, a row of lanes, a tile of lanes.
for kernel, args in (
    ("unique_insert", (None, None, 15, None, 1000)),
    ("rows_fill", (None, 4, 8, None, 0.5, 1000)),
    ("det_find", (None, 64, -1, -2, 0, None, None, None, 1000)),
):
    backend.launch(kernel, 1000, *args)
print(cupy.cuda.compiler.compile_using_nvrtc.call_args.args[1])
for call in cupy.cuda.Module.return_value.get_function.return_value.call_args_list:
    print(*call.args[:2])
"""
    for defines, options, launches in (
        ("", [], ["(4,) (256,)", "(125,) (256,)", "(16,) (256,)"]),
        (
            "SOK_ROW_LANES=8 SOK_THREADS_PER_BLOCK=128 SOK_TILE=2",
            ["-DSOK_ROW_LANES=8", "-DSOK_THREADS_PER_BLOCK=128", "-DSOK_TILE=2"],
            ["(8,) (128,)", "(63,) (128,)", "(16,) (128,)"],
        ),
        # A tile is as many lanes as a line has slots.
        ("SOK_LINE=8", ["-DSOK_LINE=8"], ["(4,) (256,)", "(125,) (256,)", "(32,) (256,)"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "SOK_LITE_KERNEL_DEFINES": defines},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        flags = (*registers.FLAGS, *options)
        assert done.stdout.splitlines() == [str(flags), *launches], done.stderr


@pytest.mark.parametrize("text", ["SOK_LINE", "SOK_LINE=", "SOK_LINE=x", "SOK LINE=8", "=8"])
def test_tunables_that_are_no_numbers_are_refused(monkeypatch, text):
    monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", text)
    with pytest.raises(ValueError, match="list of NAME=NUMBER"):
        sources.kernel_defines()
