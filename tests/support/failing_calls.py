"""Calls of the operating system that fail."""

import os

CALLS = ("open", "write", "fsync", "replace", "rename", "mkdir", "listdir", "unlink", "rmdir")


class FailingCalls:
    """Lets the N-th call of the operating system fail, counted over all kinds in CALLS."""

    def __init__(self, monkeypatch, number, code):
        self.count = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name), number, code))

    def _failing(self, call, number, code):
        def counted(*args, **kwargs):
            self.count += 1
            if self.count == number:
                raise OSError(code, os.strerror(code))
            return call(*args, **kwargs)

        return counted
