"""Every change of a class of Keras or TensorFlow: what is done around its methods, and by whom.

A method that is changed has one wrapper, however many parts of the package do something around it.
So has a function of a module. Nothing else in the package sets attributes of theirs; a test looks.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Container
from types import CodeType
from typing import Any

from sok_lite.bridge.tf_private import callers

# Does something around a method. It takes what it is around, which is called with all that follows:
# the object, or the class of a class method, and the arguments. Up to the object it takes all by
# place, lest an argument of a program has one of these names.
Around = Callable[..., Any]


class _Hook:
    """A method that is changed.

    Attributes:
      acts: what is done around it, each with its first arguments.
      call: does all of it.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.acts: list[tuple[Around, tuple[Any, ...]]] = []
        self.call = original


_hooks: dict[tuple[Any, str], _Hook] = {}
_wrappers: set[Any] = set()
_lock = threading.RLock()


def around(cls: Any, name: str, act: Around, *leading: Any, inherits: bool = False) -> Any:
    """Has something done around a method from now on; of several, the last is around the others.

    The same again changes nothing.

    Args:
      cls: a class that has the method, or inherits it; or a module that has a function.
      name: of the method. Another version of a package may have none: nothing is done then.
      act: what is done; it is called with `leading`, what it is around, and the arguments.
      inherits: whether a method that the class inherits is changed for this class alone.

    Returns:
      The class whose method it is, or the module; None: there is no such method.
    """
    found = owner_of(cls, name)
    if found is None:
        return None
    owner = cls if inherits else found
    with _lock:
        hook = _hooks.get((owner, name)) or _installed(owner, name, vars(found)[name])
        if (act, leading) not in hook.acts:
            hook.acts.append((act, leading))
            hook.call = functools.partial(act, *leading, hook.call)
    return owner


def checking(check: Callable[..., None], call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Does something around a method: a check, which takes its arguments, and raises."""
    check(self, *args, **kwargs)
    return call(self, *args, **kwargs)


def owner_of(cls: Any, name: str) -> Any:
    """Returns the class of whose methods `cls.name` is one; None: there is no such method."""
    bases = cls.__mro__ if isinstance(cls, type) else [cls]
    return next((base for base in bases if name in vars(base)), None)


def original_of(cls: type, name: str) -> Callable[..., Any]:
    """Returns a method of a class, as a function, without what is done around it here."""
    method = getattr(cls, name)
    while method in _wrappers:
        method = method.__wrapped__
    found: Callable[..., Any] = method
    return found


def is_theirs(method: Any) -> bool:
    """Whether a bound method is one of Keras or TensorFlow that is changed here, and no other."""
    return getattr(method, "__func__", None) in _wrappers


def _installed(owner: Any, name: str, found: Any) -> _Hook:
    original = found.__func__ if isinstance(found, classmethod) else found
    hook = _hooks[owner, name] = _Hook(original)

    # It passes for a function of Keras, also with AutoGraph, which leaves those as they are.
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return hook.call(*args, **kwargs)

    # Keras asks what arguments a method takes, and does not look through wrappers.
    with contextlib.suppress(TypeError, ValueError):
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    _wrappers.add(method)
    setattr(owner, name, classmethod(method) if isinstance(found, classmethod) else method)
    return hook


_clone_codes: set[CodeType] = set()
_load_codes: set[CodeType] = set()


def know_functions(models: Any) -> None:
    """Has the functions of a Keras known.

    Args:
      models: its module of that name.
    """
    _clone_codes.add(inspect.unwrap(models.clone_model).__code__)
    _load_codes.add(inspect.unwrap(models.load_model).__code__)


def is_cloning() -> bool:
    """Whether `clone_model` is among the callers."""
    return caller_among(_clone_codes) is not None


def is_loading() -> bool:
    """Whether `load_model` is among the callers."""
    return caller_among(_load_codes) is not None


def is_loading_uncompiled() -> bool:
    """Whether `load_model(compile=False)` is among the callers, which restores no optimizer."""
    frame = caller_among(_load_codes)
    return frame is not None and not frame.f_locals["compile"]


def is_loading_safely() -> bool:
    """Whether the caller that is `load_model` is not told to run code of the file."""
    frame = caller_among(_load_codes)
    return frame is None or bool(frame.f_locals.get("safe_mode", True))


def caller_among(codes: Container[CodeType]) -> Any:
    """Returns the frame of a caller that is one of some functions, by their code; or None."""
    return next((frame for frame in callers() if frame.f_code in codes), None)
