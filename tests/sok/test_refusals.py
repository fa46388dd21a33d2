"""What a table cannot do raises, with what to use instead, and leaves the table as it was."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.sok import arguments as variable_arguments

INSTEAD = "sok.export|sok.assign|embedding_lookup|dimension"


@pytest.fixture
def table():
    v = sok.DynamicVariable(2, name="refuses")
    sok.assign(v, [1, 2], [[1.0, 1.0], [2.0, 2.0]])
    yield v
    keys, values = sok.export(v)
    np.testing.assert_array_equal(keys, [1, 2])
    np.testing.assert_array_equal(values, [[1.0, 1.0], [2.0, 2.0]])


DENSE_READS = {
    "convert": lambda v: tf.convert_to_tensor(v),
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "numpy": lambda v: v.numpy(),
    "np.array": lambda v: np.array(v),
    "add": lambda v: v + 1.0,
    "slice": lambda v: v[0],
    "bool": lambda v: bool(v),
    "int": lambda v: int(v),
    "float": lambda v: float(v),
    "eval": lambda v: v.eval(),
    "gather_nd": lambda v: tf.gather_nd(v, [[1]]),
    "gather along axis 1": lambda v: tf.gather(v, [0], axis=1),
    "matmul": lambda v: tf.matmul(v, v),
    "in a function": lambda v: tf.function(lambda: tf.reduce_sum(v))(),
    "assign a dense value": lambda v: v.assign(np.zeros((0, 2))),
    "assign_add": lambda v: v.assign_add([[1.0, 1.0]]),
    "assign_sub": lambda v: v.assign_sub([[1.0, 1.0]]),
    "scatter_max": lambda v: v.scatter_max(None),
    "scatter_nd_add": lambda v: v.scatter_nd_add([[1]], [[1.0, 1.0]]),
    "set_shape": lambda v: v.set_shape([2, 2]),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "to_proto": lambda v: v.to_proto(),
}


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("framework", ["keras", "tf_keras", "tf_keras.legacy", "tf.compat.v1"])
def test_an_optimizer_without_a_wrapper_is_told_of_it(table, framework, kind):
    if framework == "tf.compat.v1":
        kind = {"SGD": "GradientDescent"}.get(kind, kind)
        optimizer = getattr(tf.compat.v1.train, f"{kind}Optimizer")(0.1)
    else:
        package = pytest.importorskip(framework.split(".")[0])
        optimizers = package.optimizers.legacy if "legacy" in framework else package.optimizers
        momentum = {"momentum": 0.9} if (framework, kind) == ("keras", "SGD") else {}
        optimizer = getattr(optimizers, kind)(0.1, **momentum)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
    gradient = tape.gradient(loss, table)
    with pytest.raises(NotImplementedError, match=r"'refuses:0' by itself.*OptimizerWrapper\("):
        optimizer.apply_gradients([(gradient, table)])


@pytest.mark.cases("read")
@pytest.mark.parametrize("read", DENSE_READS.values(), ids=DENSE_READS.keys())
def test_a_dense_use_is_refused(table, read):
    with pytest.raises(NotImplementedError, match=INSTEAD):
        read(table)
    with pytest.raises(NotImplementedError, match=r"and sok.export\(variable\) for all.$"):
        table.numpy()  # and no more


@pytest.mark.cases("read")
@pytest.mark.parametrize(
    "read",
    [tf.reduce_sum, tf.identity, lambda v: tf.matmul(v, tf.ones([2, 1])), tf.keras.layers.Dense(1)],
    ids=["reduce_sum", "identity", "matmul", "Dense"],
)
def test_an_eager_operator_that_reads_it_says_how_to_look_up(table, read):
    # These read the variable in C++ without asking its class.
    errors = (tf.errors.FailedPreconditionError, NotImplementedError)
    with pytest.raises(errors, match="this is a table.*lookup_sparse|has no dense tensor"):
        read(table)
    for ask in (tf.shape, tf.rank):
        with pytest.raises(errors):
            ask(table)


@pytest.mark.parametrize(
    "look_up",
    [
        tf.nn.embedding_lookup,
        tf.compat.v1.nn.embedding_lookup,
        lambda p, k: tf.nn.embedding_lookup_sparse(p, tf.sparse.from_dense([k]), None),
        lambda p, k: tf.nn.safe_embedding_lookup_sparse(p, tf.sparse.from_dense([k])),
    ],
    ids=["v2", "v1", "sparse", "safe"],
)
def test_a_list_of_variables_is_refused(table, look_up, mode):
    other = sok.DynamicVariable(2)
    keys = tf.constant([1, 2], tf.int64)
    with pytest.raises(ValueError, match="takes one sok.DynamicVariable.*a list of 2"):
        mode(lambda: look_up([table, other], keys))()
    np.testing.assert_array_equal(tf.nn.embedding_lookup([table], [2]), [[2.0, 2.0]])


def test_saved_model_and_xla_are_refused(table, tmp_path):
    module = tf.Module()
    module.table = table
    with pytest.raises(NotImplementedError, match="saved_model"):
        tf.saved_model.save(module, str(tmp_path))
    read = tf.function(lambda: tf.nn.embedding_lookup(table, [1]), jit_compile=True)
    with pytest.raises(NotImplementedError, match="jit_compile"):
        read()


@pytest.mark.cases("arguments")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dimension": 0}, ValueError, "at least 1. Received: dimension=0"),
        ({"dimension": 2.0}, TypeError, "must be an integer"),
        ({"dimension": True}, TypeError, "must be an integer"),
        ({"var_type": "ram"}, ValueError, "'hbm' or 'hybrid'. Received: var_type='ram'"),
        ({"initializer": "randn"}, ValueError, "Received: initializer='randn'"),
        ({"key_type": tf.float32}, ValueError, "int64, int32, uint64. Received: 'float32'"),
        ({"key_type": "keys"}, TypeError, "must be a dtype"),
        ({"key_type": str}, ValueError, "'string'. sok_lite.hash_strings makes int64 keys"),
        ({"dim": 16}, TypeError, "no argument `dim`. Received: dim=16. It is called `dimension`"),
        ({"row_dtype": tf.bfloat16}, TypeError, "It is called `dtype` here"),
        ({"keep_texts": True}, TypeError, "A sok_lite.keras.Table with key_type=str keeps texts"),
        ({"key_type": 9}, TypeError, "`key_type` must be a dtype.*key_type=9. A table has a dim"),
        ({"dtype": tf.float64}, ValueError, "float32, float16, bfloat16. Received: 'float64'"),
        ({"mode": "localised"}, ValueError, "'localized:<rank>'"),
        ({"mode": "localized:x"}, ValueError, "'localized:<rank>'"),
        ({"gradient_dtype": tf.float16}, ValueError, "float32 or bfloat16. Received: 'float16'"),
        ({"gradient_dtype": "short"}, TypeError, "gradient_dtype='short'"),
        ({"partitioner": "modulo"}, ValueError, "'mod', 'hash' or a function.*'modulo'"),
        ({"partitioner": 3}, ValueError, "'mod', 'hash' or a function.*partitioner=3"),
        ({"partitioner": "hash", "mode": "localized:0"}, ValueError, "Leave one of them out"),
        ({"hot_keys": 9}, TypeError, "is gone: .*hot_keys=9. Leave it out"),
        ({"max_capacities": 8}, TypeError, "unexpected keyword argument 'max_capacities'"),
        ({"seed": 1.5}, TypeError, "`seed` must be an integer"),
        ({"init_capacity": -1}, ValueError, "`init_capacity` must be at least 0"),
        ({"constraint": abs}, NotImplementedError, "no constraints"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        sok.DynamicVariable(**({"dimension": 2} | arguments))


def test_a_number_of_rows_is_no_dimension():
    with pytest.raises(TypeError, match=r"Variable\(1000, 16\).*Write DynamicVariable\(16\)"):
        sok.DynamicVariable(1000, 16)
    with pytest.raises(TypeError, match="or initializer=1.0 for rows of 1000"):
        sok.DynamicVariable(1000, np.int64(1), "hybrid")
    with pytest.raises(TypeError, match="^DynamicVariable has no argument `dim`.*sok_lite.keras"):
        sok.DynamicVariable(dim=16)
    for arguments, options in (((2, 16.0), {}), ((2, 0), {}), ((2,), {"initializer": 16})):
        table = sok.DynamicVariable(*arguments, **options)
        expected = options.get("initializer", arguments[-1])
        np.testing.assert_array_equal(table.sparse_read([5]), [[expected, expected]])


def test_an_option_that_hbm_ignores_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(variable_arguments, "_warned_of", set())
    with pytest.warns(UserWarning, match="max_capacity: ignored.*'hbm'.*'hybrid'") as warned:
        sok.DynamicVariable(2, init_capacity=1162, max_capacity=2048)
    assert [w.filename for w in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sok.DynamicVariable(2, max_capacity=4096)
        sok.DynamicVariable(2, var_type="hybrid", max_capacity=4096, io_by_cpu=False)
        sok.DynamicVariable(2, init_capacity=8, seed=1, evict_strategy=None)
    with pytest.warns(UserWarning, match="^evict_strategy, filter_ratio: ignored"):
        sok.DynamicVariable(2, max_capacity=1, filter_ratio=0.5, evict_strategy="kLru")


ROWS = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("keys", "values", "error", "text"),
    [
        ([1, 5], np.zeros((2, 3), np.float32), ValueError, "has dimension 2.*shape \\(2, 3\\)"),
        ([1, 5], np.zeros((3, 2), np.float32), ValueError, "indices of shape \\(2,\\)"),
        ([1, 5], np.zeros(4, np.float32), ValueError, "must have shape"),
        ([[1, 5]], ROWS, ValueError, "`indices` must have shape \\(n,\\)"),
        ([1.0, 5.0], ROWS, TypeError, "must be integers \\(int64\\). Received: float"),
        (["a", "b"], ROWS, TypeError, "must be integers"),
        ([True, False], ROWS, TypeError, "must be integers"),
        ([1, 5], np.zeros((2, 2), np.int32), TypeError, "must be float32. Received: dtype int32"),
        ([1, 5], [["a", "b"]] * 2, TypeError, "must be float32. Received: dtype string"),
    ],
    ids=str,
)
def test_assign_refuses_what_does_not_fit(table, keys, values, error, text, mode):
    with pytest.raises(error, match=text):
        mode(lambda: sok.assign(table, keys, values) and None)()
    # And where only the data know their shape.
    specs = [tf.TensorSpec(None, tf.int64), tf.TensorSpec(None, tf.float32)]
    assign = tf.function(lambda *x: sok.assign(table, *x) and None, input_signature=specs)
    with pytest.raises(tf.errors.InvalidArgumentError, match="dimension 2"):
        assign([1, 5], np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("what", ["assign", "export"])
def test_other_variables_are_refused(what):
    arguments = ([1], [[1.0]]) if what == "assign" else ()
    with pytest.raises(TypeError, match=f"sok.{what} takes a sok.DynamicVariable"):
        getattr(sok, what)(tf.Variable([[1.0]]), *arguments)


@pytest.mark.parametrize("how", ["scatter_add", "scatter_sub", "scatter_update"])
def test_a_scatter_takes_slices(table, how):
    with pytest.raises(TypeError, match="sparse_delta is not IndexedSlices"):
        getattr(table, how)(tf.zeros([1, 2]))
    wrong = tf.IndexedSlices(tf.zeros([1, 3]), tf.constant([1], tf.int64))
    with pytest.raises(ValueError, match="has dimension 2"):
        getattr(table, how)(wrong)


@pytest.mark.parametrize("how", ["lookup", "assign", "update"])
def test_a_key_out_of_int32_is_refused(how):
    v = sok.DynamicVariable(2, key_type=tf.int32, name="narrow")
    keys = tf.constant([5, 2**31], tf.int64)
    with pytest.raises(ValueError, match="keys of table 'narrow' must fit int32.*: 2147483648"):
        if how == "lookup":
            tf.nn.embedding_lookup(v, keys)
        elif how == "update":
            sok.SGD(1.0).apply_gradients([(tf.IndexedSlices(tf.constant(ROWS), keys), v)])
        else:
            sok.assign(v, keys, ROWS)
    assert v.table.size == 0
