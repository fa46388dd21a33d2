"""The wheel, the scripts that set up and check, and the Dockerfile that calls them."""

import email
import importlib.metadata
import importlib.util
import json
import os
import re
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
from sok_lite.engine.files.source_writer import write_checkpoint
from sok_lite.native import library

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
# What the scripts call before they know whether the machine suits; no compiler among them.
PLAIN_TOOLS = ("bash", "cat", "dirname", "env", "head", "sed", "sleep", "tail", "uname")


builds_a_wheel = pytest.mark.full_only("builds a wheel: all kernel libraries are compiled")


def run(*command, **kwargs):
    # Long: beside ranks that wait for each other a build of two minutes took more than ten.
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=1800, **kwargs
    )


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


def build_wheel(folder, **variables):
    """Has pip build a wheel of this tree, with the compiler and the cache that `folder` has."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheels")
    env = {"CXX": str(folder / "g++"), "SOK_LITE_CACHE": str(folder), **variables}
    return run(sys.executable, "-m", "pip", "wheel", *options, ROOT, env={**os.environ, **env})


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder to build in, and a compiler that lists what it compiles in the file `compiled`."""
    if importlib.util.find_spec("hatchling") is None or shutil.which("g++") is None:
        pytest.skip("building the wheel needs hatchling and g++")
    folder = tmp_path_factory.mktemp("wheel")
    # All of the sources, in a fifth of the time: the last -O wins, and what is compiled of a kernel
    # for any processor serves the library for newer ones too.
    write_tool(
        folder / "g++",
        f"""
folder={folder} compiler={shutil.which("g++")}
case "$*" in *" -c "*) echo "$*" >>$folder/compiled ;; esac
case "$*" in *" -c "*".cu -o "*) ;; *) exec $compiler "$@" -O0 ;; esac
made=$folder/$(sed "s/ -o .*//; s/ -march=[^ ]*//" <<<"$*" | cksum | cut -d " " -f 1).o
[ -f $made ] || $compiler "$@" -O0 -o $made || exit
cp $made "${{@: -1}}"
""",
    )
    return folder


@pytest.fixture(scope="module")
def wheel(request):
    """A wheel of this tree, or the one that SOK_LITE_WHEEL names: a release's."""
    if "SOK_LITE_WHEEL" in os.environ:
        return Path(os.environ["SOK_LITE_WHEEL"])
    folder = request.getfixturevalue("workshop")
    done = build_wheel(folder)
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


@builds_a_wheel
def test_wheel_holds_every_module_and_kernel_source_and_serves_every_python(wheel):
    tag = r"(manylinux|linux|macosx)_[\w.]+"
    assert re.fullmatch(rf"sok_lite-{__version__}-py3-none-{tag}\.whl", wheel.name)
    folder = f"sok_lite-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert "Root-Is-Purelib: false" in archive.read(f"{folder}/WHEEL").decode()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "sok_lite").rglob("*.py")}
    kernels = {
        f"sok_lite/{path.relative_to(ROOT)}"
        for path in (ROOT / "kernels").rglob("*")
        if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    }
    assert len(kernels) > 5
    libraries = {f"sok_lite/lib/libsok_lite_{name}.so" for name in ("cpu", "ops")}
    others = {"sok_lite/py.typed", *libraries, f"{folder}/licenses/LICENSE"}
    assert modules | kernels | others <= names
    assert all(name.startswith("sok_lite") for name in names)
    assert (metadata["Version"], metadata["License-Expression"]) == (__version__, "Apache-2.0")
    extras = (
        "cpu docs gpu gpu-cuda13 horovod mpi object-store parquet plots progress redis test".split()
    )
    assert sorted(metadata.get_all("Provides-Extra")) == extras
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.split(r"[<>=]", line)[0] for line in plain] == ["numpy"]


@builds_a_wheel
@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is of Linux")
def test_libraries_show_their_kernels_alone_and_need_of_a_linux_its_glibc_alone(wheel, tmp_path):
    """So auditwheel finds a manylinux tag for the wheel, and has no library to put into it."""
    # TensorFlow has loaded that library when it loads ours.
    repair = ["auditwheel", "repair", "--exclude", "libtensorflow_framework.so.2"]
    done = run(sys.executable, "-m", *repair, "--wheel-dir", tmp_path, wheel)
    assert done.returncode == 0, done.stderr
    (repaired,) = tmp_path.iterdir()
    assert re.search(r"-manylinux_2_\d+_\w+", repaired.name)
    with zipfile.ZipFile(repaired) as archive:
        names = [name for name in archive.namelist() if ".so" in name]
        archive.extractall(tmp_path, names)
    for name in names:
        assert name.startswith("sok_lite/lib/") and name.count("/") == 2
        lines = run("nm", "-D", "--defined-only", tmp_path / name).stdout.splitlines()
        symbols = {line.split()[-1] for line in lines}
        one = "sok_ops_abi" if "ops" in name else "sok_launch"
        needed = run("readelf", "--dynamic", tmp_path / name).stdout
        assert (library.NEEDED in needed) == ("ops" in name)
        assert one in symbols and all(symbol.startswith("sok_") for symbol in symbols)


