"""Programs in a process of their own."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_program(program, *args, timeout=400, cwd=ROOT, **environment):
    """Runs a program, which must end without an error, and returns the text that it printed.

    Beside the variables of this process it has those of `environment`.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        cwd=cwd,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return done.stdout


def run_limited(program, *args, **options):
    """Runs a program that limits its process; returns the words that it printed."""
    return run_program(program, *args, **options).split()


def run_with_tensorflow(program, folder, timeout=400, **environment):
    """Runs a program that needs no TensorFlow of its own, in an empty folder; returns what it
    printed.

    Its process is forked from one that has imported TensorFlow, which takes 5 seconds, and nothing
    else.
    """
    (folder / "program.py").write_text(textwrap.dedent(program))
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["tensorflow"])
    process = start.Process(target=_run_as_main, args=(folder, environment))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed, errors = ((folder / name).read_text() for name in ("printed", "errors"))
    status = process.exitcode
    assert status == 0, f"exit status {status}: {printed[-3000:]}\n{errors[-5000:]}"
    return printed


def _run_as_main(folder, environment):
    os.environ.update(environment)
    os.chdir(folder)
    for stream, name in ((sys.stdout, "printed"), (sys.stderr, "errors")):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    runpy.run_path("program.py", run_name="__main__")


def in_child(work):
    """Returns what a forked child that runs `work` writes of it: its repr, or the error."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writable, text.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text
