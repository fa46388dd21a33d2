"""The stand-in has names and parameters of CuPy's, and no others."""

import inspect
import types

import pytest


@pytest.fixture
def real():
    return pytest.importorskip("cupy", reason="CuPy is not installed")


def public(thing):
    return [name for name in vars(thing) if not name.startswith("_")]


def modules(ours, theirs):
    """Every module of the stand-in, with CuPy's of the same name."""
    yield ours, theirs
    for name in public(ours):
        member = getattr(ours, name)
        if isinstance(member, types.ModuleType):
            yield from modules(member, getattr(theirs, name))


def test_cupy_has_every_name(xp, real):
    for ours, theirs in modules(xp, real):
        for name in public(ours):
            assert hasattr(theirs, name), f"{theirs.__name__}.{name}"
            member = getattr(ours, name)
            if inspect.isclass(member) and member.__module__.startswith("tests."):
                for attribute in public(member):
                    if not attribute.startswith("_") and attribute not in ("mem", "content"):
                        assert hasattr(getattr(theirs, name), attribute), f"{name}.{attribute}"


def test_parameters_are_cupys(xp, real):
    """As many of them as there are here, in the same order, with the same defaults."""
    compared = 0
    for ours, theirs in modules(xp, real):
        for name in public(ours):
            member = getattr(ours, name)
            if not inspect.isfunction(member):
                continue
            try:
                expected = inspect.signature(getattr(theirs, name)).parameters
            except (TypeError, ValueError):
                continue  # compiled, and says nothing
            mine = inspect.signature(member).parameters
            assert list(mine) == list(expected)[: len(mine)], name
            for parameter in mine:
                defaults = mine[parameter].default, expected[parameter].default
                assert defaults[0] == defaults[1], f"{name}({parameter})"
            compared += 1
    assert compared > 15
