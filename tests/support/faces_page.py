"""docs/faces.md as its tests read it."""

import ast
import importlib
import inspect
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PAGE = (TESTS.parent / "docs" / "faces.md").read_text()
NONE = "nothing"  # of `sok_lite` is behind it


def text_of(title):
    """Returns what is under a title."""
    (text,) = re.findall(rf"^### {re.escape(title)}\n((?s:.*?))(?=^##|\Z)", PAGE, re.MULTILINE)
    return text


def section(title):
    """Returns the tables of a section: lists of rows, each a list of cells, without the heads."""
    tables = re.findall(r"(?:^\|.*\n)+", text_of(title), re.MULTILINE)
    return [
        [
            [cell.strip() for cell in line.strip("|\n").split(" | ")]
            for line in table.splitlines()[2:]
        ]
        for table in tables
    ]


def codes(cell):
    """Returns what is between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def names_of(title):
    """Returns the names that the rows of a section begin with, without their defaults."""
    return [codes(row[0])[0].split("=")[0] for row in section(title)[0]]


def found(path):
    """Returns what a dotted path below `sok_lite` names; raises where there is no such thing."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"sok_lite.{module}"), name)


def below(module, path):
    """Returns what a dotted path below a module names; raises where there is no such thing."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def collected(path):
    """Returns the names of the tests of a file."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def signature_of(function):
    """Returns the arguments of a function or class as a text, without annotations and `self`."""
    function = function.__init__ if inspect.isclass(function) else function
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain)).strip("()")


def assert_every_row_has_a_test(title, folder, of_ranks):
    """Holds the second table of a section to the first, and to the tests there are.

    Args:
      folder: below `tests`, where they are.
      of_ranks: what names of files in tests/ranks begin with.
    """
    said, shown = section(title)
    assert [row[0] for row in said] == [row[0] for row in shown] and len(said) >= 3
    for name, cell in shown:
        tests = codes(cell)
        assert tests, f"no test shows {name}"
        for test in tests:
            file, _, function = test.partition("::")
            place = TESTS / ("ranks" if file.startswith(of_ranks) else folder)
            assert function in collected(place / file), f"{name} names {test}"


def assert_what_is_behind_is_there(title):
    """Looks the third cells of a section up: functions of the layers below a face."""
    for name, _, behind in section(title)[0]:
        if behind == NONE:
            continue
        (path,) = codes(behind)
        assert path.split(".")[0] in ("bridge", "engine", "backend"), name
        found(path)
