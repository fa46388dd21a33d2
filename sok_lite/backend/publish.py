"""Changes that no exception can cut in two.

A KeyboardInterrupt can be raised between any two bytecodes of Python, and memory can run out at any
allocation. So whoever changes something in several places prepares all of it first, which may fail,
as a list of actions; `publish` then takes all of them in one go. An action is a call of C code with
its arguments ready: no line of Python runs between two of them. On a CPU they allocate nothing; a
launch on a GPU takes a few bytes of the host's memory.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import starmap
from typing import Any

Action = partial[Any]

NOTHING: Action = partial(bool)

# Not a lambda: this one refuses what is no partial, and so most functions of Python's.
_take: Callable[[Action], object] = partial.__call__


def publish(actions: Iterable[Action]) -> None:
    """Takes actions, one after the other."""
    # Not `map`, which makes a tuple of arguments for each.
    deque(starmap(_take, [(action,) for action in actions]), maxlen=0)


def setting(target: object, **attributes: Any) -> list[Action]:
    """Returns the actions that set attributes."""
    return [partial(setattr, target, name, value) for name, value in attributes.items()]