@builds_a_wheel
def test_a_machine_compiles_a_source_once(workshop, wheel, monkeypatch):
    """For a wheel, for another one that `pip install ".[docs]"` makes, and for its checkout."""
    if "SOK_LITE_WHEEL" in os.environ:
        pytest.skip("SOK_LITE_WHEEL was compiled elsewhere")
    commands = (workshop / "compiled").read_text().splitlines()
    assert len(commands) == len({re.sub(r"-o \S+", "", command) for command in commands})
    again = build_wheel(workshop)
    assert again.returncode == 0, again.stdout + again.stderr
    monkeypatch.setenv("SOK_LITE_CACHE", str(workshop))
    monkeypatch.setenv("CXX", str(workshop / "g++"))
    assert build.find_library().is_relative_to(workshop)
    assert library.find_library().is_relative_to(workshop)
    assert (workshop / "compiled").read_text().splitlines() == commands


@builds_a_wheel
def test_pip_says_that_a_compiler_is_missing(workshop, tmp_path):
    done = build_wheel(tmp_path, CXX="", PATH=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "there is no C++ compiler" in done.stderr and "apt-get install g++" in done.stderr


USE_TABLE = """
import json, sys
import numpy as np
from sok_lite.backend import build, get_backend
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table.det import DetTable

backend = get_backend("cpu")
table = DetTable(backend, 5, initializer=make_initializer("uniform", 5), name="t", seed=3)
rows = table.find_or_insert(np.random.default_rng(0).integers(-50, 50, 1000))
print(json.dumps([str(build.find_library()), rows.tolist(), "tensorflow" in sys.modules]))
"""


@builds_a_wheel
def test_wheel_works_with_no_compiler_on_the_library_of_the_processor(installed, tmp_path):
    plain, v3 = "libsok_lite_cpu.so", "libsok_lite_cpu_v3.so"
    of_this, folder = v3 if build.has_x86_64_v3() else plain, None
    for name in (of_this, plain):
        chosen = {} if folder is None else {"SOK_LITE_CPU_LIBRARY": str(folder / name)}
        done = run_installed(installed, tmp_path, USE_TABLE, **chosen)
        assert done.returncode == 0, done.stderr
        library, rows, has_tensorflow = json.loads(done.stdout)
        folder = Path(library).parent
        assert Path(library).name == name and folder.is_relative_to(installed.parent.parent)
        assert not has_tensorflow
        # A row number per key, the same for equal keys only.
        keys = np.random.default_rng(0).integers(-50, 50, 1000)
        pairs = set(zip(keys.tolist(), rows, strict=True))
        assert len(set(rows)) == len(set(keys.tolist())) == len(pairs)


@builds_a_wheel
def test_the_command_line_needs_numpy_alone(installed, tmp_path):
    write_checkpoint(tmp_path / "c", [])
    command = installed.parent / "sok-lite"
    for arguments in (["--version"], ["verify", "c"], ["reshard", "c", "d", "--ranks", "2"]):
        done = run(command, *arguments, cwd=tmp_path, env={"PATH": "", "HOME": str(tmp_path)})
        assert (done.returncode, done.stderr) == (0, "")
    assert "is whole" in run(command, "verify", "d", cwd=tmp_path).stdout
    assert run(command, "verify", "none", cwd=tmp_path).returncode == 3


@builds_a_wheel
def test_what_needs_tensorflow_says_how_to_get_it(installed, tmp_path):
    done = run_installed(installed, tmp_path, "import sok_lite; sok_lite.DynamicVariable")
    assert done.returncode == 1
    for text in ("ImportError", 'pip install "sok_lite[cpu]"', 'pip install "sok_lite[gpu]"'):
        assert text in done.stderr
    done = run(installed, SCRIPTS / "build_horovod.py", env={"HOME": str(tmp_path), "PATH": ""})
    assert done.returncode == 1
    assert done.stderr.startswith("error: Horovod is built against an installed TensorFlow")


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", text, re.MULTILINE).group(1) == __version__


# ----------------------------------------------------------------------------------- the scripts


def env_of(path, tmp_path):
    return {"PATH": str(path), "HOME": str(tmp_path), "SOK_LITE_VENV": str(tmp_path / "venv")}


def set_up(path, tmp_path, *arguments):
    command = [shutil.which("bash"), SCRIPTS / "setup.sh", *arguments]
    return run(*command, env=env_of(path, tmp_path))


# Stands for a Python that lacks the module venv.
NO_VENV = f'case "$*" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
# What is python3 on PATH, and what is said of it; a link: this Python.
UNSUITABLE = {
    "too old": (
        'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi\n',
        "needs Python 3.10, 3.11, 3.12 or 3.13.* Python 3.9.2 \\(python3\\)",
    ),
    "none": (None, "needs Python 3.10, 3.11, 3.12 or 3.13.* none"),
    "no venv": (NO_VENV, rf"apt-get install python3.{sys.version_info[1]}-venv"),
    "no compiler": ("link", "no C\\+\\+ compiler: 'g\\+\\+'.*apt-get install g\\+\\+"),
    "an argument": ("link", "unknown argument '--gpus'"),
}


@pytest.mark.parametrize("case", UNSUITABLE)
def test_setup_says_what_is_missing_before_it_makes_anything(plain_path, tmp_path, case):
    python, text = UNSUITABLE[case]
    if python == "link":
        (plain_path / "python3").symlink_to(sys.executable)
    elif python is not None:
        write_tool(plain_path / "python3", python)
    done = set_up(plain_path, tmp_path, *["--gpus"] * (case == "an argument"))
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert re.search(text, done.stderr, re.DOTALL)


def test_setup_takes_the_python_of_its_environment_or_the_first_that_suits(plain_path, tmp_path):
    write_tool(plain_path / "python3", "exit 1\n")
    (plain_path / "python3.12").symlink_to(sys.executable)
    assert "no C++ compiler" in set_up(plain_path, tmp_path).stderr
    kept = tmp_path / "kept" / "python3"
    write_tool(kept, NO_VENV)  # its missing venv module makes the message name it
    write_tool(tmp_path / "venv" / "bin" / "python", f"echo {kept}\n")
    assert f"{kept} has no venv module" in set_up(plain_path, tmp_path).stderr


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
    env = {**env_of(os.environ["PATH"], tmp_path), "SOK_LITE_PYTHON": str(python), "CXX": "bash"}
    fields = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    started = []

    def start(scripts=SCRIPTS):
        command = ["bash", scripts / "setup.sh"]
        started.append(subprocess.Popen(command, start_new_session=True, **fields))
        return started[-1]

    yield log, go, start
    go.touch()
    for process in started:
        process.communicate(timeout=300)


def begun_set_ups(log, start):
    """Returns one that installs and one that waits for it."""
    first = start()
    deadline = time.monotonic() + 300
    while "install" not in log.read_text():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    second = start()
    assert "is under way: waiting for it" in second.stdout.readline()
    return first, second


def test_a_second_set_up_waits_and_finds_all_done(staged_set_up):
    log, go, start = staged_set_up
    first, second = begun_set_ups(log, start)
    go.touch()
    assert "ready: " in first.communicate(timeout=300)[0]
    assert second.communicate(timeout=300)[0] == ""
    third = start()
    assert third.communicate(timeout=300)[0] == ""
    assert [first.returncode, second.returncode, third.returncode] == [0, 0, 0]
    words = [line.split()[0] for line in log.read_text().splitlines()]
    # A set-up with nothing else to do asks for the kernels, which may have been edited.
    assert words == ["venv", "install", "install", "install", "horovod", *["kernels"] * 3]


def test_a_set_up_that_is_killed_holds_up_no_other(staged_set_up):
    log, go, start = staged_set_up
    killed, second = begun_set_ups(log, start)
    os.killpg(killed.pid, signal.SIGKILL)
    go.touch()
    assert "was killed midway: starting over" in second.communicate(timeout=300)[0]
    assert second.returncode == 0
    assert "venv --clear" in log.read_text()


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
    command = ["bash", project / "scripts" / "demo.sh", "--ranks", "3", "--rows", "7"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=300)
    said = b"hello -np 3 python examples/train_ctr.py --ranks 3 --rows 7\n"
    assert (done.returncode, done.stderr) == (code, b"10%\r20%\r")
    assert done.stdout == said + b'RESULT {"auc": [1]}\n'


def test_test_sh_runs_what_pytest_would_of_paths_but_not_where_the_set_up_failed(stage_set):
    project, tools, env = stage_set
    write_tool(tools / "python", 'echo "$*"\n')
    command = ["bash", project / "scripts" / "test.sh", "tests/sok", "-k", "a b"]
    done = run(*command, env=env)
    assert (done.returncode, done.stdout) == (0, "-m pytest tests/sok -k a b\n")
    write_tool(project / "scripts" / "setup.sh", "exit 3\n")
    done = run(*command, env=env)
    assert (done.returncode, done.stdout) == (1, "")
