"""Jobs that real launchers start: their environment, their output, and what they leave behind."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "JOB_OF_A_TEST"


class Job(NamedTuple):
    """What a job came to.

    Attributes:
      code: exit status of the launcher.
      output: all that it and the ranks printed.
      ended_s: seconds from the last line "ENDS <time>" that a rank printed to the end of the job.
      left: what is still there: processes, files.
    """

    code: int
    output: str
    ended_s: float
    left: list[str]


def run_job(
    tool,
    program,
    tmp_path,
    ranks=2,
    local=True,
    timeout=300,
    options=(),
    launch=None,
    **environment,
):
    """Runs a Python program, given as source, on ranks that `horovodrun` or `mpirun` starts.

    With `local` the ranks may use the shared memory of their machine. The launcher gets `options`.
    """
    launch, mark = [launcher(tool), "-np", str(ranks)], uuid.uuid4().hex
    folder = tmp_path / mark
    folder.mkdir()
    script = tmp_path / f"{mark}.py"
    script.write_text(textwrap.dedent(program))
    everything = {**environment_of(mark, folder, local), **environment}
    with (tmp_path / f"{mark}.out").open("w+") as out:
        # A file, not a pipe: a process that is left behind would hold a pipe open.
        launched = subprocess.Popen(
            [*launch, *options, sys.executable, str(script), tool],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=everything,
            cwd=ROOT,
        )
        try:
            code = launched.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -1
        end = time.time()
        left = _left(mark, folder)
        for process in _processes(mark):
            os.kill(process, 9)
        launched.wait()
        out.seek(0)
        output = out.read()
    if code == -1:
        raise AssertionError(f"The job still ran after {timeout} s. It printed:\n{output}")
    moments = [float(line.split("ENDS ")[1]) for line in output.splitlines() if "ENDS " in line]
    return Job(code, output, end - max(moments) if moments else 0.0, left)


def environment_of(mark, folder, local=True):
    """Returns the environment of a job that leaves what it makes in a folder.

    The mark, in the environment of its processes, tells them from all others.
    """
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "SOK_LITE_COMM_LOCAL": "1" if local else "0",
        # Horovod gives ranks that start 30 s to come together: on a busy machine they need more.
        "HOROVOD_START_TIMEOUT": "240",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "240",
        "TMPDIR": str(folder),
        MARK: mark,
        # Open MPI refuses root, and more ranks than cores.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def launcher(tool):
    """Returns the path of a tool's launcher, or skips the test."""
    name = {"horovod": "horovodrun", "mpi": "mpirun"}[tool]
    package = {"horovod": "horovod", "mpi": "mpi4py"}[tool]
    beside = Path(sys.executable).with_name(name)
    command = str(beside) if beside.exists() else shutil.which(name)
    if command is None or importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}, or nothing to launch it")
    return command


def _left(mark, folder):
    """Returns what a job has left behind, a moment after its end."""
    deadline = time.monotonic() + 30.0
    while _processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = [f"process {number}: {_command(number)}" for number in _processes(mark)]
    return names + [str(path) for path in folder.rglob("*") if not path.is_dir()]


def _processes(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return found


def _command(number):
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "ended"
