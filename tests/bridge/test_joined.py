"""Tensors of several tables become one and come apart again, in graphs and without."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.backend import get_backend
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.joined import (
    ResultBuffer,
    as_int64,
    cut,
    cut_rows,
    from_int64,
    join,
    joined_rows,
    joined_tensor,
    joining,
    rows_of,
    shapes_of,
)
from sok_lite.bridge.tensor import to_tensor
from sok_lite.engine import segments

CPU = get_backend("cpu")
SHAPES = [(5, 3), (0, 7), (16, 1), (1, 16), (33, 20), (0, 16), (4, 4), (7, 64)]


def address(tensor):
    return np.asarray(tensor).ctypes.data


def numbered(shapes):
    """A different number in every element of arrays of these shapes."""
    starts = np.cumsum([0, *(rows * dim for rows, dim in shapes)])
    return [
        np.arange(start, start + rows * dim, dtype=np.float32).reshape(rows, dim)
        for start, (rows, dim) in zip(starts[:-1], shapes, strict=True)
    ]


def filled_room(shapes):
    buffer = ResultBuffer(CPU)
    arrays = buffer(shapes)
    whole = buffer.whole
    whole.fill(np.nan)  # between the results
    for array, values in zip(arrays, numbered(shapes), strict=True):
        array[...] = values
    return to_tensor(whole, tf.float32, CPU), arrays


@pytest.mark.parametrize("lengths_are", [np.array, tf.constant], ids=["known", "a tensor"])
@pytest.mark.parametrize("count", [1, 2, len(SHAPES)])
def test_results_in_one_room_come_apart(count, lengths_are, mode):
    for first in range(len(SHAPES) - count + 1):
        shapes = SHAPES[first : first + count]
        dims = [dim for _, dim in shapes]
        lengths = lengths_are(np.array([rows for rows, _ in shapes], np.int64))
        joined, _ = filled_room(shapes)
        results = mode(lambda j=joined, n=lengths, d=dims: cut_rows(j, n, d))()
        for result, values in zip(results, numbered(shapes), strict=True):
            np.testing.assert_array_equal(result, values)


@pytest.mark.parametrize(
    "shapes",
    [[(3, 16), (5, 32), (8, 4), (16, 3)], [(3, 16), (5, 16), (1, 16)], [(2, 48), (4, 48), (7, 48)]],
)
def test_whole_lines_are_cut_without_a_copy(shapes, mode):
    joined, arrays = filled_room(shapes)
    lengths = np.array([rows for rows, _ in shapes])
    for known in (lengths, tf.constant(lengths)):
        results = mode(lambda n=known: cut_rows(joined, n, [dim for _, dim in shapes]))()
        for result, array in zip(results, arrays, strict=True):
            assert address(result) == array.ctypes.data


@pytest.mark.parametrize("dim", [5, 16, 32])
def test_results_of_one_dimension_come_apart_empty_ones_too(dim, mode):
    shapes = [(0, dim), (5, dim), (0, dim), (1, dim), (0, dim)]
    joined, _ = filled_room(shapes)
    lengths = np.array([rows for rows, _ in shapes])
    for known in (lengths, tf.constant(lengths)):
        results = mode(lambda n=known: cut_rows(joined, n, [dim] * len(shapes)))()
        for result, values in zip(results, numbered(shapes), strict=True):
            np.testing.assert_array_equal(result, values)


def test_every_result_begins_on_a_line():
    _, arrays = filled_room(SHAPES)
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)


@pytest.mark.parametrize("signature", [None, [tf.TensorSpec([None]), tf.TensorSpec([None, None])]])
def test_shapes_are_told_whether_known_or_not(signature):
    tensors = [tf.zeros([5]), tf.zeros([0, 3])]
    found = tf.function(lambda *x: shapes_of(x), input_signature=signature)(*tensors)
    np.testing.assert_array_equal(found, [5, 0, 3])
    known = shapes_of(tensors)
    assert isinstance(known, np.ndarray)
    assert known.dtype == np.int64
    np.testing.assert_array_equal(known, [5, 0, 3])


def test_keys_are_joined_and_come_apart(mode):
    keys = [
        tf.constant([-1, 2**31 - 1], tf.int32),
        tf.constant([2**64 - 1, 2**63, 0], tf.uint64),
        tf.zeros([0], tf.int64),
        tf.constant([-(2**63), 2**63 - 1], tf.int64),
    ]
    joined = mode(lambda: join([as_int64(each) for each in keys]))()
    expected = [-1, 2**31 - 1, -1, -(2**63), 0, -(2**63), 2**63 - 1]
    np.testing.assert_array_equal(joined, expected)
    parts = mode(lambda: cut(joined, np.array([2, 3, 0, 2]), 4))()
    views = segments.cut(joined.numpy(), [2, 3, 0, 2])
    for part, view, original in zip(parts, views, keys, strict=True):
        np.testing.assert_array_equal(part, view)
        np.testing.assert_array_equal(from_int64(part, original.dtype), original)


def test_arrays_leave_as_one_tensor():
    for lengths in ([3], [2, 0, 5]):
        arrays = segments.cut(np.arange(sum(lengths)), lengths)
        whole = joined_tensor(arrays, tf.int64, CPU)
        np.testing.assert_array_equal(whole, np.arange(sum(lengths)))


def test_rows_cross_to_a_cpu_where_they_lie():
    tensors = [tf.constant(values) for values in numbered([(3, 4), (2, 5)])]
    arrays = rows_of(joined_rows(tensors, CPU), [], CPU)
    assert [array.ctypes.data for array in arrays] == [address(tensor) for tensor in tensors]


@pytest.mark.parametrize("count", [1, len(SHAPES)])
def test_rows_cross_to_a_gpu_as_one(play, count):
    backend, shapes = play.backend, SHAPES[:count]
    crossing = joined_rows([tf.constant(values) for values in numbered(shapes)], backend)
    assert len(crossing) == 1

    def back():
        return [backend.to_host(array) for array in rows_of(crossing, shapes, backend)]

    for array, values in zip(on_device(backend, back), numbered(shapes), strict=True):
        np.testing.assert_array_equal(array, values)


def test_rows_of_other_shapes_do_not_cross_to_a_gpu(play):
    backend = play.backend
    crossing = joined_rows([tf.zeros([2, 4]), tf.zeros([3, 1])], backend)
    for shapes in ([(4, 4), (3, 1)], [(2, 4), (2, 1)]):
        with pytest.raises(ValueError, match="numbers in all. Received: 11"):
            on_device(backend, rows_of, crossing, shapes, backend)


@pytest.mark.parametrize("count", [1, 3])
def test_arrays_leave_a_gpu_as_one_tensor(play, count):
    backend = play.backend

    def leave():
        arrays = [backend.from_host(np.arange(k, dtype=np.int64)) for k in (3, 0, 4)[:count]]
        return joined_tensor(arrays, tf.int64, backend)

    expected = np.concatenate([np.arange(k) for k in (3, 0, 4)[:count]])
    np.testing.assert_array_equal(on_device(backend, leave), expected)


# ---- where tensors are joined


def ops_of_ids(kind, dtype=tf.int64, place=None):
    """Returns type and device of the operations that work on all ids of a lookup in two tables."""
    tables = [sok.DynamicVariable(4, name=f"t{i}") for i in range(2)]

    def look_up(*ids):
        if place is not None:
            with tf.device(place):
                ids = [tf.identity(each) for each in ids]
        if kind == "ragged":
            splits = tf.constant([0, 1, 2], tf.int64)
            ids = [tf.RaggedTensor.from_row_splits(each, splits, validate=False) for each in ids]
        return sok.lookup_sparse(tables, ids, combiners="sum")

    specs = [tf.TensorSpec([None], dtype)] * 2
    graph = tf.function(look_up, input_signature=specs).get_concrete_function().graph
    kinds = ("ConcatV2", "ShapeN", "Cast")
    return {
        (op.type, op.device.rpartition("/device:")[2])
        for op in graph.get_operations()
        if op.type in kinds and op.outputs[0].dtype in (tf.int64, tf.int32)
    }


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_ids_are_joined_on_the_host_unless_the_program_has_them_elsewhere(kind):
    """Else TensorFlow copies those of each table to a GPU, for their lengths alone too."""
    assert ops_of_ids(kind) == {("ConcatV2", "CPU:0"), ("ShapeN", "CPU:0")}
    assert ("Cast", "CPU:0") in ops_of_ids(kind, tf.int32)
    there = ops_of_ids(kind, place="GPU:0")
    assert {("ConcatV2", "GPU:0"), ("ShapeN", "GPU:0")} <= there


def test_eager_tensors_are_joined_where_they_are():
    class On(NamedTuple):
        backing_device: str

    device = tf.config.list_logical_devices("CPU")[0].name
    for places, expected in (((device, device), device), ((device, "/device:GPU:0"), "CPU:0")):
        with joining([On(place) for place in places]):
            assert tf.constant(1).device.endswith(expected.rpartition("device:")[2])
