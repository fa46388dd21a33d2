"""The wheel, the scripts that set up and check, and the Dockerfile that calls them."""

import email
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sok_lite._version import __version__
from sok_lite.backend import build
from sok_lite.engine.files.rewriting import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
# What the scripts call before they know whether the machine suits; no compiler among them.
PLAIN_TOOLS = ("bash", "cat", "dirname", "env", "head", "sed", "sleep", "tail", "uname")


def run(*command, **kwargs):
    # Long: beside ranks that wait for each other a build of two minutes took more than ten.
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=1800, **kwargs
    )


def load_script(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, SCRIPTS / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tool(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


@pytest.fixture
def plain_path(tmp_path):
    """A PATH with the plain tools and nothing else."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in PLAIN_TOOLS:
        (folder / name).symlink_to(shutil.which(name))
    return folder


# ------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this tree, or the one that tools/build_wheel.sh has made."""
    if "SOK_LITE_WHEEL" in os.environ:
        return Path(os.environ["SOK_LITE_WHEEL"])
    if importlib.util.find_spec("scikit_build_core") is None or build.shutil.which("g++") is None:
        pytest.skip("building the wheel needs scikit-build-core and g++")
    folder = tmp_path_factory.mktemp("wheel")
    # All of the sources, in a third of the time: the last -O wins.
    compiler = folder / "g++"
    write_tool(compiler, f'exec {shutil.which("g++")} "$@" -O0\n')
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheels")
    env = {**os.environ, "CXX": str(compiler)}
    done = run(sys.executable, "-m", "pip", "wheel", *options, ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "wheels").iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a new environment that has the wheel, NumPy, and nothing else."""
    folder = tmp_path_factory.mktemp("new") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    # The NumPy of this environment: no package index is asked, and nothing else could come along.
    (packages,) = folder.glob("lib/python*/site-packages")
    numpy = importlib.metadata.distribution("numpy")
    for name in {file.parts[0] for file in numpy.files} - {".."}:
        (packages / name).symlink_to(numpy.locate_file(name))
    done = run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def run_installed(installed, tmp_path, code, **variables):
    """Runs code with the wheel's Python, no compiler on PATH and no checkout in sight."""
    empty = tmp_path / "empty"
    empty.mkdir(exist_ok=True)
    cache = tmp_path / "cache"
    env = {"PATH": str(empty), "SOK_LITE_CACHE": str(cache), "HOME": str(tmp_path), **variables}
    done = run(installed, "-c", code, cwd=empty, env=env)
    assert not cache.exists(), "something was compiled"
    return done


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_wheel_serves_every_python_of_the_platform(wheel):
    tag = r"(manylinux|linux|macosx)_[\w.]+"
    assert re.fullmatch(rf"sok_lite-{__version__}-py3-none-{tag}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"sok_lite-{__version__}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in text


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_wheel_holds_every_module_and_every_kernel_source(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "sok_lite").rglob("*.py")}
    kernels = {
        f"sok_lite/{path.relative_to(ROOT)}"
        for path in (ROOT / "kernels").rglob("*")
        if path.suffix in (".cu", ".cuh", ".cpp")
    }
    assert len(kernels) > 5
    assert modules | kernels | {"sok_lite/py.typed", "sok_lite/lib/libsok_lite_cpu.so"} <= names
    others = {name for name in names if not name.startswith("sok_lite")}
    assert not others


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_libraries_show_their_kernels_and_nothing_of_libstdcxx(wheel, tmp_path):
    if shutil.which("nm") is None:
        pytest.skip("no nm to list symbols with")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path, names)
    for name in names:
        lines = run("nm", "-D", "--defined-only", tmp_path / name).stdout.splitlines()
        symbols = {line.split()[-1] for line in lines}
        assert "sok_launch" in symbols
        assert not {symbol for symbol in symbols if not symbol.startswith("sok_")}


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is of Linux")
def test_wheel_needs_of_a_linux_its_glibc_alone(wheel, tmp_path):
    """So auditwheel finds a manylinux tag for it, and has no library to put into it."""
    done = run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, wheel)
    assert done.returncode == 0, done.stderr
    (repaired,) = tmp_path.iterdir()
    assert re.search(r"-manylinux_2_\d+_\w+", repaired.name)
    with zipfile.ZipFile(repaired) as archive:
        libraries = {name for name in archive.namelist() if ".so" in name}
    assert {name.rpartition("/")[0] for name in libraries} == {"sok_lite/lib"}


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_metadata_names_the_extras_and_the_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        folder = f"sok_lite-{__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        license_text = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in license_text
    extras = "cpu docs gpu gpu-cuda13 horovod mpi parquet plots progress redis test".split()
    assert sorted(metadata.get_all("Provides-Extra")) == extras
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.split(r"[<>=]", line)[0] for line in plain] == ["numpy"]


