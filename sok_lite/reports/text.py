"""Numbers, examples and times in words, for lines on a terminal."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone


def counted(count: int, what: str, several: str = "") -> str:
    """Returns a number and what it is of, such as "1 key" and "1,000 keys"."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def listed(examples: Sequence[object], count: int) -> str:
    """Returns examples of so many things, with dots where there are more."""
    return ", ".join(map(str, examples)) + (", ..." if count > len(examples) else "")


def named(key: int, texts: Mapping[int, bytes]) -> str:
    """Returns a key, with its text in quotes where that is known, on one line."""
    return f"{key} {readable(texts[key])!r}" if key in texts else str(key)


def readable(text: bytes) -> str:
    """Returns the text of a key; bytes that are not UTF-8 become \\x and two digits."""
    return text.decode("utf-8", "backslashreplace")


def at_time(seconds: float) -> str:
    """Returns a time in seconds since 1970, as a date."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
