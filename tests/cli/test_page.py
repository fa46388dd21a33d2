"""The examples of --help and of docs/command_line.md run, and print what the page says."""

import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from sok_lite.backend.sources import kernel_folder
from sok_lite.cli.main import COMMANDS
from sok_lite.engine.files.dump import dump
from sok_lite.engine.fingerprint import fingerprints
from sok_lite.engine.initializer import Initializer
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.table import make_table
from sok_lite.engine.texts import TextStore
from tests.cli.helpers import CPU, ONE, Optimizer, fine, run
from tests.support.doc_blocks import blocks_of, printed_by

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "command_line.md"
_FENCE = re.compile(r"^```(bash|text)\n((?s:.*?))^```$", re.MULTILINE)


def table(name, keys, number=0.0):
    made = make_table("hbm", CPU, 4, name=name, initializer=Initializer("constant", 0.0))
    optimizer = Optimizer()
    (states,) = acquire_states([made], [{"m": (4, 0.0), "v": (4, 0.0)}], [optimizer])
    keys = np.array(keys)
    made.lookup(keys)  # as in a step of training
    made.insert_or_assign(keys, np.repeat(keys[:, None], 4, 1).astype(np.float32) + number)
    for name, column in states.items():
        rows = np.full((keys.size, 4), len(name) / 2, np.float32)
        made.assign_state(column.name, keys, rows)
    return made, optimizer


def with_texts(rows):
    """A table of the hashes of texts, which keeps the texts."""
    made = make_table("hbm", CPU, 2, name="town", initializer=Initializer("constant", 0.0))
    made.texts = TextStore(lambda keys: np.ones(keys.size, bool))
    for text, row in rows.items():
        key = fingerprints([text.encode()])
        made.insert_or_assign(key, np.float32([row]))
        made.texts.add({int(key[0]): text.encode()})
    return made


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder in which the examples run, as the page's program makes it, without TensorFlow."""
    monkeypatch.chdir(tmp_path)
    users, items = range(1000), range(0, 500, 5)
    tables = [table("user", users), table("item", items)]
    dump("runs/model", [made for made, _ in tables], ONE, {"iterations": [250, 0]})
    changed = [table("user", [*range(1, 1000), 1234], 1e-3), table("item", items)]
    dump("runs/later", [made for made, _ in changed], ONE, {"iterations": [300, 0]})
    for name, (made, _) in zip(("users", "items"), tables, strict=True):
        dump(f"runs/{name}", [made], ONE)
    dump("runs/towns", [with_texts({"Oslo": [1, 2], "Lima": [0.5, -0.25]})], ONE)
    np.savez("rows.npz", keys=np.arange(100), values=np.zeros((100, 8), np.float32))
    return tmp_path


def blocks():
    return _FENCE.findall(PAGE.read_text())


def test_the_commands_of_the_page_print_what_it_says(runs):
    check_commands()


@pytest.mark.full_only("starts TensorFlow")
def test_the_program_of_the_page_makes_what_its_commands_read(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow")
    monkeypatch.chdir(tmp_path)
    printed_by(blocks_of(PAGE.read_text()), tmp_path)
    check_commands()


def check_commands():
    """Runs the commands of the page and compares what they print."""
    printed = None
    for kind, body in blocks():
        if kind == "text":
            assert printed is not None, body
            assert _steady(printed) == _steady(body)
            printed = None
            continue
        printed = ""
        for line in body.replace("\\\n", "").splitlines():
            command = line.split("  #")[0]
            program, *arguments = shlex.split(command)
            if program != "sok-lite":
                assert program in ("pip", "python"), line
                continue
            status, out, err = run(*arguments)
            expected = 1 if "# exit status 1" in line else 0
            assert (status, err) == (expected, ""), line
            printed += out


def _steady(text):
    """Without times and the random names of folders of data."""
    text = re.sub(r"at 20\d\d-\S+ \S+ UTC", "at T", text)
    return re.sub(r"data-[0-9a-f]{16}", "data-X", text)


def test_the_page_shows_every_command_and_says_what_its_help_does():
    text = "".join(body for kind, body in blocks() if kind == "bash")
    assert {f"sok-lite {command}" for command in COMMANDS} <= set(re.findall(r"sok-lite \w+", text))
    rows = re.findall(r"^\| `(\w+)[^|]*` \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(command, command_module(command).HELP) for command in COMMANDS]


def command_module(command):
    return importlib.import_module(f"sok_lite.cli.commands.{command}")


def test_the_examples_of_help_run(runs, monkeypatch):
    pytest.importorskip("pyarrow")
    # All kernels take two minutes; test_compile.py and test_gpu_binaries.py compile each.
    few = [kernel_folder() / "slots.cu"]
    monkeypatch.setattr("sok_lite.cli.commands.compile.kernel_files", lambda: few)
    for command in COMMANDS:
        for line in command_module(command).EXAMPLES.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "sok-lite"
            if command == "diff":
                assert run(*arguments)[0] == 1
            else:
                replaces = command in ("convert", "reshard", "merge", "export")
                fine(*arguments, *["--force"] * replaces)