USE_TABLE = """
import json, sys
import numpy as np
from sok_lite.backend import build, get_backend
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table.det import DetTable

backend = get_backend("cpu")
table = DetTable(backend, 5, initializer=make_initializer("uniform", 5), name="t", seed=3)
keys = np.random.default_rng(0).integers(-50, 50, 1000)
rows = table.find_or_insert(keys)
values = table.lookup(keys).values
print(json.dumps({
    "library": str(build.find_library()), "size": table.size, "rows": rows.tolist(),
    "tensorflow": "tensorflow" in sys.modules,
}))
"""


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_wheel_works_with_no_compiler(installed, tmp_path):
    done = run_installed(installed, tmp_path, USE_TABLE)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert str(installed.parent.parent) in answer["library"]
    assert not answer["tensorflow"]
    keys = np.random.default_rng(0).integers(-50, 50, 1000)
    assert answer["size"] == len(np.unique(keys))
    rows = np.array(answer["rows"])
    # A row number per key, the same for equal keys only.
    assert len(np.unique(rows)) == len(np.unique(keys))
    assert len(np.unique(np.stack([rows, keys]), axis=1).T) == len(np.unique(keys))


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_the_command_line_needs_numpy_alone(installed, tmp_path):
    write_checkpoint(tmp_path / "c", [])
    command = installed.parent / "sok-lite"
    for arguments in (["--version"], ["verify", "c"], ["reshard", "c", "d", "--ranks", "2"]):
        done = run(command, *arguments, cwd=tmp_path, env={"PATH": "", "HOME": str(tmp_path)})
        assert (done.returncode, done.stderr) == (0, "")
    assert "is whole" in run(command, "verify", "d", cwd=tmp_path).stdout
    assert run(command, "verify", "none", cwd=tmp_path).returncode == 3


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_wheel_takes_the_library_of_the_processor(installed, tmp_path):
    code = "from sok_lite.backend import build; print(build.find_library())"
    chosen = Path(run_installed(installed, tmp_path, code).stdout.strip())
    assert chosen.name == f"libsok_lite_cpu{'_v3' * build.has_x86_64_v3()}.so"
    other = chosen.with_name("libsok_lite_cpu.so")
    done = run_installed(installed, tmp_path, USE_TABLE, SOK_LITE_CPU_LIBRARY=str(other))
    assert done.returncode == 0, done.stderr


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_a_name_that_needs_tensorflow_says_how_to_get_it(installed, tmp_path):
    done = run_installed(installed, tmp_path, "import sok_lite; sok_lite.DynamicVariable")
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert 'pip install "sok_lite[cpu]"' in done.stderr
    assert 'pip install "sok_lite[gpu]"' in done.stderr


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", text, re.MULTILINE).group(1) == __version__


def test_cmake_compiles_with_the_flags_of_a_checkout():
    text = (ROOT / "CMakeLists.txt").read_text()
    options = re.search(r"target_compile_options\((.*?)\)", text, re.DOTALL).group(1).split()
    flags = {option for option in options if option.startswith("-")}
    assert flags == set(build.FLAGS) - {"-shared"}


# ----------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_script_parses(script):
    done = run("bash", "-n", script)
    assert done.returncode == 0, done.stderr


def set_up(path, tmp_path, *arguments, **variables):
    env = {"PATH": str(path), "HOME": str(tmp_path), "SOK_LITE_VENV": str(tmp_path / "venv")}
    return run(shutil.which("bash"), SCRIPTS / "setup.sh", *arguments, env={**env, **variables})


@pytest.mark.parametrize("arguments", [(), ("--gpu",)])
def test_setup_without_a_compiler_says_how_to_get_one(plain_path, tmp_path, arguments):
    (plain_path / "python3").symlink_to(sys.executable)
    done = set_up(plain_path, tmp_path, *arguments)
    assert done.returncode == 1
    assert "no C++ compiler: 'g++'" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_without_the_venv_module_names_the_package(plain_path, tmp_path):
    real = sys.executable
    write_tool(
        plain_path / "python3",
        f'case "$*" in *ensurepip*) exit 1 ;; esac\nexec {real} "$@"\n',
    )
    done = set_up(plain_path, tmp_path)
    assert done.returncode == 1
    minor = sys.version_info[1]
    assert f"apt-get install python3.{minor}-venv" in done.stderr


