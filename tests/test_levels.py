"""What the quick level of the check chooses, by the rule in tests/conftest.py."""

import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

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

    def iter_markers(self, name):
        return [SimpleNamespace(args=("row",))] if name in self.marks else []


def variants(path, function, *names, **fields):
    return [Item(path, function, name, **fields) for name in names]


def chosen(items, changed=()):
    return {item.nodeid for item in levels.choose(items, set(changed))}


def test_of_each_function_the_variant_with_the_lowest_hash_runs():
    def named(function, *names):
        return variants("tests/sok/test_x.py", function, *names)

    names = [f"{mode}-{size}" for mode in ("eager", "graph") for size in range(20)]
    functions = [named(function, *names) for function in ("test_a", "test_b", "test_c")]
    functions.append([Item("tests/sok/test_x.py", "test_alone")])
    lowest = {min((i.nodeid for i in of), key=lambda x: zlib.crc32(x.encode())) for of in functions}
    items = [item for of in functions for item in of]
    assert chosen(items) == chosen(items[::-1]) == lowest


def test_each_row_of_a_table_of_cases_runs_once():
    rows = [[1], [1], [2]]  # without a hash, and two of them equal
    items = [
        Item("tests/sok/test_x.py", "test_a", f"{mode}-{i}", marks=["cases"], row=row)
        for i, row in enumerate(rows)
        for mode in ("eager", "graph", "session")
    ]
    assert sorted(name.partition("-")[2] for name in chosen(items)) == ["0]", "1]", "2]"]


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
