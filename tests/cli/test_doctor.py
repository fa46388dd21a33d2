"""`sok-lite doctor`: what is there, what is missing, and the line that mends it."""

import re
import sys
from importlib import metadata

import pytest

from sok_lite.backend import build
from sok_lite.cli.commands import doctor
from sok_lite.cli.main import main


def told(capsys):
    """The status, and what is said of each thing: state, text, what mends it."""
    status = main(["doctor"])
    lines, found = capsys.readouterr().out.splitlines(), {}
    for line in lines[:-1]:
        match = re.match(r"(ok|missing|BROKEN) +(\S+(?: \S+)?)  +(.+)", line)
        if match:
            name = match[2]
            found[name] = [match[1], match[3], None]
        else:
            found[name][2] = line.split("-> ")[1]
    return status, found, lines[-1]


@pytest.fixture
def versions(monkeypatch):
    """Versions of packages in place of those installed; None: not installed."""
    given, version = {}, metadata.version

    def found(name):
        if name not in given:
            return version(name)
        if given[name] is None:
            raise metadata.PackageNotFoundError(name)
        return given[name]

    monkeypatch.setattr(metadata, "version", found)
    return given


def test_here_nothing_is_broken(capsys):
    """It imports TensorFlow and Horovod, as the tests do."""
    status, found, last = told(capsys)
    assert status == 0 and last == "Nothing is broken."
    assert found["Python"] == ["ok", sys.version.split()[0], None]
    for name in ("TensorFlow", "keras", "sok_lite", "CPU kernels", "cache"):
        assert found[name][0] == "ok", found[name]
    assert len(found) == len(doctor.CHECKS)


def test_what_is_missing_is_named_with_what_brings_it(capsys, versions):
    names = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "tqdm", "redis")
    versions.update(dict.fromkeys(names))
    status, found, _ = told(capsys)
    assert status == 0
    for name, mend in {
        "TensorFlow": 'pip install "tensorflow-cpu>=2.16,<2.22", or tensorflow[and-cuda] for GPUs',
        "Horovod": "python scripts/build_horovod.py, in a checkout of sok_lite",
        "mpi4py": 'pip install "mpi4py>=4"',
        "redis": 'pip install "redis>=6"',
    }.items():
        assert (found[name][0], found[name][2]) == ("missing", mend)


def test_versions_that_do_not_fit_are_broken(capsys, monkeypatch, versions):
    for given, name, mend in (
        ({"tensorflow": "2.15.1"}, "TensorFlow", r"tensorflow-cpu>=2\.16,<2\.22"),
        ({"tensorflow": "2.22.0"}, "TensorFlow", r"tensorflow-cpu>=2\.16,<2\.22"),
        ({"tensorflow": "2.21.0", "tf_keras": "2.20.1"}, "tf_keras", r"tf_keras==2\.21\.\*"),
    ):
        versions.update(given)
        status, found, last = told(capsys)
        assert status == 1 and name in last
        assert found[name][0] == "BROKEN" and re.search(mend, found[name][2])
    # And a package that cannot be imported.
    versions["horovod"] = "0.28.1"
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    status, found, _ = told(capsys)
    assert status == 1 and found["Horovod"][0] == "BROKEN"
    assert "horovod.tensorflow" in found["Horovod"][1]


def test_kernels_need_a_compiler_or_a_wheel(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "shipped_library", lambda: None)
    monkeypatch.setenv("CXX", "g++")
    assert told(capsys)[1]["CPU kernels"][::2] == [
        *("missing", "sok-lite compile, or wait a minute or two at the first table"),
    ]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    status, found, _ = told(capsys)
    assert status == 1 and found["CPU kernels"][0] == "BROKEN"
    assert "apt-get install g++" in found["CPU kernels"][2]


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "1", "GPU"),
        ("SOK_LITE_CACHE", __file__, "cache"),  # cannot be written to
    ],
)
def test_a_variable_that_does_harm_is_broken(capsys, monkeypatch, variable, value, name):
    monkeypatch.setattr(doctor, "cuda_unavailable", lambda: None)
    monkeypatch.setenv(variable, value)
    status, found, _ = told(capsys)
    assert status == 1 and found[name][0] == "BROKEN"
    assert name != "cache" or variable in found[name][2]


def test_a_gpu_that_was_asked_for_and_is_not_there_is_broken(capsys, monkeypatch):
    if doctor.cuda_unavailable() is None:
        pytest.skip("there is a GPU")
    monkeypatch.setenv("SOK_LITE_BACKEND", "cuda")
    status, found, _ = told(capsys)
    assert status == 1 and found["GPU"][0] == "BROKEN"
    monkeypatch.setenv("SOK_LITE_BACKEND", "cpu")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    status, found, _ = told(capsys)
    assert status == 0 and found["GPU"][0] == "missing" and "cupy-cuda12x" in found["GPU"][2]


def test_a_cluster_of_tensorflows_own_is_broken(capsys, monkeypatch):
    for config, state in [
        ('{"cluster": {"ps": ["a:1"], "worker": ["b:1", "c:1"]}}', "BROKEN"),
        ('{"cluster": {"worker": ["b:1", "c:1"]}}', "BROKEN"),
        ('{"cluster": {"ps": ["a:1"]}}', "BROKEN"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}', "ok"),
        ("", "ok"),
        ("{}", "ok"),
        ("no JSON", "ok"),
        ('{"cluster": {"worker": 3}}', "ok"),
    ]:
        monkeypatch.setattr(doctor, "CHECKS", (doctor._cluster,))
        monkeypatch.setenv("TF_CONFIG", config)
        status, found, _ = told(capsys)
        assert found["cluster"][0] == state and status == (state == "BROKEN")
        assert (found["cluster"][2] is None) == (state == "ok")


def test_the_versions_are_those_that_pip_is_asked_for():
    text = (doctor.Path(__file__).parents[2] / "pyproject.toml").read_text()
    (first, end) = (".".join(map(str, each)) for each in doctor._TENSORFLOWS)
    assert f"tensorflow-cpu>={first},<{end}" in text
    assert 'requires-python = ">=3.10' in text


def test_launches_on_a_gpu_are_told_with_what_is_in_the_way(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "default_backend", lambda: "cuda")
    for name in ("record_of", "prepare"):
        monkeypatch.setattr(doctor.gpu, name, lambda backend: None)
    monkeypatch.setattr(doctor.gpu, "chosen", "tensorflow")
    monkeypatch.setattr(doctor.gpu, "reasons", {})
    assert told(capsys)[1]["GPU launches"] == ["ok", "in order by way of 'tensorflow'", None]
    monkeypatch.setattr(doctor.gpu, "chosen", "python")
    monkeypatch.setattr(doctor.gpu, "reasons", {"tensorflow": "no compiler"})
    state, found, mend = told(capsys)[1]["GPU launches"]
    assert (state, mend) == ("missing", "see Three ways in docs/internals/tensorflow.md")
    assert found == "in order by way of 'python', for no compiler"
