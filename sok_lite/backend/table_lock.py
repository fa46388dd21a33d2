"""The lock of a table that native code takes as well: a few words of the table's record.

It is used as an RLock is. What `with` calls is C code, from a library that has loaded Python's
addresses: as with an RLock, no bytecode runs between a lock that is taken and its `with`.
"""

import ctypes
from collections.abc import Callable, Iterable
from ctypes import POINTER, c_int, c_int64, c_uint32, c_void_p, py_object
from pathlib import Path
from typing import Any

from sok_lite.backend.arguments import WORDS


class TableLock(ctypes.Structure):
    """A lock: see kernels/table_lock.h. It works once a CPU kernel library is loaded.

    Attributes:
      state: kLockAlone or the number of readers, and kLockSleeping.
      waiting: threads that wait until they can have it alone.
      owner, depth: of the thread that has it alone: which it is, and how often it has taken it.
      is_own: returns whether this thread has it alone.
      retire: takes anything; called once the table of the lock's record is going, and before its
        memory is. No native call is in the table afterwards, and none begins.
      after_fork: called in a forked child. Gives the lock of any other thread back, and returns
        whether none has had it alone.
    """

    _fields_ = (
        *[(name, c_uint32) for name in ("state", "waiting")],
        *[(name, c_int64) for name in ("owner", "depth")],
    )

    __enter__: Callable[..., None]
    __exit__: Callable[..., None]
    is_own: Callable[[], int]
    retire: Callable[[object], None]
    after_fork: Callable[[], int]
    _try: Callable[[], int]

    def acquire(self, blocking: bool = True) -> bool:
        """Takes it, and returns whether it has; it waits unless `blocking` is False."""
        if not blocking:
            return bool(self._try())
        self.__enter__()
        return True

    def release(self) -> None:
        """Gives it back. Raises RuntimeError: this thread does not have it."""
        if not self.is_own():
            raise RuntimeError("A table's lock was given back by a thread that does not have it.")
        self.__exit__(None, None, None)

    def _is_owned(self) -> bool:
        return bool(self.is_own())


class TableLocks(ctypes.Structure):
    """Several locks for one `with`, which takes them in the order of their addresses."""

    _fields_ = (("count", c_int64), ("locks", c_void_p))

    __enter__: Callable[..., None]
    __exit__: Callable[..., None]

    def __init__(self, locks: Iterable[TableLock]) -> None:
        self._kept = [*locks]
        addresses = sorted(map(ctypes.addressof, self._kept))
        self._words = WORDS[len(addresses)](*addresses)
        super().__init__(len(addresses), ctypes.addressof(self._words))


def has_functions() -> bool:
    """Whether locks work: a CPU kernel library was loaded."""
    return "__exit__" in vars(TableLocks)


def load(library: Path) -> None:
    """Gives locks the functions of a CPU kernel library, unless they have some."""
    if has_functions():
        return
    functions = ctypes.PyDLL(str(library))  # it lets go of the interpreter lock itself
    names = ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
    addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p).value for name in names]
    functions.sok_lock_python((c_void_p * len(names))(*addresses))
    binding = ctypes.pythonapi.PyInstanceMethod_New
    binding.argtypes, binding.restype = [py_object], py_object

    def method(kind: type, name: str, *arguments: type, returns: type | None = None) -> Any:
        function = getattr(functions, name)
        function.argtypes, function.restype = [POINTER(kind), *arguments], returns
        return binding(function)  # a method whose binding is C code

    error = (py_object, py_object, py_object)
    TableLock.is_own = method(TableLock, "sok_lock_is_taken", returns=c_int)
    TableLock.retire = method(TableLock, "sok_lock_retire", py_object)
    TableLock.after_fork = method(TableLock, "sok_lock_after_fork", returns=c_int)
    TableLock._try = method(TableLock, "sok_lock_try", returns=c_int)
    for kind, prefix in ((TableLock, "sok_lock"), (TableLocks, "sok_locks")):
        kind.__enter__ = method(kind, f"{prefix}_take")
        kind.__exit__ = method(kind, f"{prefix}_give", *error)
