"""What the quick level of the check chooses, by the rule in tests/conftest.py."""

import itertools
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import conftest as levels
from tests.support.repository import git_in


class Item:
    """What the rule asks of a test that pytest has collected."""

    def __init__(self, path, function, variant=None, backend=None, marks=(), **params):
        self.path = Path(path)
        self.nodeid = f"{path}::{function}" + (f"[{variant}]" if variant else "")
        self.marks = marks
        if backend:
            params["backend"] = backend
        if variant:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return self if name in self.marks else None


def variants(path, function, *names, **fields):
    return [Item(path, function, name, **fields) for name in names]


def chosen(items, changed=()):
    return {item.nodeid for item in levels.choose(items, set(changed))}


EIGHT = '@pytest.mark.parametrize("i", range(8))'
SKIPPING = f"""
import pytest
{EIGHT}
def test_one_of_eight(i):
    if i != WANTED:
        pytest.skip("not this one")
{EIGHT}
def test_none(i):
    pytest.skip("none")
{EIGHT}
def test_any(i):
    assert i < 9
"""
DRAWING = """
from pathlib import Path
import numpy as np
RNG = np.random.default_rng(0)
def test_first():
    RNG.normal()
def test_second():
    Path("drawn").write_text(str(RNG.normal()))
"""


def run_pytest(folder, text, *options):
    """Runs tests of a text under tests/conftest.py; returns what pytest prints."""
    (folder / "test_inner.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *options]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "test_inner.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(levels.ROOT), "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_test_draws_the_same_alone_as_after_others(tmp_path):
    drawn = []
    for options in ((), ("-k", "second")):
        run_pytest(tmp_path, DRAWING, *options)
        drawn.append((tmp_path / "drawn").read_text())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("wanted", [0, 7])
def test_where_a_variant_is_skipped_the_next_runs(wanted, tmp_path):
    printed = run_pytest(tmp_path, SKIPPING.replace("WANTED", str(wanted)), "--quick")
    # Of the first function some are skipped, of the second all, of the third none.
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", printed)}
    assert counts["passed"] == 2 and 8 <= counts["skipped"] <= 15
    assert "skipped here in every variant: test_inner.py::test_none\n" in printed


def test_of_each_function_the_variant_with_the_lowest_hash_runs():
    def named(function, *names):
        return variants("tests/sok/test_x.py", function, *names)

    names = [f"{mode}-{size}" for mode in ("eager", "graph") for size in range(20)]
    functions = [named(function, *names) for function in ("test_a", "test_b", "test_c")]
    functions.append([Item("tests/sok/test_x.py", "test_alone")])
    lowest = {min((i.nodeid for i in of), key=lambda x: zlib.crc32(x.encode())) for of in functions}
    items = [item for of in functions for item in of]
    assert chosen(items) == chosen(items[::-1]) == lowest


# Kernels run once on each backend that is here; elsewhere a backend is a variant as others are.
EACH, ONE = [["cpu", "simt"]], [["cpu"], ["simt"]]


@pytest.mark.parametrize(
    ("path", "backends"),
    [
        *(("tests/backend/test_x.py", EACH), ("tests/engine/optimizers/test_x.py", EACH)),
        *(("tests/engine/test_det.py", EACH), ("tests/comm/test_x.py", EACH)),
        *(("tests/engine/test_tables.py", ONE), ("tests/sok/test_x.py", ONE)),
    ],
)
def test_kernels_run_once_on_each_backend_that_is_here(path, backends, monkeypatch):
    monkeypatch.setattr(levels, "_missing", lambda: {"cuda"})
    items = [
        item
        for backend in ("cpu", "simt", "cuda")
        for item in variants(path, "test_a", *(f"{backend}-{i}" for i in range(5)), backend=backend)
    ]
    found = sorted(name.partition("[")[2].partition("-")[0] for name in chosen(items))
    assert found in backends


def test_what_changed_runs_in_all_variants_and_what_is_marked_in_full_alone():
    items = variants("tests/sok/test_x.py", "test_a", "1", "2")
    items += variants("tests/sok/test_x.py", "test_a", "3", "4", marks=["full_only"])
    items += variants("tests/sok/test_x.py", "test_b", "1", marks=["full_only"])
    items += variants("tests/sok/test_y.py", "test_c", "1", "2", "3")
    found = {name.partition("::")[2] for name in chosen(items, ["z"])}
    assert len(found) == 2 and len(found & {"test_a[1]", "test_a[2]"}) == 1
    found = chosen(items, ["x"])
    assert len(found) == 6 and found > {item.nodeid for item in items[:5]}


UNHASHABLE = [[0], [1], [2], [3]]


@given(st.lists(st.tuples(*(st.sampled_from(range(n)) for n in (2, 3, 4))), unique=True))
def test_what_is_marked_as_pairs_runs_so_that_every_two_values_meet(rows):
    file = "tests/sok/test_x.py"
    items = [
        Item(file, "test_a", str(i), backend, marks=["pairs"], a=a, b=b, c=UNHASHABLE[c])
        for backend in ("cpu", "simt")
        for i, (a, b, c) in enumerate(rows)
    ]
    others = variants(file, "test_b", "1", "2")
    kept = levels.with_pairs([*items, *others])
    assert kept >= set(others)
    for backend in ("cpu", "simt"):
        of_it = [item for item in items if item.callspec.params["backend"] == backend]
        found = [row for row, item in zip(rows, of_it, strict=True) if item in kept]
        for two in itertools.combinations(range(3), 2):
            met, may_meet = ({tuple(row[i] for i in two) for row in some} for some in (found, rows))
            assert met == may_meet


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository whose last full run was at its first commit; returns how to call git in it."""
    git = git_in(tmp_path, monkeypatch)
    git("init", "-q")
    for name in ("tests/test_kept.py", "tests/test_moved.py", "lib/update.cu", "lib/page.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n" * 20)
    git("add", ".")
    git("commit", "-qm", "first")
    record = tmp_path / "tests" / "last_full.json"
    record.write_text(json.dumps({"commit": git("rev-parse", "HEAD")}))
    monkeypatch.setattr(levels, "ROOT", tmp_path)
    monkeypatch.setattr(levels, "LAST_FULL", record)
    levels.changed_stems.cache_clear()
    yield git
    levels.changed_stems.cache_clear()


def test_a_file_counts_by_the_middle_of_its_name_unless_it_only_moved(
    project, tmp_path, monkeypatch
):
    (tmp_path / "room").mkdir()
    project("mv", "tests/test_moved.py", "room/test_moved.py")
    project("commit", "-qm", "move")
    assert levels.changed_stems() == set()
    (tmp_path / "lib" / "update.cu").write_text("changed")
    (tmp_path / "lib" / "page.md").write_text("changed: no test bears its name")
    project("commit", "-qam", "change")
    (tmp_path / "tests" / "test_kept.py").write_text("changed, not committed")
    (tmp_path / "tests" / "test_new.py").write_text("not known to git")
    (tmp_path / "lib" / "__init__.py").write_text("")
    # Where nearly everything changed the usual choice runs.
    for most, stems in ((3, {"update", "kept", "new"}), (2, set())):
        monkeypatch.setattr(levels, "MOST_CHANGED", most)
        levels.changed_stems.cache_clear()
        assert levels.changed_stems() == stems
