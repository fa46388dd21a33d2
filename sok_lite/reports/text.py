"""Numbers and examples in words, for lines on a terminal."""

from collections.abc import Sequence


def counted(count: int, what: str, several: str = "") -> str:
    """Returns a number and what it is of, such as "1 key" and "1,000 keys"."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def listed(examples: Sequence[object], count: int) -> str:
    """Returns examples of so many things, with dots where there are more."""
    return ", ".join(map(str, examples)) + (", ..." if count > len(examples) else "")
