"""Tables of arrays, to be written in some format, and what is read back."""

import numpy as np

from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import Source, TableInfo, column_of, columns_of

PIECE = 7
# None, one, and one row fewer, as many and more than a piece has.
SIZES = (0, 1, PIECE - 1, PIECE, PIECE + 1, 33)
TYPES = (
    ("int64", "float32"),
    ("int32", "float16"),
    ("uint64", "bfloat16"),
    ("int64", "float64"),
    ("uint64", "int32"),
    ("int32", "int64"),
    ("int64", "int8"),
)
# Every size and every type, some of them together.
CASES = tuple((SIZES[i % len(SIZES)], TYPES[i % len(TYPES)]) for i in range(13))
# The name, the initial value and the group of each.
STATES = (("m", 0.0, 1), ("v", 0.5, 1), ("acc", 0.1, 2))


class Arrays(Source):
    """A source of arrays: `keys`, `values`, numbers of keys and states, by their columns."""

    def __init__(self, name, arrays, key_type, dtype, states=(), about=TableInfo()):  # noqa: B008
        self.name, self.dim, self.dtype = name, arrays["values"].shape[1], dtype
        self.key_type, self.num_keys = key_type, arrays["keys"].size
        self.states, self.about, self.arrays = tuple(states), about, arrays
        self.columns = tuple(name for name in ("stamps", "scores") if name in arrays)

    def read(self, column):
        array = self.arrays[column]
        for first in range(0, self.num_keys, PIECE):
            yield array[first : first + PIECE]


def a_table(n, key_type="int64", dtype="float32", dim=3, name="t", states=True, least=None):
    """A table of n keys in no order: every column that there is, and the states of two optimizers.

    Keys are of the whole range of their type, but for those that other systems keep for themselves.
    """
    random = np.random.default_rng(0)
    limits = np.iinfo(key_dtype(key_type).dtype)
    first = limits.min + 5 if least is None else least
    kind = key_dtype(key_type).dtype
    keys = random.integers(first, limits.max - 5, n, kind) if n else np.empty(0, kind)
    storage = row_dtype(dtype).storage
    rows = random.integers(-100, 100, (n, dim)).astype(np.float32) / 8
    if dtype == "bfloat16":
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    arrays = {"keys": keys, "values": rows.astype(storage)}
    facts = []
    if states:
        arrays["stamps"] = random.integers(1, 2**32, n, np.uint32)
        arrays["scores"] = random.integers(0, 2**64, n, np.uint64)
        for i, (state, initial, group) in enumerate(STATES):
            arrays[f"states.{i}.{state}"] = random.standard_normal((n, dim), np.float32)
            facts.append(StateFacts(f"states.{i}.{state}", state, dim, initial, group))
    about = TableInfo(facts={"num_lookups": 2**32 - 1}) if states else TableInfo()
    return Arrays(name, arrays, key_type, dtype, facts, about)


def whole(source, column):
    """A column, in one piece."""
    wanted = column_of(source, column)
    shape = (0,) if wanted.dim is None else (0, wanted.dim)
    pieces = list(source.read(column))
    assert all(piece.dtype == wanted.dtype for piece in pieces)
    return np.concatenate([np.empty(shape, wanted.dtype), *pieces])


def content(source):
    """What a source has, sorted by keys: {column: bytes}, and the facts that are no column."""
    order = np.argsort(whole(source, "keys"), kind="stable")
    columns = {each.name: whole(source, each.name)[order].tobytes() for each in columns_of(source)}
    facts = (source.name, source.dim, source.dtype, source.key_type, source.num_keys)
    return columns, facts, source.states