@pytest.mark.parametrize("version", ["3.9.2", "3.14.0", None])
def test_setup_with_an_unsuitable_python_says_which_suits(plain_path, tmp_path, version):
    if version is not None:
        write_tool(
            plain_path / "python3",
            f'if [ "$1" = --version ]; then echo Python {version}; else exit 1; fi\n',
        )
    done = set_up(plain_path, tmp_path)
    assert done.returncode == 1
    assert "needs Python 3.10, 3.11, 3.12 or 3.13" in done.stderr
    assert ("none" if version is None else f"Python {version} (python3)") in done.stderr


def test_setup_takes_the_first_python_that_suits(plain_path, tmp_path):
    write_tool(plain_path / "python3", "exit 1\n")
    (plain_path / "python3.12").symlink_to(sys.executable)
    done = set_up(plain_path, tmp_path)
    assert "no C++ compiler" in done.stderr


def test_setup_keeps_the_python_of_its_environment(plain_path, tmp_path):
    kept = tmp_path / "kept" / "python3"
    # Its missing venv module makes the message name it.
    write_tool(kept, f'case "$*" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n')
    write_tool(tmp_path / "venv" / "bin" / "python", f"echo {kept}\n")
    (plain_path / "python3").symlink_to(sys.executable)
    done = set_up(plain_path, tmp_path)
    assert f"{kept} has no venv module" in done.stderr


def test_setup_refuses_an_unknown_argument(tmp_path):
    done = set_up(os.environ["PATH"], tmp_path, "--gpus")
    assert done.returncode == 1
    assert "unknown argument '--gpus'" in done.stderr


@pytest.fixture
def staged_set_up(tmp_path):
    """Starts set-ups that make an environment of stubs: (log of what they do, go, start).

    They install nothing before the file `go` is there.
    """
    log, go, pip, python = (tmp_path / name for name in ("log", "go", "pip", "python3"))
    log.touch()
    write_tool(
        pip,
        f'case "$*" in\n'
        f'  "-m pip --version") ;;\n'
        f'  "-m pip "*) echo install >>{log}; until [ -e {go} ]; do sleep 0.01; done ;;\n'
        f"  *build_horovod.py*) echo horovod >>{log} ;;\n"
        f"  *find_library*) echo kernels >>{log} ;;\n"
        f'  *) exec {sys.executable} "$@" ;;\n'
        f"esac\n",
    )
    write_tool(
        python,
        f'if [ "$1 $2" != "-m venv" ]; then exec {sys.executable} "$@"; fi\n'
        f'echo "venv $3" >>{log}\n'
        f'mkdir -p "${{@: -1}}/bin"\ncp {pip} "${{@: -1}}/bin/python"\n',
    )
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "SOK_LITE_VENV": str(tmp_path / "venv"),
        "SOK_LITE_PYTHON": str(python),
        "CXX": "bash",
    }
    started = []

    def start(scripts=SCRIPTS):
        out, err = subprocess.PIPE, subprocess.STDOUT
        command = ["bash", scripts / "setup.sh"]
        started.append(
            subprocess.Popen(
                command, stdout=out, stderr=err, text=True, env=env, start_new_session=True
            )
        )
        return started[-1]

    yield log, go, start
    go.touch()
    for process in started:
        process.communicate(timeout=300)


def begun_set_up(log, start):
    process = start()
    deadline = time.monotonic() + 300
    while "install" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    return process


def test_a_second_set_up_waits_and_finds_all_done(staged_set_up):
    log, go, start = staged_set_up
    first = begun_set_up(log, start)
    second = start()
    assert "is under way: waiting for it" in second.stdout.readline()
    go.touch()
    assert "ready: " in first.communicate(timeout=300)[0]
    assert second.communicate(timeout=300)[0] == ""
    third = start()
    assert third.communicate(timeout=300)[0] == ""
    assert [first.returncode, second.returncode, third.returncode] == [0, 0, 0]
    words = [line.split()[0] for line in log.read_text().splitlines()]
    # A set-up with nothing else to do asks for the kernels, which may have been edited.
    assert words == ["venv", "install", "install", "install", "horovod", *["kernels"] * 3]


