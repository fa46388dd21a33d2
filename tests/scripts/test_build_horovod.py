"""What scripts/build_horovod.py makes of Horovod for a GPU, as far as that shows without one."""

import os
import re
import subprocess
import sys
import threading
import zipfile
from importlib.metadata import version

import pytest
import tensorflow as tf

from scripts import build_horovod
from sok_lite.backend.build import cache_folder
from tests.support.rank_jobs import launcher

# Namespaces that are TensorFlow's; Horovod's own and the C library's are not looked at.
TENSORFLOW = re.compile(r"\b(tensorflow|stream_executor|tsl|xla|absl)::")


def run(*command):
    command = [str(part) for part in command]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wheel_of(folder, *requirement):
    """Returns the files of a wheel that pip downloads."""
    pip = build_horovod.pip("download", "-qq", "--no-deps", "--dest", folder / requirement[0])
    run(*pip, "".join(requirement))
    (path,) = (folder / requirement[0]).glob("*.whl")
    return zipfile.ZipFile(path)


def symbols(option, *files):
    return set(re.findall(r" [A-Za-z] (.*)", run("nm", *option, *files)))


@pytest.mark.full_only("compiles against TensorFlow's and CUDA's headers, and downloads wheels")
def test_a_gpu_build_asks_tensorflow_for_nothing_that_its_gpu_wheel_has_not(tmp_path):
    source = build_horovod.get_source(tmp_path, tmp_path / "log")
    build_horovod.patch_source(source, gpu=True, with_mpi=False)
    for name in ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12"):
        wheel_of(tmp_path, name).extractall(tmp_path / "cuda")
    major, minor = version("tensorflow-cpu").split(".")[:2]
    third_party = source / "third_party"
    folders = [
        *sorted((tmp_path / "cuda" / "nvidia").glob("*/include")),
        *sorted(third_party.glob("boost/*/include")),
        *(third_party / name for name in ("eigen", "flatbuffers/include", "gloo")),
        *(third_party / name for name in ("lbfgs/include", "HTTPRequest/include")),
    ]
    run(
        *("g++", "-c", "-O0", "-fPIC", "-include", "cstdint", *tf.sysconfig.get_compile_flags()),
        *("-DHAVE_GPU=1", "-DHAVE_CUDA=1", "-DHAVE_GLOO=1"),
        f"-DTENSORFLOW_VERSION={major}{int(minor):03}000000",
        *(f"-I{folder}" for folder in folders),
        *(source / "horovod/tensorflow/mpi_ops.cc", "-o", tmp_path / "mpi_ops.o"),
    )
    wanted = symbols(["-uC"], tmp_path / "mpi_ops.o")
    wanted = {name for name in wanted if TENSORFLOW.search(name)}
    assert len(wanted) > 50
    with wheel_of(tmp_path, "tensorflow", f"=={version('tensorflow-cpu')}") as wheel:
        libraries = [
            wheel.extract(name, tmp_path)
            for name in wheel.namelist()
            if re.search(r"/libtensorflow_(cc|framework)\.so", name)
        ]
    assert len(libraries) == 2
    has = {name.split("@")[0] for name in symbols(["-DC", "--defined-only"], *libraries)}
    assert not wanted - has


def test_what_cannot_be_imported_is_no_build(monkeypatch, tmp_path):
    broken = tmp_path / "horovod"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('undefined symbol: AsGpuStreamValue')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(build_horovod.BuildError, match="undefined symbol: AsGpuStreamValue"):
        build_horovod.check_import()


def test_the_launcher_knows_what_was_built_without_tensorflow(monkeypatch, tmp_path):
    """It else imports TensorFlow in two processes before a job begins."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run(launcher("horovod"), "-np", 1, sys.executable, "-c", "pass")


def test_wheels_are_kept_apart_by_what_they_depend_on_outside_the_tree(monkeypatch, tmp_path):
    builds = [("2.21.0", None, False), ("2.20.0", None, False), ("2.21.0", None, True)]
    builds += [("2.21.0", mpi, False) for mpi in ("mpi4.1.4", "mpi5.0.1")]
    keys = {build_horovod.wheel_key(*each) for each in builds}
    assert len(keys) == 5 and all(f"cp3{sys.version_info[1]}" in key for key in keys)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value, folder in (
        ("XDG_CACHE_HOME", "", ".cache/sok_lite"),
        ("XDG_CACHE_HOME", str(tmp_path / "x"), "x/sok_lite"),
        ("SOK_LITE_CACHE", "~/y", "y"),
    ):
        monkeypatch.delenv("SOK_LITE_CACHE", raising=False)
        monkeypatch.setenv(name, value)
        assert build_horovod.cache_dir() == cache_folder() == tmp_path / folder


@pytest.mark.parametrize(
    "banner, expected",
    [
        ("mpirun (Open MPI) 4.1.4", "mpi4.1.4"),
        ("mpirun (Open MPI) 5.0.10", None),
        ("mpirun (Open MPI) 10.0.1", None),
        ("HYDRA build details:\n    Version:  4.2.0", "mpi4.2.0"),
    ],
)
def test_horovodrun_is_not_given_an_mpi_that_it_cannot_start(
    monkeypatch, tmp_path, capsys, banner, expected
):
    for name in ("mpirun", "mpicc"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{banner}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert build_horovod.mpi_version() == expected
    assert ("built without MPI" in capsys.readouterr().out) == (expected is None)


def test_a_build_waits_for_one_that_goes_on(tmp_path, monkeypatch):
    told, ended = threading.Event(), []
    monkeypatch.setattr(build_horovod, "print", lambda *_, **__: told.set(), raising=False)

    def second():
        with build_horovod.one_build_at_a_time(tmp_path / "new"):
            ended.append("second")

    thread = threading.Thread(target=second)
    with build_horovod.one_build_at_a_time(tmp_path / "new"):
        thread.start()
        assert told.wait(60)
        ended.append("first")
    thread.join()
    assert ended == ["first", "second"]
