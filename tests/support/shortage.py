"""Memory that runs out at the k-th allocation of a call, once or for good, in three ways.

`Shortage` stands in for everything by which Python code of the engine asks a backend for memory.
`every_malloc` runs in a process with failing_memory.cpp preloaded, whose malloc and mmap fail,
for what no Python code can see. `until_it_is_full` runs under a limit of the system.
"""

import contextlib
import ctypes
import resource

import numpy as np

from sok_lite.backend import get_backend
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.engine.rows.store import NO_ROW
from tests.support.fault_bench import Bench
from tests.support.fault_cases import CASES
from tests.support.fault_facts import Findings, check_after_fault, expected, first_line, ready
from tests.support.helpers import new_table, sized
from tests.support.table_audit import audit


class Shortage:
    """While it is entered, the allocation number `at` fails; with `for_good` all later ones too.

    Attributes:
      calls: allocations so far.
    """

    def __init__(self, backend, at, for_good):
        self.backend, self.at, self.for_good = backend, at, for_good
        self.calls = 0
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        self._replace(self.backend, "xp", _Arrays(self.backend.xp, self))
        for name in ("zeros_chunk", "first_chunk", "far_chunk", "from_host"):
            self._replace(self.backend, name, self.limited(getattr(self.backend, name)))
        zeros = FarFile.zeros
        limited = self.limited(zeros)
        FarFile.zeros = lambda file, num_bytes: limited(file, num_bytes)
        self._undo.callback(setattr, FarFile, "zeros", zeros)
        return self

    def __exit__(self, *error):
        self._undo.close()

    def _replace(self, owner, name, value):
        """An attribute of the object hides that of its class."""
        had = vars(owner).get(name, self)
        setattr(owner, name, value)
        if had is self:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, had)

    def limited(self, allocate):
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at or (self.for_good and self.calls > self.at):
                raise MemoryError("none left")
            return allocate(*args, **kwargs)

        return call


class _Arrays:
    """NumPy or CuPy, whose functions allocate what they return."""

    def __init__(self, xp, shortage):
        self._xp, self._shortage = xp, shortage

    def __getattr__(self, name):
        value = getattr(self._xp, name)
        if callable(value) and not isinstance(value, type):
            return self._shortage.limited(value)
        return value


def attempt(bench, name, facts, shortage):
    """Runs an operation on new tables without memory; checks them.

    Returns:
      What is wrong, or None.
    """
    case = CASES[name]
    tables = ready(bench, case, facts.spare)
    raised, text = None, ""
    with shortage:
        try:
            case.work(bench, tables)
        except BaseException as error:
            raised, text = type(error), str(error)
    try:
        passed = raised is None or raised is case.raises or issubclass(raised, MemoryError)
        # In some places NumPy ends a call for want of memory and forgets to say so.
        passed |= raised is SystemError and "exception" in text
        assert passed, f"MemoryError became {raised}: {text}"
        check_after_fault(bench, name, tables, facts)
    except Exception as error:
        return first_line(error)
    return None


def every_shortage(bench, name, new_shortage, step=1):
    """Runs an operation without memory from every allocation on, and with all but one of them; on a
    simulated GPU of every eighth.

    Args:
      step: 2 leaves every second allocation out, and so on.
      new_shortage: (at, for_good) -> a context with `calls`.
    """
    facts = expected(bench, name)
    findings = Findings()
    tried, step = 0, step * sized(bench.backend, 1, 8)
    for for_good in (False, True):
        at = 1
        while True:
            shortage = new_shortage(at, for_good)
            wrong = attempt(bench, name, facts, shortage)
            if shortage.calls < at:
                break
            tried += 1
            if wrong is not None:
                findings.append((f"allocation {at}{' and all later ones' * for_good}", wrong))
            at += step
    assert tried, "nothing was allocated"
    findings.report(f"{name} of {bench.kind}", tried)
    return tried


# -------------------------------------------------------------------- malloc that fails


class Preloaded:
    """The same by failing_memory.cpp, for allocations of some size."""

    def __init__(self, at, for_good, least=1024):
        self._library = ctypes.CDLL(None)
        self._arguments = at, int(for_good), least
        self.calls = 0

    def __enter__(self):
        self._library.sok_fail_memory(*self._arguments)
        return self

    def __exit__(self, *error):
        self.calls = self._library.sok_spare_memory()


def every_malloc(name, kind, n, folder):
    """Lets every allocation of an operation fail, in this process. Prints how many."""
    backend = get_backend("cpu")
    backend.chunk_bytes = backend.far_chunk_bytes = 1 << 13
    print(every_shortage(Bench(backend, kind, n, folder), name, Preloaded))


# -------------------------------------------------------------------- a limit of the system


def until_it_is_full(kind, limit, spare):
    """Grows a table until the process may have no more memory, and goes on using it.

    Args:
      kind: "hbm" or "hybrid".
      limit: name of a limit, "RLIMIT_AS" or "RLIMIT_DATA".
      spare: bytes that the process may have beyond what it has.
    """
    backend = get_backend("cpu")
    dim, batch = 16, 1 << 15
    options = {"var_type": kind}
    if kind == "hybrid":
        options |= {"init_capacity": 1 << 12, "max_hbm_for_vectors": 1 / 64}
    table = new_table(backend, dim, **options)
    table.lookup(np.arange(-100, 0))
    which = getattr(resource, limit)
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (_in_use() + spare, hard))
    held = [np.arange(-100, 0)]
    failures = successes = first = 0
    has_erased = False
    while failures < 30:
        keys = np.arange(first, first + batch)
        size, lookups = table.size, table.num_lookups
        try:
            values = table.lookup(keys).values
        except MemoryError:
            failures += 1
            assert table.size == size, f"{table.size} keys after a lookup that failed, not {size}"
            batch = max(64, batch // 2)
        else:
            successes += 1
            assert (values[:, 0] == keys % 1000).all(), "a lookup gave wrong rows"
            held.append(keys)
            first += batch
        assert table.num_lookups in (lookups, lookups + 1)
        known = held[failures % len(held)]
        with contextlib.suppress(MemoryError):
            found = table.lookup(known, insert=False).values
            assert (found == (known % 1000).astype(np.float32)[:, None]).all()
        if failures == 15 and not has_erased:
            # What is given back can be used again.
            gone, batch = held.pop(1), 4096
            with contextlib.suppress(MemoryError):
                table.erase(gone)
                has_erased = True
            if bool(table.contains(gone[:1]).any()):
                held.append(gone)
    resource.setrlimit(which, (hard, hard))
    audit(table)
    keys, rows = table.export()
    assert np.array_equal(np.sort(np.concatenate(held)), keys), "keys came or went"
    assert (rows == (keys % 1000).astype(np.float32)[:, None]).all(), "rows are wrong"
    more = np.arange(-5000, -4000)
    assert (table.lookup(more).values[:, 0] == more % 1000).all()
    assert (table.find(more) != np.uint32(NO_ROW)).all()
    audit(table)
    assert successes, "there was no memory for anything"
    print(successes, failures)


def _in_use():
    """Bytes of addresses that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