def test_before_the_sources_are_there_a_set_up_leaves_the_kernels_out(staged_set_up, tmp_path):
    log, go, start = staged_set_up
    scripts = tmp_path / "image" / "scripts"
    shutil.copytree(SCRIPTS, scripts)
    shutil.copy(ROOT / "pyproject.toml", scripts.parent)
    go.touch()
    process = start(scripts)
    assert "ready: " in process.communicate(timeout=300)[0]
    assert (process.returncode, "kernels" in log.read_text()) == (0, False)


def test_a_set_up_that_is_killed_holds_up_no_other(staged_set_up):
    log, go, start = staged_set_up
    killed = begun_set_up(log, start)
    second = start()
    assert "is under way: waiting for it" in second.stdout.readline()
    os.killpg(killed.pid, signal.SIGKILL)
    go.touch()
    assert "was killed midway: starting over" in second.communicate(timeout=300)[0]
    assert second.returncode == 0
    assert "venv --clear" in log.read_text()


def test_dockerfile_calls_scripts_that_exist():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert [word for word, _ in lines].count("FROM") == 1
    for word, rest in lines:
        if word == "COPY":
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists(), name
    commands = [shlex.split(rest) for word, rest in lines if word == "RUN" and "bash" in rest]
    commands += [json.loads(rest) for word, rest in lines if word == "CMD"]
    assert ["bash", "scripts/setup.sh", "--gpu"] in commands
    for command in commands:
        assert command[0] == "bash"
        assert (ROOT / command[1]).is_file()


def test_horovod_wheels_are_kept_apart_by_what_they_depend_on():
    script = load_script("build_horovod.py")
    keys = {
        script.wheel_key("2.21.0", None, False),
        script.wheel_key("2.20.0", None, False),
        script.wheel_key("2.21.0", "mpi4.1.4", False),
        script.wheel_key("2.21.0", "mpi5.0.1", False),
        script.wheel_key("2.21.0", None, True),
    }
    assert len(keys) == 5
    assert all(f"cp3{sys.version_info[1]}" in key for key in keys)


def test_horovod_cache_is_outside_the_tree(monkeypatch, tmp_path):
    script = load_script("build_horovod.py")
    for name in ("SOK_LITE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert script.cache_dir() == tmp_path / ".cache" / "sok_lite"
    assert script.cache_dir() == build.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert script.cache_dir() == tmp_path / "x" / "sok_lite"
    monkeypatch.setenv("SOK_LITE_CACHE", "~/y")
    assert script.cache_dir() == tmp_path / "y"
    assert script.cache_dir() == build.cache_folder()


@pytest.mark.full_only("builds a wheel: both kernel libraries are compiled")
def test_horovod_build_without_tensorflow_says_so(installed, tmp_path):
    done = run(installed, SCRIPTS / "build_horovod.py", env={"HOME": str(tmp_path), "PATH": ""})
    assert done.returncode == 1
    assert done.stderr.startswith("error: Horovod is built against an installed TensorFlow")


def test_horovod_build_refuses_a_source_it_does_not_know(tmp_path):
    script = load_script("build_horovod.py")
    path = tmp_path / "CMakeLists.txt"
    path.write_text("one two")
    script.replace_once(path, "one", "three")
    assert path.read_text() == "three two"
    with pytest.raises(script.BuildError, match="found it 0 times"):
        script.replace_once(path, "one", "three")


# --------------------------------------------------------- scripts whose parts are played by others


@pytest.fixture
def stage_set(tmp_path):
    """A project whose set-up is done and whose tools are yours to write."""
    project = tmp_path / "project"
    (project / "tests").mkdir(parents=True)
    (project / "kernels").mkdir()
    shutil.copytree(SCRIPTS, project / "scripts")
    shutil.copy(SCRIPTS.parent / "pyproject.toml", project)
    write_tool(project / "scripts" / "setup.sh", "exit 0\n")
    (project / ".venv-oldest").mkdir()
    (project / ".venv-oldest" / "sok_lite-setup.txt").touch()
    tools = project / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "python3").symlink_to(sys.executable)
    env = {**os.environ}
    env.pop("SOK_LITE_VENV", None)
    return project, tools, env


