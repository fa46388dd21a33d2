"""How a command ends: what its exit status says."""

FINE = 0
FINDINGS = 1
WRONG_USE = 2
FAILED = 3
# As a shell says of a program that a signal has ended: 128 and its number.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class WrongUse(Exception):
    """The arguments of a command do not fit each other, or what they name."""
