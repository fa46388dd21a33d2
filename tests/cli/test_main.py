"""How commands end: statuses, texts, signals, and what is imported."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from sok_lite._version import __version__
from sok_lite.backend import get_backend
from sok_lite.cli.main import COMMANDS
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from tests.cli.helpers import dumped, fine, run
from tests.support.helpers import new_table

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, "-m", "sok_lite"]
ENV = os.environ | {"PYTHONPATH": str(ROOT)}


# Reads the manifest of a checkpoint, and no other file of it to its end.
WAITS = """
import sys
import time

from sok_lite.cli.main import entry
from sok_lite.engine.files import disk, manifest

opened = disk.open_file
disk.open_file = lambda path: (
    opened(path) if path.endswith(manifest.NAME) else time.sleep(600)
)
sys.exit(entry())
"""


def started(*arguments, program=COMMAND, **options):
    command = [*program, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=ENV | options.pop("env", {}), **options)


def test_help_shows_an_example_of_each_command():
    for command in COMMANDS:
        status, out, err = run(command, "--help")
        assert (status, err) == (0, "")
        assert f"example:\n  sok-lite {command}" in out
        assert "1  verify, diff or doctor found something" in out
        assert re.search(rf"^ +{command} ", run("--help")[1], re.MULTILINE)
    assert run("--version")[:2] == (0, f"sok-lite {__version__}\n")


def test_what_is_at_an_address_is_read(stores_here):
    fsspec = pytest.importorskip("fsspec")
    address = f"memory://{uuid.uuid4().hex}/c"
    table, one = new_table(get_backend("cpu"), 2, name="t"), SingleCommunicator()
    dump(address, [table], one)
    assert fine("inspect", address).startswith(f"{address} is of format")
    saves = address.removesuffix("/c")
    dump(f"{saves}/step-0000000007", [table], one)
    fsspec.filesystem("memory").pipe(f"{saves}/step-0000000008/of_sok_lite", b"")
    said = fine("inspect", saves)
    assert said.startswith(f"{saves}/step-0000000007 is of format")
    assert "\nsaves: step-0000000007 whole, step-0000000008 unfinished\n" in said
    assert fine("verify", address) and fine("diff", address, address)
    status, _, err = run("verify", f"{address}/none")
    assert status == 3 and f"{address}/none has no manifest.json" in err


def test_checkpoints_are_written_to_addresses(stores_here, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    place = f"memory://{uuid.uuid4().hex}"
    dumped(tmp_path / "c", 5)
    np.savez(tmp_path / "rows.npz", keys=np.arange(3), values=np.ones((3, 2), np.float32))
    commands = {
        "reshard": [tmp_path / "c", f"{place}/reshard", "--ranks", 3],
        "merge": [tmp_path / "c", tmp_path / "c", f"{place}/merge"],
        "convert": [tmp_path / "rows.npz", f"{place}/convert"],
    }
    for name, arguments in commands.items():
        command = [name, *map(str, arguments)]
        fine(*command)
        expected = f"{tmp_path}/{name}"
        fine(*[expected if each == f"{place}/{name}" else each for each in command])
        fine("diff", f"{place}/{name}", expected)
        status, _, err = run(*command)
        assert status == 2 and f"{place}/{name} is there already: give another name" in err
        first = fsspec.filesystem("memory").find(f"{place}/{name}")
        fine(*command, "--force")
        again = fsspec.filesystem("memory").find(f"{place}/{name}")
        assert len(first) == len(again) and len({*first} & {*again}) == 1  # the manifest
        fsspec.filesystem("memory").pipe(f"{place}/{name}/notes.txt", b"")
        status, _, err = run(*command, "--force")
        assert status == 2 and "there is something else in it: 'notes.txt'" in err
        fine("diff", f"{place}/{name}", expected)
    assert not [each for each in os.listdir(stores_here) if each.startswith("tmp")]


WRONG_USE = [
    ([], "the following arguments are required: COMMAND"),
    (["inspect"], "the following arguments are required: PATH"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    (["diff", "a", "b", "--tolerance", "x"], "invalid float value: 'x'"),
    (["export", "a", "--format", "xml", "--to", "b"], "invalid choice: 'xml'"),
    (["merge", "a"], "the following arguments are required: TO"),
    (["convert", "c", "d", "--to-format", "xml"], "there is no format 'xml': take one of"),
    (["convert", "c", "d", "--from-format", "csv"], "format 'csv' cannot be read"),
    (["convert", "c", "d", "--from-format", "torch"], "write numpy.savez(path, keys=keys.nump"),
    (["convert", "c", "d"], "is such a checkpoint already: use reshard"),
    (["convert", "c", "d.keras"], "format 'keras' cannot be written: take one of"),
    (["convert", "rows.npy", "d"], "rows.npy is one array of NumPy, and a table has two"),
    (["inspect", "rows.csv"], "rows.csv is a CSV file by its name, and those are written only"),
    (["export", "c", "--to", "d"], "d does not say a format: give --format npz, parquet, csv"),
    (["export", "c", "--to", "d.safetensors"], "does not say a format"),
    (["convert", "c", "d", "--to-format", "csv", "--to-option", "x=1"], "it has: none"),
    (["convert", "c", "d", "--to-format", "npz", "--to-option", "x=1"], "has: compress=..."),
    (["inspect", "c", "--from-option", "x=1"], "'x=1' is no option of format sok_lite"),
    (["inspect", "empty"], "looks like none of the formats"),
    (["inspect", "many"], "many has checkpoints in it: give one of them, such as many/step-20"),
    (
        ["inspect", "xy://b/c"],
        "`path` must be a folder of this machine, or an address that fssp",
    ),
    (["verify", ""], "`path` must be in a folder of this machine"),
    (["merge", "c", "c", "xy://b/c"], "argument TO: `path` must be a folder of this machine,"),
    (["convert", "c", "memory://b/d.npz"], "must be on this machine for format 'npz': only"),
    (["export", "c", "--format", "npz", "--to", "s3://b/c"], "argument --to: `path` must"),
    (["diff", "c", "xy://b/c"], "argument B: `path` must be a folder of this machine, or an"),
    (["inspect", "model.keras"], "looks like none of the formats"),
]


def test_wrong_use_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dumped("c", 3)
    os.mkdir("empty")
    os.mkdir("many")
    for step in (10, 20):
        dumped(f"many/step-{step}", 3)
    Path("model.keras").touch()
    Path("rows.csv").write_text("key,value_0\n1,2\n")
    np.save("rows.npy", [1.0])
    there = sorted(os.listdir())
    for arguments, text in WRONG_USE:
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and text in err, err
        assert err.startswith("sok-lite") and err.count("\n") == 1
        assert sorted(os.listdir()) == there


def test_what_cannot_be_read_or_written_is_told_in_one_line(tmp_path):
    dumped(tmp_path / "c", 3)
    for arguments, text in (
        (("inspect", tmp_path / "none"), f"sok-lite inspect: {tmp_path / 'none'}: No such file"),
        (("verify", tmp_path), f"has checkpoints in it: give one of them, such as {tmp_path}/c"),
        (("reshard", tmp_path / "c", "/proc/none", "--ranks", 2), "/proc/none"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (3, "") and text in err and err.count("\n") == 1
    status, _, err = run("inspect", tmp_path / "none", "--debug")
    assert status == 3 and "Traceback" in err and err.splitlines()[-1].startswith("sok-lite")


def test_a_corrupt_file_ends_a_command_with_its_name(tmp_path, monkeypatch):
    dumped(tmp_path / "c", 50, names=["user"])
    (path,) = (tmp_path / "c").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for arguments in (["reshard", tmp_path / "d", "--ranks", 2], ["merge", tmp_path / "d"]):
        command, *more = arguments
        status, _, err = run(command, tmp_path / "c", *more)
        assert status == 3 and f"{path}, a file of table 'user', is corrupt: chunk " in err
        assert not (tmp_path / "d").exists()

    def broken(path, **options):
        raise ZeroDivisionError("what")

    monkeypatch.setattr("sok_lite.cli.importers.checkpoint.sources", broken)
    status, _, err = run("inspect", tmp_path / "c")
    assert status == 3 and "ZeroDivisionError: what (--debug shows where)" in err


def test_no_command_needs_tensorflow(tmp_path):
    key, *_ = dumped(tmp_path / "c", 3, names=["user"])["user"]
    program = """
