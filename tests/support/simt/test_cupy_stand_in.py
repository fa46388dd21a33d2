"""The stand-in has names and parameters of CuPy's, and no others."""

import inspect
import sys
import types

import pytest

from sok_lite.backend.nvrtc import CompileError, Nvrtc
from tests.support.helpers import need_nvrtc
from tests.support.simt.backend import simt_module


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


def test_a_name_that_is_missing_says_so(xp):
    with pytest.raises(AttributeError, match="The stand-in of cupy has no 'bincount'"):
        xp.bincount  # noqa: B018
    with pytest.raises(AttributeError, match="The stand-in of cupy.cuda has no 'Graph'"):
        xp.cuda.Graph  # noqa: B018


def test_everybody_else_sees_the_real_one(xp, real):
    simt_module.__wrapped__()  # once more: CuPy is there by now
    assert sys.modules["cupy"] is real and real is not xp


def test_what_it_compiles_is_in_no_cache_of_nvrtcs(xp):
    assert Nvrtc(xp.cuda.nvrtc).build != need_nvrtc().build


def test_what_it_cannot_compile_is_refused_as_nvrtc_does(xp):
    with pytest.raises(CompileError, match="nonsense"):
        Nvrtc(xp.cuda.nvrtc).compiled("__device__ int f() { return nonsense; }", ["-arch=sm_90"])
    with pytest.raises(CompileError, match="Unknown options"):
        Nvrtc(xp.cuda.nvrtc).compiled("//", ["-ftz=true"])
