"""SOK's modules under sok_lite, to be imported as such, and what else they have under its names."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import communication
from tests.support.own_process import run_with_tensorflow

MODULES = {
    "communication": ["CommToolBase", "HorovodTool", "rank", "alltoall"],
    "distributed_variable": ["Variable", "DistributedVariable", "LocalizedVariable"],
    "dump_load": ["dump", "load", "incremental_model_dump"],
    "dynamic_variable": ["DynamicVariable", "assign", "export"],
    "lookup": ["lookup_sparse", "sparse_read_and_evict", "group_lookup", "to_list", "isVariable"],
    "optimizer": ["OptimizerWrapper", "SGD"],
    "optimizers": ["GroupAdam", "GroupAMSGrad", "SparseGroupFtrl", "GroupLamb", "GroupMomentum"],
    "raw_ops": ["dummy_var_sparse_read", "dist_select", "lookup_backward"],
    "utils": ["SOK_IndexedSlices", "get_nano_time"],
}
OTHERS = {"dynamic_embedding": "Variable", "kv_variable": "KvVariable", "keras": "Embedding"}


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_sok_is_imported_by_name(name):
    module = importlib.import_module(f"sok_lite.{name}")
    assert getattr(sok, name) is module
    for member in MODULES[name]:
        assert member in module.__all__ and callable(getattr(module, member))
        assert getattr(module, member) is getattr(sok, member, getattr(module, member))


@pytest.mark.full_only("a process for each module")
@pytest.mark.parametrize("name", [*MODULES, "dynamic_embedding", "kv_variable", "keras"])
def test_a_module_is_imported_first_or_is_an_attribute(name, tmp_path):
    if name in MODULES:
        code = f"import sok_lite.{name} as m, sok_lite as sok; assert sok.{name} is m"
        run_with_tensorflow(f"{code}; sok.lookup_sparse", tmp_path)
    else:
        code = f"import sok_lite as sok; assert callable(getattr(sok, {name!r}).{OTHERS[name]})"
        run_with_tensorflow(f"{code}; assert {name!r} in dir(sok)", tmp_path)


def test_group_lookup_is_a_lookup_of_each(mode):
    ones, dense = sok.DynamicVariable(2, "ones"), tf.Variable([[1.0], [2.0], [3.0]])
    ids = [tf.constant([7, 7]), tf.constant([2, 0])]

    rows = mode(lambda: sok.lookup.group_lookup([ones, dense], ids))()
    np.testing.assert_array_equal(rows[0], np.ones((2, 2)))
    np.testing.assert_array_equal(rows[1], [[3.0], [1.0]])
    (half,) = sok.lookup.group_lookup(ones, [[8]], dtype=tf.float16, name="half")
    assert half.dtype == tf.float16 and half.shape == (1, 2)
    with pytest.raises(ValueError, match="2 params and 1 indices"):
        sok.lookup.group_lookup([ones, dense], ids[:1])


def test_each_variable_is_of_one_kind():
    kinds = sok.lookup.allSupportedVariableCheckFunc()
    table, dense = sok.DynamicVariable(2), tf.Variable(1.0)
    assert [kind.__name__ for kind in kinds if kind(table)] == ["isDynamicVariable"]
    assert [kind.__name__ for kind in kinds if kind(dense)] == ["isResourceVariable"]
    with tf.Graph().as_default():
        old = tf.compat.v1.Variable(1.0, use_resource=False)
    assert [kind.__name__ for kind in kinds if kind(old)] == ["isVariable"]
    assert not any(kind(1.0) for kind in kinds)
    assert table.indices is None
    assert sok.lookup.to_list(table) == [table] and sok.lookup.to_list((1, 2)) == (1, 2)


def test_utils_has_the_names_of_sok():
    assert sok.utils.SOK_IndexedSlices() is tf.IndexedSlices
    time = sok.utils.get_nano_time("1970-01-02 00:00:01")
    assert time == 86401 * 10**9 and isinstance(time, np.uint64)


def test_a_tool_answers_as_the_functions_do(initialised):
    tool = communication.HorovodTool()
    assert (tool.rank(), tool.num_ranks(), tool.local_rank(), tool.id_in_rank()) == (0, 1, 0, 0)
    assert (tool.num_gpu_per_rank(), tool.global_gpu_id(), tool.num_gpus()) == (1, 0, 1)
    x = tf.constant([1.0, 2.0])
    for got in (tool.alltoall(x, [2])[0], tool.allreduce(x, "sum"), tool.broadcast(x, 0)):
        np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(tool.allgather(x), x)
    base = communication.CommToolBase()
    for call in (base.rank, base.num_gpus, lambda: base.alltoall(x, [2])):
        with pytest.raises(NotImplementedError, match="Use sok.communication"):
            call()
