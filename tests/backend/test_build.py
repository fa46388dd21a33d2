"""The CPU kernel library: where it is found, and what keeps it from being compiled."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from sok_lite.backend import build
from sok_lite.backend.build import (
    FLAGS,
    cache_folder,
    compile_library,
    find_library,
    has_x86_64_v3,
)
from sok_lite.backend.sources import kernel_files, kernel_folder, runtime_files
from sok_lite.backend.tunables import kernel_defines
from tests.support.compiler_stand_in import stand_in
from tests.support.own_process import run_program

ROOT = Path(__file__).resolve().parents[2]


def test_the_library_is_built_once_for_the_same_sources(tmp_path, monkeypatch):
    commands = stand_in(tmp_path, monkeypatch)
    first = compile_library()
    compiled = sorted(Path(line.split()[-1]) for line in commands())
    assert compiled == sorted([*kernel_files(), *runtime_files()])
    assert compile_library() == first and first.is_file()
    assert len(commands()) == len(compiled)


# What tables, their initializers and their optimizers give, as one number.
DIGEST = """
import zlib
import numpy as np
from sok_lite.backend import get_backend
from sok_lite.engine import optimizers
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from tests.support.pooled import combine
from scripts.bench.common.row_steps import apply_rule

backend = get_backend("cpu")
rng = np.random.default_rng(0)
digest = 0
for kind in ("uniform", "normal", "truncated_normal"):
    for dim, dtype in ((3, "float32"), (16, "float32"), (8, "float16"), (8, "bfloat16")):
        initializer = make_initializer(kind, dim)
        table = make_table("hbm", backend, dim, initializer=initializer, dtype=dtype, seed=3)
        keys = rng.integers(-500, 500, 2000)
        gradients = rng.normal(size=(2000, dim)).astype(np.float32)
        rows = np.unique(table.find_or_insert(keys))
        for rule in (optimizers.Adam(), optimizers.SGD()):
            apply_rule(table, rule, rows, gradients[: len(rows)], 0.1, 1)
        values = np.asarray(table.lookup(keys).values, np.float32)
        weights, splits = rng.random(2000, np.float32), np.arange(0, 2001, 50)
        places = np.arange(2000, dtype=np.int32)
        for combiner in ("sum", "mean", "sqrtn"):
            out = combine(backend, values, places, splits, weights, combiner)
            digest = zlib.crc32(np.ascontiguousarray(out), digest)
        digest = zlib.crc32(values, digest)
print(digest)
"""


@pytest.mark.full_only("compiles the larger kernels: a minute")
def test_the_libraries_of_both_processors_give_the_same_bits(tmp_path):
    """A wheel has one library for all processors, and one for those that have AVX2 and FMA."""
    if not has_x86_64_v3():
        pytest.skip("this processor runs one of the two libraries only")
    folder, library = kernel_folder(), tmp_path / "plain.so"
    parts = "det/det initializer rows lookup segments combine slots update/adam update/sgd".split()
    kernels = [*(folder / f"{part}.cu" for part in parts), *runtime_files()]
    defines = [f"-D{name}={value}" for name, value in kernel_defines().items()]
    build.compile_sources(library, [*FLAGS, *defines], kernels, "CPU kernels")
    digests = []
    for chosen in (library, find_library()):
        digests.append(int(run_program(DIGEST, SOK_LITE_CPU_LIBRARY=str(chosen))))
    assert digests[0] == digests[1] != 0


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


def test_the_name_of_a_cache_may_be_empty_or_begin_with_the_home_folder(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name, folder in (("", "sok_lite"), ("~/kernels", "kernels")):
        monkeypatch.setenv("SOK_LITE_CACHE", name)
        assert cache_folder() == tmp_path / folder


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
