"""The stand-in has names and parameters of CuPy's, and no others."""

import inspect
import types

import pytest


def public(thing):
    return [name for name in vars(thing) if not name.startswith("_")]


def members(ours, theirs):
    """Every public thing of the stand-in's modules, and CuPy's of the same name."""
    for name in public(ours):
        assert hasattr(theirs, name), f"{theirs.__name__}.{name}"
        member, its = getattr(ours, name), getattr(theirs, name)
        if isinstance(member, types.ModuleType):
            yield from members(member, its)
        else:
            yield name, member, its


def test_names_and_parameters_are_cupys(xp):
    """Of parameters as many as there are here, in the same order, with the same defaults."""
    real = pytest.importorskip("cupy", reason="CuPy is not installed")
    compared = 0
    for name, member, its in members(xp, real):
        if inspect.isclass(member) and member.__module__.startswith("tests."):
            missing = {each for each in public(member) if not hasattr(its, each)}
            assert missing <= {"mem", "content"}, name
        if not inspect.isfunction(member):
            continue
        try:
            theirs = inspect.signature(its).parameters.values()
        except (TypeError, ValueError):
            continue  # compiled, and says nothing
        expected = [(each.name, each.default) for each in theirs]
        mine = inspect.signature(member).parameters.values()
        assert [(each.name, each.default) for each in mine] == expected[: len(mine)], name
        compared += 1
    assert compared > 15
