"""What new rows have in optimizer states, as the user says it."""

from collections.abc import Sequence

from sok_lite.cli.errors import WrongUse


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
