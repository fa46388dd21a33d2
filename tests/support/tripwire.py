"""An exception at the k-th line of sok_lite that a call runs.

CPython looks for signals at calls and jumps back only: never between the end of a `with` block
and the call of `__exit__`, nor where an `except` clause forgets what it has handled. A trace
function is called there all the same; those places are left out. So a lock is safe in a `with`;
the last part of `try ... finally` begins with a line of its own, which is not left out.
"""

import contextlib
import dis
import functools
import gc
import inspect
import os
import signal
import sys
from pathlib import Path

import sok_lite

_PACKAGE = str(Path(sok_lite.__file__).parent) + os.sep
# What runs kernels and what is a function of its arguments alone: an exception within it is one at
# the line that calls it.
_PURE = tuple(
    _PACKAGE + part
    for part in (
        *("backend", "engine/dedup.py", "engine/segments.py", "engine/sort.py"),
        *("engine/dtypes.py", "engine/hashing.py"),
    )
)
# Its frames run between a table's lock and those who hold it by an ExitStack.
_CONTEXTLIB = contextlib.__file__


class Interrupt(BaseException):
    """What nobody expects."""


class _Tracer:
    def run(self, work):
        """Calls work() and returns what it returns."""
        before = sys.gettrace()
        gc.disable()  # the finalizers of other tables are none of this call's lines
        sys.settrace(self._enter)
        try:
            return work()
        finally:
            sys.settrace(before)
            gc.enable()


class Tripwire(_Tracer):
    """Raises an exception at the `at`-th place of a call, a line or an instruction; at 0 places are
    only counted. `place` is "file:line" where it was raised; None: nowhere."""

    def __init__(self, at=0, error=Interrupt, opcodes=False):
        self.at, self.error = at, error
        self.opcodes = opcodes
        self.event = "opcode" if opcodes else "line"
        self.count = 0
        self.place = None

    def _traces(self, code):
        name = code.co_filename
        if name == _CONTEXTLIB:
            return True
        return name.startswith(_PACKAGE) and not name.startswith(_PURE)

    def _enter(self, frame, event, arg):
        if not self._traces(frame.f_code):
            return None
        frame.f_trace_opcodes = self.opcodes
        return self._step

    def _step(self, frame, event, arg):
        if event != self.event or frame.f_lasti in _nowhere(frame.f_code):
            return self._step
        self.count += 1
        if self.place is None and self.count == self.at:
            self.place = _name(frame)
            raise self.error
        return self._step


def _name(frame):
    name = frame.f_code.co_filename
    name = name.removeprefix(_PACKAGE) if name.startswith(_PACKAGE) else os.path.basename(name)
    return f"{name}:{frame.f_lineno}"


@functools.cache
def _nowhere(code):
    """The offsets of the instructions that leave a `with` block or an `except` clause.

    An exception there would leave what was entered entered, and no signal is handled there.
    """
    found = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for i in range(len(steps)):
        names = [step.opname for step in steps[i : i + 5]]
        nothing = [
            name == "DUP_TOP" or (name == "LOAD_CONST" and step.argval is None)
            for name, step in zip(names, steps[i : i + 5], strict=True)
        ]
        if nothing[:3] == [True] * 3 and names[3].startswith(("PRECALL", "CALL")):
            first, last = i, i + (4 if names[3] == "PRECALL" else 3)
        elif names[0] in ("WITH_EXCEPT_START", "POP_EXCEPT"):
            first = last = i
        else:
            continue
        while steps[first - 1].opname in ("SWAP", "ROT_TWO", "NOP", "POP_BLOCK", "PUSH_EXC_INFO"):
            first -= 1
        found.update(step.offset for step in steps[first : last + 1])
    return frozenset(found)


class CtrlC(_Tracer):
    """Presses Ctrl-C where the `at`-th function of sok_lite begins that a call runs: there Python
    looks for signals. `place` is "file:line" where it was pressed; None: nowhere."""

    def __init__(self, at=0):
        self.at, self.count, self.place = at, 0, None

    def is_its(self, raised, text):
        """Whether an exception is what comes of it."""
        return raised is KeyboardInterrupt

    def _enter(self, frame, event, arg):
        code = frame.f_code
        # contextlib's run between a lock and who holds it by an ExitStack. What is raised where a
        # generator is closed nobody sees.
        is_traced = code.co_filename.startswith(_PACKAGE) or code.co_filename == _CONTEXTLIB
        if is_traced and not code.co_flags & inspect.CO_GENERATOR:
            self.count += 1
            if self.count == self.at:
                self.place = _name(frame)
                signal.raise_signal(signal.SIGINT)


class AtEveryLine(_Tracer):
    """Calls something at every line of sok_lite that this thread runs, as a signal handler may."""

    def __init__(self, work):
        self.work = work
        self.is_in_it = False

    def _enter(self, frame, event, argument):
        if "sok_lite" in frame.f_code.co_filename and not self.is_in_it:
            self.is_in_it = True
            try:
                self.work()
            finally:
                self.is_in_it = False
        return self._enter


class Alarm:
    """Presses Ctrl-C after some seconds, if a call is still running; then they are its `place`."""

    def __init__(self, seconds):
        self.seconds, self.place, self._is_armed = seconds, None, False

    def _ring(self, number, frame):
        if self._is_armed:
            signal.raise_signal(signal.SIGINT)

    def run(self, work):
        """Calls work() and returns what it returns."""
        before = signal.signal(signal.SIGALRM, self._ring)
        try:
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
            result = work()
            self._is_armed = False
            return result
        except KeyboardInterrupt:
            self._is_armed = False
            self.place = f"{self.seconds:.6f} s"
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def is_its(self, raised, text):
        """Whether an exception is what comes of it."""
        return raised is KeyboardInterrupt
