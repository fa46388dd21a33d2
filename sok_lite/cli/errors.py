"""Exit statuses of commands."""

FINE = 0
FINDINGS = 1
WRONG_USE = 2
FAILED = 3
# As shells report a signal: 128 + its number.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class WrongUse(Exception):
    """A command's arguments do not match each other, or the files they name."""
