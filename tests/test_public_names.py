"""docs/surface/public_names.txt lists what is public, with its arguments, as the code has it."""

import builtins
import importlib
import re

import pytest

pytest.importorskip("tensorflow")

import sok_lite as sok
from sok_lite import keras as sk
from tools import make_public_names as script


@pytest.mark.parametrize(("page", "lists"), [(script.NAMES, 7), (script.PAGE, 1)])
def test_every_public_name_is_listed_as_it_is(page, lists):
    text = page.read_text()
    assert script.page_with_lists(text) == text, "run: python -m tools.make_public_names"
    assert len(script.MADE.findall(text)) == text.count("<!-- made by") == lists


def test_internal_names_are_there():
    """One that has gone would hide another thing of its name."""
    owners = (
        *(sok.DynamicVariable, sok.DistributedVariable, sok.OptimizerWrapper),
        *(sk.Table, sk.Checkpoint),
    )
    gone = {name for name in script.INTERNAL if not any(hasattr(each, name) for each in owners)}
    assert gone == set()


def test_the_errors_to_catch_are_what_the_page_says():
    text = script.PAGE.read_text().split("## Errors to catch")[1].split("\n## ")[0]
    listed = re.findall(r"^\* `([\w.]+)\.(\w+)`, a (\w+):", text, re.MULTILINE)
    assert len(listed) == 3
    for module, name, base in listed:
        assert issubclass(getattr(importlib.import_module(module), name), getattr(builtins, base))


def test_a_removed_name_says_why_it_is_gone():
    why = r"^sok_lite\.prefetch is gone\. To send .* Give the ids to sok\.lookup_sparse\."
    with pytest.raises(AttributeError, match=why):
        sok.prefetch  # noqa: B018
    assert not hasattr(sok, "prefetch") and "prefetch" not in dir(sok)


def test_a_name_of_sok_1_says_what_to_use():
    with pytest.raises(AttributeError, match=r"'Init' is a name of Sparse.* 1, .*: use sok\.init"):
        sok.Init  # noqa: B018
    for name, instead in sok._OF_SOK_1.items():
        assert not hasattr(sok, name) and name not in dir(sok)
        for used in re.findall(r"\bsok\.(\w+)", instead):
            assert hasattr(sok, used)
