"""Calls of the operating system that fail."""

import os

CALLS = ("open", "write", "fsync", "replace", "rename", "mkdir", "listdir", "unlink", "rmdir")


def is_reading(call, args):
    """Whether a call of `os.open` opens what is there to be read."""
    return call.__name__ == "open" and args[1] & os.O_ACCMODE == os.O_RDONLY


class FailingCalls:
    """Lets the N-th call of the operating system fail, counted over all kinds in CALLS.

    Files that are read are opened all the same.
    """

    def __init__(self, monkeypatch, number, code):
        self.count = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name), number, code))

    def _failing(self, call, number, code):
        def counted(*args, **kwargs):
            if is_reading(call, args):
                return call(*args, **kwargs)
            self.count += 1
            if self.count == number:
                raise OSError(code, os.strerror(code))
            return call(*args, **kwargs)

        return counted
