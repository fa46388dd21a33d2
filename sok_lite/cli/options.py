"""Options as the user writes them: NAME=VALUE of a format, and initial values of states."""

import typing
from collections.abc import Callable, Sequence
from typing import Any

from sok_lite.cli.errors import WrongUse

_BOOLS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def options_for(function: Callable[..., Any], texts: Sequence[str], what: str) -> dict[str, Any]:
    """Returns the keyword arguments that texts say.

    Args:
      function: whose they are; their annotations say what the values must be.
      texts: such as "dim=8".
      what: the format, for errors.

    Raises:
      WrongUse: there is no such option, or a value does not fit.
    """
    hints = typing.get_type_hints(function)
    kinds = {name: kind for name, kind in hints.items() if name not in _NOT_OPTIONS}
    options: dict[str, Any] = {}
    for text in texts:
        name, is_there, value = text.partition("=")
        if not is_there or name not in kinds:
            known = ", ".join(f"{each}=..." for each in kinds) or "none"
            raise WrongUse(f"{text!r} is no option of format {what}; it has: {known}")
        options[name] = _value(kinds[name], value, text)
    return options


_NOT_OPTIONS = ("path", "sources", "return")


def _value(kind: Any, value: str, text: str) -> Any:
    kinds = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
    for each in kinds:
        try:
            return _BOOLS[value.lower()] if each is bool else each(value)
        except (KeyError, TypeError, ValueError):
            continue
    names = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
    raise WrongUse(f"the value of {text!r} must be of {names}")


def initial_values(text: str, names: Sequence[str]) -> dict[str, float]:
    """Returns what new rows have in some states, by their names.

    Args:
      text: of the user, such as "accumulator=0.1,m=0".
      names: of the states that there are.

    Raises:
      WrongUse: it is no such text, or there is no such state.
    """
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise WrongUse(
                f"initial={text!r} must be names of states with numbers, such as accumulator=0.1"
            ) from None
        if name.strip() not in names:
            raise WrongUse(
                f"initial={text!r} names {name.strip()!r}; the states that are there are: "
                f"{', '.join(names) or 'none'}"
            )
    return values
