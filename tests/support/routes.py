"""Two routes of the same calls, by native code and by Python alone: both give the same bits."""

import contextlib
import re
from typing import Any, NamedTuple

import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import variable as of_bridge
from sok_lite.bridge import writes
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.table.record import INSERTS, READS
from tests.support.table_audit import audit
from tests.support.table_state import State

ALL = READS | INSERTS
FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "int32", "int64")  # rows that are neither pooled nor trained
FEW_NEAR = 8 * 12 / 2**30  # 8 rows of 3 float32
FULL = {"init_capacity": 16, "max_capacity": 16, "max_bucket_size": 4}

# Writes of rows: what each calls, and whether a key that is new gets a row.
WRITES = {
    "assign": (lambda variable, *given: writes.insert_or_assign(variable, "assign", *given), True),
    "scatter_add": (writes.scatter_add, False),
    "scatter_sub": (writes.scatter_sub, False),
    "scatter_update": (writes.scatter_update, False),
}


class Kind(NamedTuple):
    """A kind of table, and the arguments that make it."""

    var_type: str
    options: dict[str, Any]


KINDS = {
    "hbm": Kind("hbm", {}),
    "kLru": Kind("hybrid", {"init_capacity": 16}),
    "kLfu": Kind("hybrid", {"evict_strategy": "kLfu", "enter_threshold": 2}),
    "kLfu of all": Kind("hybrid", {"evict_strategy": "kLfu"}),
    "kLfu of repeats": Kind("hybrid", {"evict_strategy": "kLfu", "count_repeats": True}),
    "kLfu of two repeats": Kind(
        "hybrid", {"evict_strategy": "kLfu", "count_repeats": True, "enter_threshold": 2}
    ),
    "kEpochLru": Kind("hybrid", {"evict_strategy": "kEpochLru", "filter_ratio": 0.5}),
    "kEpochLfu": Kind("hybrid", {"evict_strategy": "kEpochLfu"}),
    "kCustomized": Kind("hybrid", {"evict_strategy": "kCustomized"}),
    "kLru in tiers": Kind("hybrid", {"init_capacity": 16, "max_hbm_for_vectors": FEW_NEAR}),
    "kLfu in tiers": Kind("hybrid", {"evict_strategy": "kLfu", "max_hbm_for_vectors": FEW_NEAR}),
    "kLfu of repeats in tiers": Kind(
        "hybrid",
        {"evict_strategy": "kLfu", "count_repeats": True, "max_hbm_for_vectors": FEW_NEAR},
    ),
    "full kLru": Kind("hybrid", {"on_refused": "ignore", **FULL}),
    "full kLfu": Kind("hybrid", {"on_refused": "ignore", "evict_strategy": "kLfu", **FULL}),
    "full kEpochLfu": Kind(
        "hybrid", {"on_refused": "error", "evict_strategy": "kEpochLfu", **FULL}
    ),
    "full kCustomized": Kind(
        "hybrid", {"on_refused": "error", "evict_strategy": "kCustomized", **FULL}
    ),
}


def new_variable(kind="hbm", name="table", dim=3, key_type="int64", dtype="float32", first=None):
    """Returns a variable whose new rows depend on its name and the key alone.

    Args:
      first: the initializer, or what says which; None: one of the dtype.
    """
    var_type, options = KINDS[kind]
    if first is None:
        first = "uniform" if dtype in FLOATS else 7
    if not hasattr(first, "draw_launch"):
        first = make_initializer(first, dim, None, var_type)
    table = make_table(
        var_type,
        of_bridge.get_backend(),  # a test may have it simulated
        dim,
        initializer=first,
        key_type=key_type,
        dtype=dtype,
        name=name,
        **options,
    )
    return TableVariable(table, name=name, trainable=dtype in FLOATS)


def writing(variable, name):
    """Returns a function that writes rows (n, dim) of keys (n,), by one of WRITES."""
    write, inserts = WRITES[name]
    specs = [tf.TensorSpec([None], variable.key_type), tf.TensorSpec([None, None], variable.dtype)]

    @tf.function(autograph=False, input_signature=specs)
    def run(keys, rows):
        write(variable, *((keys, rows) if inserts else [tf.IndexedSlices(rows, keys)]))

    return run


class Route:
    """Tables, and the calls that they have; `is_native` says whether native code may use them."""

    def __init__(self, is_native, make):
        self.is_native, self.variables = is_native, make()
        kinds = tf.keras.optimizers
        # A state of the last one begins with 0.1, which new rows need.
        self.optimizers = [kinds.SGD(0.5), kinds.Adam(0.1), kinds.Adagrad(0.1)]
        self.optimizers = [sok.OptimizerWrapper(each) for each in self.optimizers]

    @contextlib.contextmanager
    def route(self):
        """A block of calls that go this route; outside of it tables say what they are."""
        for each in self.variables:
            each.table.record.allows = self.is_native * ALL
        try:
            yield
        finally:
            for each in self.variables:
                each.table.record.allows = ALL

    def run(self, call, *arguments):
        """Returns what a call gives, as bits, or what it raises."""
        try:
            with self.route():
                return tf.nest.map_structure(bits, call(*arguments))
        except Exception as error:
            return type(error).__name__, said_in(error)

    def state(self):
        """Returns all that tables are and have done."""
        return [(State.of(each.table), counts_of(each.table)) for each in self.variables]


def counts_of(table):
    known = (table.record.counters.by_name(), table.clock.now, table.record.row_version)
    return known if table.tiers is None else (*known, *accesses_of(table.tiers))


def accesses_of(tiers):
    """Returns how often rows were accessed, as a store of two tiers knows it."""
    names = ("room", "lookups", "looked_up", "rest")
    return tiers._counts.tolist(), *(getattr(tiers.record, name) for name in names)


def said_in(error):
    """Returns what an exception says, without where: of a graph's, what Python's said."""
    found = re.search(r"\b[A-Z]\w*(?:Error|Interrupt): .*", str(error))
    return str(error) if found is None else found[0]


def bits(value):
    """Returns the type and the bytes of a tensor; anything else as it is."""
    if not tf.is_tensor(value):
        return value
    array = value.numpy()
    return array.dtype.name, array.shape, array.tobytes()


def both(make):
    """Returns two routes of equal tables."""
    return Route(True, make), Route(False, make)


def assert_equal(native, python, numbers=True):
    """Raises AssertionError unless the tables of both routes are equal.

    Args:
      numbers: whether keys have the same row numbers: on a GPU native code gives new keys theirs in
        no order.
    """
    for one, other in zip(native.state(), python.state(), strict=True):
        for name, mine, theirs in zip(State._fields, one[0], other[0], strict=True):
            assert mine == theirs or (name == "numbers" and not numbers), name
        assert one[1] == other[1]


def audit_both(native, python):
    for route in (native, python):
        for variable in route.variables:
            audit(variable.table)
