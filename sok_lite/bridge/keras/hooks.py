"""How methods of Keras and TensorFlow are wrapped; whoever needs one wrapped calls `around`.

A method or a module's function has one wrapper, however many parts of this package act around it.
Nothing else in the package sets attributes of theirs; a test checks that.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Container
from types import CodeType
from typing import Any

from sok_lite.engine.callers import callers

# Acts around a method: takes the method, the object (the class for a class method) and the
# arguments. Parameters up to the object are positional-only, because a program's argument may have
# the same name.
Around = Callable[..., Any]


class _Hook:
    """A wrapped method: `acts` around it with their leading arguments, `call` with all acts."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.acts: list[tuple[Around, tuple[Any, ...]]] = []
        self.call = original


_hooks: dict[tuple[Any, str], _Hook] = {}
_wrappers: set[Any] = set()
_lock = threading.RLock()


def around(cls: Any, name: str, act: Around, *leading: Any, inherits: bool = False) -> Any:
    """Wraps a method in an act; the latest act is outermost. Repetition does nothing.

    Args:
      cls: a class that has or inherits the method, or a module with a function.
      name: of the method. Does nothing if another version of the package lacks it.
      act: called with `leading`, the inner call, and the arguments.
      inherits: whether to wrap an inherited method for this class only.

    Returns the class or module whose method was wrapped; None if there is no such method.
    """
    found = owner_of(cls, name)
    if found is None:
        return None
    owner = cls if inherits else found
    with _lock:
        hook = _hooks.get((owner, name)) or _install(owner, name, vars(found)[name])
        if (act, leading) not in hook.acts:
            hook.acts.append((act, leading))
            hook.call = functools.partial(act, *leading, hook.call)
    return owner


def checking(check: Callable[..., None], call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """An act: calls `check` with the arguments, which may raise, and then the method."""
    check(self, *args, **kwargs)
    return call(self, *args, **kwargs)


def owner_of(cls: Any, name: str) -> Any:
    """Returns the class that defines `cls.name`; None if none does."""
    bases = cls.__mro__ if isinstance(cls, type) else [cls]
    return next((base for base in bases if name in vars(base)), None)


def original_of(cls: type, name: str) -> Callable[..., Any]:
    """Returns a method of a class, as a function, without our wrappers."""
    method = getattr(cls, name)
    while method in _wrappers:
        method = method.__wrapped__
    found: Callable[..., Any] = method
    return found


def is_theirs(method: Any) -> bool:
    """Whether a bound method is one of Keras or TensorFlow that is wrapped here."""
    return getattr(method, "__func__", None) in _wrappers


def _install(owner: Any, name: str, found: Any) -> _Hook:
    original = found.__func__ if isinstance(found, classmethod) else found
    hook = _hooks[owner, name] = _Hook(original)

    # It passes for a function of Keras, also for AutoGraph, which exempts those.
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return hook.call(*args, **kwargs)

    # Keras inspects a method's parameters, and does not look through wrappers.
    with contextlib.suppress(TypeError, ValueError):
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    _wrappers.add(method)
    setattr(owner, name, classmethod(method) if isinstance(found, classmethod) else method)
    return hook


_clone_codes: set[CodeType] = set()
_load_codes: set[CodeType] = set()


def register_functions(models: Any) -> None:
    """Registers the functions `clone_model` and `load_model` of a Keras' module `models`."""
    _clone_codes.add(inspect.unwrap(models.clone_model).__code__)
    _load_codes.add(inspect.unwrap(models.load_model).__code__)


def is_cloning() -> bool:
    """Whether `clone_model` is among the callers."""
    return caller_among(_clone_codes) is not None


def is_loading() -> bool:
    """Whether `load_model` is among the callers."""
    return caller_among(_load_codes) is not None


def is_loading_uncompiled() -> bool:
    """Whether `load_model(compile=False)`, which restores no optimizer, is among the callers."""
    frame = caller_among(_load_codes)
    return frame is not None and not frame.f_locals["compile"]


def is_loading_safely() -> bool:
    """Whether the calling `load_model` must not run code of the file."""
    frame = caller_among(_load_codes)
    return frame is None or bool(frame.f_locals.get("safe_mode", True))


def caller_among(codes: Container[CodeType]) -> Any:
    """Returns the frame of the innermost caller with one of these codes; None without one."""
    return next((frame for frame in callers() if frame.f_code in codes), None)
