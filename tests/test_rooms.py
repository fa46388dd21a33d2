"""The tests are laid out as what they test: rooms that mirror it, and one for what they share.

`tests/` itself holds tests of the whole tree. A test lies in the room, a folder, of what it tests;
what several rooms use lies in `tests/support`. No room imports from another one.
"""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# What a room mirrors: a package, or a folder of programs.
PACKAGES = "backend bridge cli comm dynamic_embedding engine keras kv_variable native reports sok"
MIRRORS = {
    **{name: f"sok_lite/{name}" for name in PACKAGES.split()},
    **{name: name for name in ("examples", "scripts", "tools")},
    "bench": "scripts/bench",
}
# What mirrors nothing. Ranks: tests that run on all ranks of a job, or start jobs. Fuzz: programs
# that run until they are stopped. Support: what the others share, and the tests of it.
OTHERS = {"ranks", "fuzz", "support"}
HELPERS_ARE_FREE = {"fuzz", "support"}

# Helpers of one room alone, each with what keeps it there: it is no oracle, injects no fault and
# launches nothing, and no other room needs it. The list only shrinks. "X_of_Y.py" counts as "X.py".
OWN_HELPERS = {
    "cli/helpers.py": "runs a command and reads what it printed",
    "cli/recorded.py": "reads the files that TFRA wrote, which lie beside it",
    "cli/importers/arrays.py": "makes the arrays of a table for every importer",
    "dynamic_embedding/scenario_values.py": "what a scenario answers, as numbers and texts",
    "dynamic_embedding/scenarios.py": "calls whose answers by TFRA are recorded beside it",
    "engine/optimizers/helpers.py": "makes the tables that every rule is tried on",
    "engine/rows/helpers.py": "makes a store of rows",
    "keras/models.py": "models to be saved and loaded",
}

# Programs in texts, which tests run in other processes, are searched too.
_IMPORT = re.compile(r"\b(?:from tests\.|import tests\.|from tests import )(\w+)")


def files():
    """Paths below tests/ of all files, in order, without what running them leaves."""
    paths = sorted(path.relative_to(TESTS) for path in TESTS.rglob("*") if path.is_file())
    return [path for path in paths if "__pycache__" not in path.parts]


def is_helper(path):
    named = path.name.startswith("test_") or path.name in ("__init__.py", "conftest.py")
    return not (named and path.suffix == ".py")


def room_of(path):
    """The room of a path below tests/; None: it lies in tests/ itself."""
    return path.parts[0] if len(path.parts) > 1 else None


def test_the_rooms_are_those_named_here_and_mirror_what_there_is():
    assert {room_of(path) for path in files()} - {None} == MIRRORS.keys() | OTHERS
    assert all((ROOT / folder).is_dir() for folder in MIRRORS.values())
    packages = {path.parent.name for path in (ROOT / "sok_lite").glob("*/__init__.py")}
    assert not packages - MIRRORS.keys()
    helpers = {str(path) for path in files() if room_of(path) is None and is_helper(path)}
    # What a full check writes: where it passed last.
    assert helpers <= {"last_full.json"}, "these go to tests/support"


def test_helpers_lie_in_support_but_for_the_few_of_one_room():
    helpers = {
        re.sub(r"_of_\w+", "", str(path))
        for path in files()
        if room_of(path) not in {None, *HELPERS_ARE_FREE}
        if is_helper(path) and path.suffix == ".py"
    }
    assert not helpers - OWN_HELPERS.keys(), "these go to tests/support"
    assert not OWN_HELPERS.keys() - helpers, "these are gone: take them off the list"


def test_no_program_changes_where_python_looks():
    """They are run from the root, `python -m scripts.bench lookup`, which finds every package."""
    changed = re.compile(r"sys\.path(\[|\.\w+\()|syspath_prepend|site\.addsitedir")
    wrong = [
        f"{path.relative_to(ROOT)} changes it"
        for folder in ("scripts", "tools", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if changed.search(path.read_text()) and path != Path(__file__)
    ]
    assert not wrong


def test_no_room_imports_from_another():
    """A file may import from its room, from tests/support, and what tests/conftest.py has."""
    wrong = [
        f"{path} imports from tests.{name}"
        for path in files()
        if path.suffix == ".py"
        for name in _IMPORT.findall((TESTS / path).read_text())
        if name not in (room_of(path), "support", "conftest")
    ]
    assert not wrong
