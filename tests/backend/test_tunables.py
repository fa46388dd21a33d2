"""SOK_LITE_KERNEL_DEFINES: what the kernels were made for, and nothing else."""

import re

import pytest

from sok_lite.backend import sources
from sok_lite.backend.tunables import THREADS_PER_BLOCK, TUNABLES, kernel_defines

VARIABLE = "SOK_LITE_KERNEL_DEFINES"


def test_the_tunables_are_those_of_the_sources_and_their_defaults_are_allowed():
    folder = sources.kernel_folder()
    text = "\n".join(p.read_text() for p in folder.rglob("*") if p.suffix in (".cu", ".cuh"))
    # A tunable has a value; a guard against a second inclusion has none.
    defaults = re.findall(r"#ifndef (\w+)\n#define \1 (\w+)\n", text)
    # Nor is it one where the backend compiles with each value.
    defaults = [each for each in defaults if each[0] != "SOK_LAUNCH_WORDS"]
    assert {name for name, _ in defaults} | {"SOK_THREADS_PER_BLOCK"} == set(TUNABLES)
    for name, value in [*defaults, ("SOK_THREADS_PER_BLOCK", str(THREADS_PER_BLOCK))]:
        assert value == "SOK_LINE" or int(value) in TUNABLES[name].values, name


def test_each_has_its_line_in_the_readme():
    readme = (sources.kernel_folder() / "README.md").read_text()
    for name, tunable in TUNABLES.items():
        (line,) = [line for line in readme.splitlines() if re.match(rf"\|.*`{name}`.*\|", line)]
        assert tunable.rule in line


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("text", "defines"),
    [
        ("", {}),
        (" \t", {}),
        ("SOK_LINE=8", {"SOK_LINE": 8}),
        ("  SOK_LINE=8\nSOK_TILE=32 ", {"SOK_LINE": 8, "SOK_TILE": 32}),
        ("SOK_AHEAD=0 SOK_AHEAD=0", {"SOK_AHEAD": 0}),
        ("SOK_THREADS_PER_BLOCK=1024", {"SOK_THREADS_PER_BLOCK": 1024}),
    ],
)
def test_what_is_allowed_is_taken(monkeypatch, text, defines):
    monkeypatch.setenv(VARIABLE, text)
    assert kernel_defines() == defines
    monkeypatch.delenv(VARIABLE)
    assert kernel_defines() == {}


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    "text",
    ["SOK_LINE", "SOK_LINE=", "SOK_LINE=x", "SOK LINE=8", "=8", "SOK_LINE=-1", "SOK_LINE=8,"],
)
def test_what_is_no_list_of_numbers_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=r"list of NAME=NUMBER.*Received: '"):
        kernel_defines()


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("SOK_LINES=8", r"no kernel has\. Received: 'SOK_LINES'\. There are SOK_LINE, SOK_TILE"),
        ("SOK_LINE=3", r"SOK_LINE in .* a power of two from 1 to 32\. Received: 3\. Leave it out"),
        ("SOK_LINE=0", "Received: 0"),
        ("SOK_TILE=64", "Received: 64"),
        ("SOK_ROW_LANES=24", "SOK_ROW_LANES"),
        ("SOK_THREADS_PER_BLOCK=100", "a multiple of 32 from 32 to 1024"),
        ("SOK_THREADS_PER_BLOCK=2048", "Received: 2048"),
        ("HKV_CROWDED_QUARTERS=5", "from 0 to 4"),
        ("SOK_BLOCK=0", "from 1 to 1024"),
        ("SOK_AHEAD=1025", "from 0 to 1024"),
        ("SOK_LINE=4 SOK_LINE=8", r"sets SOK_LINE twice\. Received: 4 and 8"),
    ],
)
def test_what_the_kernels_were_not_made_for_is_refused(monkeypatch, text, match):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=match):
        kernel_defines()
