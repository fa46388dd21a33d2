"""Options that name tables, or whose value may differ between those of one call."""

from collections.abc import Iterable, Sequence
from typing import Any


def of_table(option: str | None, table: str, default: Any, relatives: Sequence[str] = ()) -> Any:
    """Returns what an option is for a table.

    Args:
      option: a text of values with commas between them, each for the table before its "=" or for
        all others: "float32,halves=float16"; None: it says nothing.
      table: the name.
      default: where the option says nothing of it.
      relatives: other tables, from which a table that is not named takes its value.
    """
    by_name, values = _parted(option)
    for name in (table, *relatives):
        if name in by_name:
            return by_name[name]
    return values[-1] if values else default


def _parted(option: str | None) -> tuple[dict[str, str], list[str]]:
    """Returns what an option says of tables by name, and of all others."""
    each = [part.rpartition("=") for part in listed(option)]
    by_name = {name: value for name, equals, value in each if equals}
    return by_name, [value for _, equals, value in each if not equals]


def dim_of_table(option: str | None, table: str, relatives: Sequence[str]) -> int | None:
    """Returns what the option `dim` is for a table, above 0; None: it says nothing.

    Raises:
      ValueError: it is no such number.
    """
    value = of_table(option, table, None, relatives)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"`dim` must be a number above 0. Received: {value!r} for {table!r}.")
    return int(value)


def listed(option: str | None) -> list[str]:
    """Returns the items of a text with commas between them; None: there are none."""
    return [] if option is None else option.split(",")


def chosen(
    found: Iterable[str], tables: str | None, path: str, options: Sequence[str | None]
) -> list[str]:
    """Returns the tables that an option names; None: all that were found.

    Args:
      path: where they were found, for errors.
      options: others, which may name tables as well.

    Raises:
      ValueError: there is no such table.
    """
    known = list(found)
    named = [name for option in options for name in _parted(option)[0]]
    for name in (*listed(tables), *named):
        if name not in known:
            raise ValueError(
                f"{path} has no table {name!r}. It has: {', '.join(map(repr, sorted(known)))}."
            )
    return known if tables is None else listed(tables)