import sys
from sok_lite.cli.main import main
path, key = sys.argv[1:]
for arguments in (
    f"inspect {path}/c", f"get {path}/c user {key}", f"verify {path}/c", f"diff {path}/c {path}/c",
    f"reshard {path}/c {path}/d --ranks 2", f"merge {path}/c {path}/d {path}/e",
    f"export {path}/c --format npz --to {path}/f.npz", f"convert {path}/c {path}/g --to-format csv",
):
    assert main(arguments.split()) == 0, arguments
heavy = {"tensorflow", "keras", "tf_keras", "cupy", "horovod", "mpi4py", "pyarrow"}
assert not heavy & sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(key)],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def waiting(tmp_path, **options):
    """A command that waits for a file, with a temporary folder of its own."""
    dumped(tmp_path / "c", 3, names=["user"])
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    options |= {"program": [sys.executable, "-c", WAITS], "env": {"TMPDIR": str(temporary)}}
    process = started("verify", tmp_path / "c", **options)
    end = time.monotonic() + 300
    while not list(temporary.iterdir()):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)
    time.sleep(0.1)
    return process, temporary


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(signal.SIGINT, 130, "sok-lite verify: interrupted\n"), (signal.SIGTERM, 143, "")],
)
def test_a_signal_ends_a_command_and_its_temporary_files(tmp_path, number, status, text):
    process, temporary = waiting(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (status, "", text)
    assert list(temporary.iterdir()) == []


def test_output_that_nobody_reads_ends_a_command(tmp_path):
    dumped(tmp_path / "c", 3)
    process = started("inspect", tmp_path / "c")
    process.stdout.close()
    assert process.wait(300) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    ("command", "closed"), [("verify", ">&-"), ("inspect", "2>&-"), ("inspect", ">&- 2>&- <&-")]
)
def test_a_command_needs_no_output(tmp_path, command, closed):
    dumped(tmp_path / "c", 3)
    line = f'exec "$@" {closed}'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *COMMAND, command, str(tmp_path / "c")],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("wanted", [True, False])
