"""Options of the user: NAME=VALUE of a format, values by table, values of states."""

import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sok_lite.cli.errors import WrongUse

_BOOLS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def options_for(function: Callable[..., Any], texts: Sequence[str], what: str) -> dict[str, Any]:
    """Returns keyword arguments of a function from texts such as "dim=8", typed by its annotations.

    WrongUse: an unknown option, or an invalid value.
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
    """Returns initial values of states in new rows, by name, from "accumulator=0.1,m=0".

    WrongUse: an invalid text, or a state that is not in `names`.
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


def of_table(option: str | None, table: str, default: Any, relatives: Sequence[str] = ()) -> Any:
    """Returns the value of an option for a table.

    Args:
      option: values separated by commas, each for the table before its "=" or for all others:
        "float32,halves=float16"; or None.
      default: if the option has no value for it.
      relatives: other tables, whose value an unnamed table takes.
    """
    by_name, values = _split_values(option)
    for name in (table, *relatives):
        if name in by_name:
            return by_name[name]
    return values[-1] if values else default


def _split_values(option: str | None) -> tuple[dict[str, str], list[str]]:
    """Splits an option into values by table, and values for all others."""
    each = [part.rpartition("=") for part in split_list(option)]
    by_name = {name: value for name, equals, value in each if equals}
    return by_name, [value for _, equals, value in each if not equals]


def dim_of_table(option: str | None, table: str, relatives: Sequence[str]) -> int | None:
    """Returns the option `dim` for a table, or None. ValueError: no integer above 0."""
    value = of_table(option, table, None, relatives)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"`dim` must be a number above 0. Received: {value!r} for {table!r}.")
    return int(value)


def split_list(option: str | None) -> list[str]:
    """Splits a text at commas; [] for None."""
    return [] if option is None else option.split(",")


def choose_tables(
    found: Iterable[str], tables: str | None, path: str, options: Sequence[str | None]
) -> list[str]:
    """Returns the tables that an option names; None: all that were found at `path`.

    Other `options` may name tables too. ValueError: there is no such table.
    """
    known = list(found)
    named = [name for option in options for name in _split_values(option)[0]]
    for name in (*split_list(tables), *named):
        if name not in known:
            raise ValueError(
                f"{path} has no table {name!r}. It has: {', '.join(map(repr, sorted(known)))}."
            )
    return known if tables is None else split_list(tables)
