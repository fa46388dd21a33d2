"""The arrays of the stand-in give what NumPy's do where CuPy's do, and refuse what those refuse.

What CuPy does was read in its source; where it is installed, test_cupy_stand_in.py compares names.
"""

import operator

import numpy as np
import pytest

from tests.support.simt import device

OF_NUMPY = "Unsupported type <class 'numpy.ndarray'>"
REFUSED = [
    (OF_NUMPY, lambda x, n: x + n),
    (OF_NUMPY, lambda x, n: n + x),
    (OF_NUMPY, lambda x, n: x == n),
    (OF_NUMPY, lambda x, n: operator.iadd(x, n)),
    (OF_NUMPY, lambda x, n: operator.iadd(n, x)),
    (OF_NUMPY, lambda x, n: np.maximum(x, n)),
    ("Implicit conversion to a NumPy array", lambda x, n: np.asarray(x)),
    ("cannot be interpreted as an integer", lambda x, n: range(x[1])),
    ("slice indices must be integers", lambda x, n: n[: x[1]]),
    ("unsized", lambda x, n: len(x[1])),
    ("unhashable", lambda x, n: hash(x)),
    ("ambiguous", lambda x, n: bool(x)),
    ("no identity", lambda x, n: x[:0].max()),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cupy_refuses_is_refused(xp, number):
    text, work = REFUSED[number]
    with pytest.raises((TypeError, ValueError), match=text):
        work(xp.arange(3), np.arange(3))


WAITS = [
    (0, lambda xp, x: x[1:] + x[:-1]),
    (0, lambda xp, x: xp.argsort(x)),
    (0, lambda xp, x: x[xp.arange(3)]),
    (0, lambda xp, x: xp.where(x > 1, x, 0)),
    (0, lambda xp, x: x.fill(3)),
    (0, lambda xp, x: x[:0].get()),
    (1, lambda xp, x: x.get()),
    (1, lambda xp, x: x[0].item()),
    (1, lambda xp, x: bool((x > 1).any())),
    (1, lambda xp, x: xp.asnumpy(x)),
    (1, lambda xp, x: x[x > 1]),
    (1, lambda xp, x: operator.setitem(x, x > 1, 0)),
    (1, lambda xp, x: xp.flatnonzero(x)),
    (1, lambda xp, x: xp.unique(x)),
    (1, lambda xp, x: 3 in x[:1]),
    (1, lambda xp, x: x[: x[1]]),
]


@pytest.mark.parametrize("number", range(len(WAITS)))
def test_waits_are_where_cupy_has_them(xp, number):
    waits, work = WAITS[number]
    x = xp.arange(8)
    with device.counted() as counts:
        work(xp, x)
    assert counts["waits"] == waits
