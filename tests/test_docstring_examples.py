"""The examples of docstrings are true: each runs by itself, and gives what stands there.

An example begins with `>>>`. It finds TensorFlow, Keras, NumPy and this package by the names that
`_NAMES` gives them, and a folder of its own to write to.
"""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_NAMES = {
    "de": "sok_lite.dynamic_embedding",
    "keras": "keras",
    "kv": "sok_lite.kv_variable",
    "np": "numpy",
    "sk": "sok_lite.keras",
    "sok": "sok_lite",
    "sok_lite": "sok_lite",
    "tf": "tensorflow",
}

# What programs begin with: whoever calls `help` of one sees how it is used.
_FIRST = [
    *("sok.DynamicVariable", "sok.OptimizerWrapper", "sok.lookup_sparse", "sok.inference_mode"),
    *("sok.assign", "sok.export", "sok.dump", "sok.export_serving", "sok.hash_strings"),
    *("sk.Table", "sk.Embedding", "sk.Embeddings", "de.get_variable", "kv.get_kv_variable"),
]


def documented():
    """Yields (name, docstring) of each docstring of the package that has an example."""
    for path in sorted((ROOT / "sok_lite").rglob("*.py")):
        text = path.read_text()
        if ">>>" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                docstring = ast.get_docstring(node) or ""
                if ">>>" in docstring:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'name', '')}", docstring


def failures(name, docstring, names):
    """Returns what doctest says of the examples of a docstring that do not give what they say."""
    said = []
    example = doctest.DocTestParser().get_doctest(docstring, dict(names), name, name, 0)
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    return "".join(said)


def test_the_examples_of_docstrings_are_true(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow")
    names = {short: importlib.import_module(module) for short, module in _NAMES.items()}
    said = {}
    for number, (name, docstring) in enumerate(documented()):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        said[name] = failures(name, docstring, names)
    assert len(said) >= len(_FIRST)
    assert not any(said.values()), "".join(said.values())


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", _FIRST)
def test_what_programs_begin_with_has_an_example(name):
    pytest.importorskip("tensorflow")
    module, attribute = name.split(".")
    value = getattr(importlib.import_module(_NAMES[module]), attribute)
    assert ">>>" in (inspect.getdoc(value) or ""), name
