"""docs/surface/*.toml is true and complete: what works here of the surface of SOK, TFRA and TFPlus.

Its names, arguments, tests and functions are looked up, and a page has the lists that
tools/make_surface.py makes from it.
"""

import ast
import functools
import importlib
import inspect
import re
import typing
from pathlib import Path

import pytest

from tools import make_surface
from tools.make_public_names import shown_signature

TESTS = Path(__file__).resolve().parent

# System -> its package below `sok_lite`, and the folder of the tests.
PACKAGES = {"sok": ("", "sok"), "tfra": ("dynamic_embedding",) * 2, "tfplus": ("kv_variable",) * 2}
ENTRIES = [(system, entry) for system in PACKAGES for entry in make_surface.entries_of(system)]
FIELDS = {"names", "default", "takes", "property", "behind", "tests"}
OWNERS = {"heading", "names_of", "arguments_of", "keywords_of"}
# What TensorFlow or other modules of a package ask of a variable, and no program does.
INTERNAL = {
    *("DynamicVariable.handle", "DynamicVariable.shape"),
    *("Variable.is_differentiable", "Variable.is_pooled", "Variable.keys_of", "Variable.shards_of"),
    *("Variable.tables_held", "Variable.find_trainable"),
    *("KvVariable.ready_inputs", "KvVariable.policy"),
    *("KvVariable.handles", "KvVariable.resources", "KvVariable.safe_lookup"),
}


def below(system, path):
    """Returns what a dotted path below a package names; raises where there is no such thing."""
    pytest.importorskip("tensorflow")
    package = importlib.import_module(f"sok_lite.{PACKAGES[system][0]}".rstrip("."))
    return functools.reduce(getattr, filter(None, path.split(".")), package)


def named():
    """Yields (system, entry, dotted name) of all that is a name of a package."""
    for system, entry in ENTRIES:
        if not entry.fields.keys() & {"arguments_of", "keywords_of"}:
            for name in entry.names:
                yield system, entry, f"{entry.fields.get('names_of', '')}.{name}".lstrip(".")


def public(owner, start):
    """Yields (dotted name, value) of what is public in a class, or in a module and those in it."""
    is_class = inspect.isclass(owner)
    for name in vars(owner) if is_class else owner.__all__:
        value = getattr(owner, name)
        is_method = callable(value) or isinstance(value, property)
        if inspect.ismodule(value):
            yield from public(value, f"{start}{name}.")
        elif not is_class or (is_method and not name.startswith("_")):
            yield start + name, value


def signature_of(value, owner=None):
    """Returns the signature of a function or class, without annotations and a method's `self`."""
    function = value.__init__ if inspect.isclass(value) else value
    return shown_signature(function, inspect.isclass(value) or inspect.isclass(owner))


@functools.cache
def functions_in(path):
    """Returns the names of the functions of a file."""
    body = ast.parse(path.read_text()).body
    return {each.name for each in body if isinstance(each, ast.FunctionDef)}


def test_the_pages_have_every_list_as_it_is_made():
    shown = []
    for page in make_surface.PAGES:
        text = page.read_text()
        assert make_surface.page_with_tables(text) == text, "run: python -m tools.make_surface"
        shown += [match.group(2, 3) for match in make_surface.MADE.finditer(text)]
    assert sorted(shown) == sorted((s, name) for s in PACKAGES for name in make_surface.VIEWS)


def test_every_verdict_that_a_program_must_know_of_is_in_one_list():
    verdicts = [verdict for view in make_surface.VIEWS.values() for verdict in view]
    assert sorted([*verdicts, "same", "better", "ours"]) == sorted(make_surface.VERDICTS)
    assert all("heading" in entry.fields or not entry.verdict for _, entry in ENTRIES)


def test_every_entry_has_one_verdict_and_tests_that_exist():
    for system, entry in ENTRIES:
        said = entry.fields.keys() - FIELDS - OWNERS
        is_verdict = len(said) == 1 and said <= set(make_surface.VERDICTS)
        assert is_verdict or said == {"there", "here"}, f"{entry.title} of {system} has {said}"
        assert entry.fields["tests"], f"no test shows {entry.title} of {system}"
        for test in entry.fields["tests"]:
            file, _, name = test.partition("::")
            path = TESTS / ("" if "/" in file else PACKAGES[system][1]) / file
            is_there = path.is_file() and name in functions_in(path) and name.startswith("test_")
            assert is_there, f"{entry.title} of {system} names {test}"


def test_what_is_behind_a_name_is_there():
    pytest.importorskip("tensorflow")
    for _, entry in ENTRIES:
        if "behind" in entry.fields:
            module, _, name = entry.fields["behind"].rpartition(".")
            assert module.split(".")[0] in ("bridge", "engine", "backend"), entry.title
            assert hasattr(importlib.import_module(f"sok_lite.{module}"), name), entry.title


def test_names_are_there_but_for_those_that_are_refused():
    for system, entry, path in named():
        owner, _, name = path.rpartition(".")
        is_there = hasattr(below(system, owner), name)
        if "refused" not in entry.fields:
            assert is_there, f"{path} of {system}"
        elif is_there:  # it may be there to say what to use
            hints = typing.get_type_hints(below(system, path))
            assert hints["return"] is typing.NoReturn, f"{path} of {system}"


def test_every_public_name_is_in_the_data():
    for system in PACKAGES:
        known, owners, bare = {}, {""}, {}
        for of, entry, path in named():
            if of == system:
                owners.add(entry.fields.get("names_of", ""))
                known[path] = None if "refused" in entry.fields else below(system, path)
                bare.setdefault(path.rpartition(".")[2], []).append(known[path])
                if inspect.ismodule(known[path]) and "ours" not in entry.fields:
                    owners.add(path)
        for owner in owners:
            for path, value in public(below(system, owner), f"{owner}." if owner else ""):
                # It may be that of another module, such as sok.init of sok.communication.init.
                is_again = any(value is each for each in bare.get(path.rpartition(".")[2], ()))
                is_known = path in known or path in INTERNAL or is_again
                assert is_known, f"{path} is not in {system}.toml"


def test_functions_take_what_is_documented():
    for system, entry, path in named():
        if "takes" in entry.fields:
            given = signature_of(below(system, path), below(system, path.rpartition(".")[0]))
            assert str(given)[1:-1] == entry.fields["takes"], f"{path} of {system}"
        if entry.fields.get("property"):
            assert isinstance(below(system, path), property), f"{path} of {system}"


def test_arguments_have_their_documented_order_and_defaults():
    sections = {}
    for system, entry in ENTRIES:
        if "arguments_of" in entry.fields:
            function = system, entry.fields["arguments_of"]
            sections.setdefault(function, []).append(entry.title.strip("`"))
    for (system, path), titles in sections.items():
        parameters = signature_of(below(system, path)).parameters.values()
        assert titles == [str(each) for each in parameters if each.kind != each.VAR_KEYWORD], path


def test_every_keyword_is_in_the_data():
    with pytest.raises(TypeError, match="Known options: ") as error:
        below("sok", "DynamicVariable")(1, unknown=1)
    known = re.findall(r"\w+", str(error.value).split("Known options: ")[1])
    entries = [entry for _, entry in ENTRIES if "keywords_of" in entry.fields]
    assert sorted(name for entry in entries for name in entry.names) == known