def test_a_bar_is_shown_on_a_terminal(tmp_path, wanted):
    pytest.importorskip("tqdm")
    dumped(tmp_path / "c", 50)
    main_end, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    flags = [] if wanted else ["--no-progress"]
    process = started("verify", tmp_path / "c", *flags, stderr=end)
    os.close(end)
    shown = b""
    while True:
        try:
            part = os.read(main_end, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(main_end)
    assert "is whole" in process.communicate(timeout=300)[0] and process.returncode == 0
    assert (b"verify: 100%" in shown and b"B/s" in shown) if wanted else shown == b"", shown


@pytest.mark.parametrize(
    "arguments",
    [
        "reshard c d --ranks 2",
        "diff c c",
        "diff c c --all",
        "merge c c2 d",
        "export c --table user --format npz --to d",
    ],
)
def test_a_bar_ends_at_all_bytes(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    bars = []

    class Bar:
        n = 0

        def __init__(self, **options):
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, num_bytes):
            self.n += num_bytes

    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    dumped("c", 50)
    dumped("c2", 5)
    monkeypatch.setattr("sok_lite.engine.files.progress.checked_progress", lambda *_, **__: True)
    fine(*arguments.split())
    (bar,) = bars
    assert bar.n == bar.total > 0


def test_the_bytes_of_a_surrogate_are_shown(tmp_path):
    dumped(tmp_path / "c", 1, names=["ä"])
    process = started("inspect", tmp_path / "c", env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "") and "table '\\xe4'" in out


def test_temporary_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    dumped(tmp_path / "c", 3)
    fine("merge", tmp_path / "c", tmp_path / "c", tmp_path / "d")
    fine("diff", tmp_path / "c", tmp_path / "d")
    fine("verify", tmp_path / "c")
    assert os.listdir(tmp_path / "tmp") == []
