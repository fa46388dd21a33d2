"""A table's lock, shared with native code: a few words of the table's record.

It works like an RLock: `with` calls C code, so no bytecode runs between acquiring the lock and
entering the block.
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
      waiting: number of threads that wait for exclusive access.
      owner, depth: the thread with exclusive access, and how often it acquired it.
      is_own: returns whether this thread has exclusive access.
      retire: ends native calls in the table and prevents new ones, before its memory is freed. It
        takes any argument.
      after_fork: in a forked child, releases the locks of other threads; returns whether none of
        them had exclusive access.
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
        """Acquires exclusive access, waiting if `blocking`; returns whether it has it."""
        if not blocking:
            return bool(self._try())
        self.__enter__()
        return True

    def release(self) -> None:
        """Releases it. RuntimeError: this thread does not have it."""
        if not self.is_own():
            raise RuntimeError("A table's lock was given back by a thread that does not have it.")
        self.__exit__(None, None, None)

    def _is_owned(self) -> bool:
        return bool(self.is_own())


class TableLocks(ctypes.Structure):
    """Several locks for one `with`, acquired in the order of their addresses."""

    _fields_ = (("count", c_int64), ("locks", c_void_p))

    __enter__: Callable[..., None]
    __exit__: Callable[..., None]

    def __init__(self, locks: Iterable[TableLock]) -> None:
        self._kept = [*locks]
        addresses = sorted(map(ctypes.addressof, self._kept))
        self._words = WORDS[len(addresses)](*addresses)
        super().__init__(len(addresses), ctypes.addressof(self._words))


def has_functions() -> bool:
    """Whether a CPU kernel library is loaded: locks need its functions."""
    return "__exit__" in vars(TableLocks)


def load(library: Path) -> None:
    """Binds the lock functions of a CPU kernel library, unless bound."""
    if has_functions():
        return
    functions = ctypes.PyDLL(str(library))  # it releases the interpreter lock itself
    names = ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
    addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p).value for name in names]
    functions.sok_lock_python((c_void_p * len(names))(*addresses))
    binding = ctypes.pythonapi.PyInstanceMethod_New
    binding.argtypes, binding.restype = [py_object], py_object

    def method(kind: type, name: str, *arguments: type, returns: type | None = None) -> Any:
        function = getattr(functions, name)
        function.argtypes, function.restype = [POINTER(kind), *arguments], returns
        return binding(function)  # a method bound by C code

    error = (py_object, py_object, py_object)
    TableLock.is_own = method(TableLock, "sok_lock_is_taken", returns=c_int)
    TableLock.retire = method(TableLock, "sok_lock_retire", py_object)
    TableLock.after_fork = method(TableLock, "sok_lock_after_fork", returns=c_int)
    TableLock._try = method(TableLock, "sok_lock_try", returns=c_int)
    for kind, prefix in ((TableLock, "sok_lock"), (TableLocks, "sok_locks")):
        kind.__enter__ = method(kind, f"{prefix}_take")
        kind.__exit__ = method(kind, f"{prefix}_give", *error)