@pytest.mark.parametrize("code", [0, 3])
def test_demo_ends_with_the_result_of_rank_0(stage_set, code):
    project, tools, env = stage_set
    (tools / "python").symlink_to(sys.executable)
    write_tool(
        tools / "horovodrun",
        'echo "[1]<stdout>:hello $*"\n'
        "printf '[0]<stderr>:10%%\\r[0]<stderr>:20%%\\r' >&2\n"
        "echo '[0]<stdout>:RESULT {\"auc\": [1]}'\n"
        f"exit {code}\n",
    )
    script = project / "scripts" / "demo.sh"
    done = subprocess.run(
        ["bash", script, "--ranks", "3", "--rows", "7"], capture_output=True, env=env, timeout=300
    )
    assert done.returncode == code
    assert done.stdout == (
        b'hello -np 3 python examples/train_ctr.py --ranks 3 --rows 7\nRESULT {"auc": [1]}\n'
    )
    assert done.stderr == b"10%\r20%\r"


@pytest.mark.parametrize("failing", [None, "ruff", "python", "horovodrun"])
def test_the_last_line_of_test_sh_counts_all_stages(stage_set, failing):
    project, tools, env = stage_set
    good = {
        "ruff": (1, "echo fine"),
        "mypy": (1, "echo fine"),
        "clang-format": (1, "true"),
        "mpirun": (40, "echo '40 passed, 2 skipped in 1.00s'"),
        "horovodrun": (
            41,
            "echo '[0]<stdout>:41 passed in 1.0s'; echo '[1]<stdout>:40 passed, 1 skipped in 1.0s'",
        ),
        "python": (100, "echo '=== 100 passed, 5 skipped in 2.00s ==='"),
    }
    bad = {
        "ruff": (0, 1, "echo bad"),
        "horovodrun": (
            41,
            2,
            "echo '[0]<stdout>:39 passed, 2 failed in 1.0s'; echo '[1]<stdout>:41 passed in 1.0s'",
        ),
        # No closing line: a stage that broke off counts as one failure.
        "python": (0, 1, "echo '1 failed, 3 errors'"),
    }
    for name, (_, text) in good.items():
        write_tool(tools / name, f"{bad[name][2]}\nexit 1\n" if name == failing else f"{text}\n")
    for oldest in ("1", "0"):
        done = run("bash", project / "scripts" / "test.sh", env={**env, "SOK_LITE_OLDEST": oldest})
        stages, _ = load_script("check.py").quick_and_full_stages("2.16", oldest == "1")
        expected = [
            bad[tool][:2] if tool == failing else (good[tool][0], 0)
            for tool in (stage.command[0] for stage in stages)
        ]
        passed, failed = map(sum, zip(*expected, strict=True))
        last = done.stdout.splitlines()[-1]
        assert last.startswith(f"{passed} passed, {failed} failed, "), done.stdout
        assert done.returncode == (0 if failing is None else 1)
        assert ("\n=== tests, TensorFlow 2.16\n" in done.stdout) == (oldest == "1")
        assert "2 ranks, mpirun; of all others, what is full_only" in done.stdout


def test_without_the_oldest_tensorflow_its_stage_fails_and_the_others_run(stage_set):
    project, tools, env = stage_set
    shutil.rmtree(project / ".venv-oldest")
    for name in ("ruff", "mypy", "clang-format", "mpirun", "horovodrun", "python"):
        write_tool(tools / name, "echo '1 passed in 1.00s'\n")
    done = run("bash", project / "scripts" / "test.sh", env={**env, "SOK_LITE_OLDEST": "1"})
    assert done.returncode == 1
    assert "SOK_LITE_OLDEST=0 leaves this stage out" in done.stdout
    assert ", 1 failed, 0 skipped in" in done.stdout.splitlines()[-1]


def test_test_sh_runs_what_pytest_would_of_paths(stage_set):
    project, tools, env = stage_set
    write_tool(tools / "python", 'echo "$*"\n')
    command = ["bash", project / "scripts" / "test.sh", "tests/sok", "-k", "a b"]
    done = run(*command, env=env)
    assert (done.returncode, done.stdout) == (0, "-m pytest tests/sok -k a b\n")


def test_test_sh_does_not_go_on_where_the_set_up_failed(stage_set):
    project, _, env = stage_set
    write_tool(project / "scripts" / "setup.sh", "exit 3\n")
    assert run("bash", project / "scripts" / "test.sh", env=env).returncode == 1
