"""Numbers, examples and times as text."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone


def counted(count: int, what: str, several: str = "") -> str:
    """Returns a number with its noun, such as "1 key" and "1,000 keys"."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def listed(examples: Sequence[object], count: int) -> str:
    """Returns examples out of `count`, with dots if there are more."""
    return ", ".join(map(str, examples)) + (", ..." if count > len(examples) else "")


def named(key: int, texts: Mapping[int, bytes]) -> str:
    """Returns a key, with its string in quotes if known, on one line."""
    return f"{key} {readable(texts[key])!r}" if key in texts else str(key)


def readable(text: bytes) -> str:
    """Returns the string of a key; bytes that are not UTF-8 become \\x and two digits."""
    return text.decode("utf-8", "backslashreplace")


def at_time(seconds: float) -> str:
    """Returns a time in seconds since 1970 as a date."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
