"""Operations call Python: its exceptions, its memory, and what becomes of a call nobody keeps."""

import contextlib
import functools
import gc
import weakref
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.native.callbacks import Call, operations
from tests.support.own_process import run_program
from tests.support.tripwire import Tripwire


@functools.cache
def variable():
    return tf.Variable(tf.zeros([0, 2]))


def run(call, *inputs, dtypes=(tf.float32,)):
    """Runs an operation of a call, with a variable that stands for a table's resource."""
    with tf.init_scope():
        handle = variable().handle
    given = {"inputs": inputs, "numbers": [], "Tout": list(dtypes), "J": 0}
    given |= {"Tkeys": [tf.int64], "dims": [2], "handles_of": [1], "trainable": [True], "names": []}
    return operations().module.sok_lookup(handles=[handle], call=call.number, **given).outputs


class OnHost:
    """What a call asks of a backend whose arrays are on the host."""

    name = "cpu"


def doubled(frame):
    (given,) = frame.inputs(OnHost)
    frame.output(0, given.shape, tf.float32.as_datatype_enum, OnHost)[...] = 2 * given


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize(
    "dtype",
    [tf.float32, tf.float64, tf.int32, tf.int64, tf.uint32, tf.uint64, tf.float16, tf.bfloat16],
    ids=lambda dtype: dtype.name,
)
def test_an_operation_gives_what_python_writes(shape, dtype):
    def copied(frame):
        (given,) = frame.inputs(OnHost)
        frame.output(0, given.shape, dtype.as_datatype_enum, OnHost)[...] = given

    values = tf.cast(np.random.default_rng(0).integers(0, 100, shape), dtype)
    (result,) = run(Call(copied, True), values, dtypes=[dtype])
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.numpy(), values.numpy())


def test_numbers_come_last_and_stay_on_the_host():
    """Where a table is on a GPU and the operation is not, inputs are copied to the GPU."""

    class Elsewhere:
        name = "cuda"
        copied: ClassVar = []

        @staticmethod
        def from_host(array):
            Elsewhere.copied.append(array.copy())
            return Elsewhere

    seen = []
    call = Call(lambda frame: seen.extend(frame.inputs(Elsewhere)), True)
    numbers = [tf.constant(7, tf.int64), tf.constant([1, 2], tf.int64)]
    given = {"inputs": [tf.constant([5.0])], "numbers": numbers, "Tout": [], "J": 0}
    given |= {"Tkeys": [], "dims": [], "handles_of": [], "trainable": [], "names": []}
    operations().module.sok_update(handles=[variable().handle], call=call.number, **given)
    first, *others = seen
    assert first is Elsewhere and len(Elsewhere.copied) == 1
    np.testing.assert_array_equal(Elsewhere.copied[0], [5])
    assert [type(each) for each in others] == [np.ndarray] * 2
    assert [each.tolist() for each in others] == [7, [1, 2]]


def test_memory_lives_as_long_as_its_arrays():
    kept = []

    def keep(frame):
        kept.extend(frame.inputs(OnHost))
        kept.append(frame.output(0, (1 << 16,), tf.float32.as_datatype_enum, OnHost))
        kept[-1][...] = 7

    run(Call(keep, True), tf.fill([1 << 16], 3.0))
    gc.collect()
    for number in range(50):  # what would be given the memory anew
        tf.fill([1 << 16], float(number)).numpy()
    np.testing.assert_array_equal(kept[0], np.full(1 << 16, 3, np.float32))
    np.testing.assert_array_equal(kept[1], np.full(1 << 16, 7, np.float32))


def test_a_frame_gives_no_output_after_its_operation():
    frames = []

    def keep(frame):
        frames.append(frame)
        doubled(frame)

    run(Call(keep, True), tf.constant([1.0]))
    with pytest.raises(RuntimeError, match="the operation has ended"):
        frames[0].output(0, (1,), tf.float32.as_datatype_enum, OnHost)


KINDS = {
    ValueError: tf.errors.InvalidArgumentError,
    TypeError: tf.errors.InvalidArgumentError,
    MemoryError: tf.errors.ResourceExhaustedError,
    NotImplementedError: tf.errors.UnimplementedError,
    StopIteration: tf.errors.OutOfRangeError,
    RuntimeError: tf.errors.UnknownError,
    KeyboardInterrupt: tf.errors.CancelledError,
}


class Silent(ValueError):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize("kind", [*KINDS, Silent])
def test_a_graph_fails_with_the_kind_and_the_text_of_an_exception(kind):
    """As `tf.py_function` has them, but for what that would let through."""

    def fail(frame):
        raise kind("what is \N{GREEK SMALL LETTER ALPHA} wrong")

    error, text = tf.errors.CancelledError, "interrupted"
    if kind is not Silent:
        error, text = KINDS[kind], f"{kind.__name__}: what is \N{GREEK SMALL LETTER ALPHA}"
    call = Call(fail, False)
    with pytest.raises(error, match=text):
        tf.function(lambda: run(call, tf.constant([1.0])))()


def test_an_output_that_nobody_wrote_is_an_error():
    with pytest.raises(tf.errors.InternalError, match="left out an output"):
        run(Call(lambda frame: None, True), tf.constant([1.0]))


def test_an_eager_lookup_raises_the_original():
    """With its traceback, and without TensorFlow's own beside it."""
    table = sok.DynamicVariable(2)
    original = MemoryError("no more")

    def fail(*_, **__):
        raise original

    table.table.lookup = fail
    with pytest.raises(MemoryError) as raised:
        tf.nn.embedding_lookup(table, [1])
    assert raised.value is original
    assert raised.traceback[-1].name == "fail"
    assert raised.value.__cause__ is None
    assert not isinstance(raised.value.__context__, tf.errors.OpError)


def test_an_interrupt_at_any_instruction_of_a_callback_reaches_the_caller():
    """Nothing is given for done: the rows are what they were, and the next lookup is right."""
    table = sok.DynamicVariable(2, initializer="ones")
    tf.nn.embedding_lookup(table, [1, 2])

    def work():
        return tf.nn.embedding_lookup(table, tf.constant([1, 2, 2], tf.int64))

    counted = Tripwire(opcodes=True)
    counted.run(work)
    step = max(1, counted.count // 400)
    for at in range(1, counted.count + 1, step):
        wire = Tripwire(at, KeyboardInterrupt, opcodes=True)
        with pytest.raises(KeyboardInterrupt):
            wire.run(work)
        assert wire.place is not None
    np.testing.assert_array_equal(work(), np.ones((3, 2)))
    assert table.table.size == 2


def test_an_error_that_was_caught_keeps_no_memory():
    table, frames = sok.DynamicVariable(2), []

    def fail(keys, **_):
        frames.append(weakref.ref(keys.base if keys.base is not None else keys))
        raise MemoryError

    table.table.lookup = fail
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(MemoryError):
            tf.nn.embedding_lookup(table, tf.range(100, dtype=tf.int64))
        assert [frame() for frame in frames] == [None]
    finally:
        gc.enable()


def test_a_call_that_nobody_keeps_says_so():
    call = Call(doubled, False)
    function = tf.function(lambda x: run(call, x)).get_concrete_function(tf.constant([1.0]))
    np.testing.assert_array_equal(function(tf.constant([1.0]))[0], [2])
    call = None
    gc.collect()
    text = r"(?s)another process.*Build the lookup anew"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        function(tf.constant([1.0]))


def test_a_graph_keeps_its_calls_and_they_go_with_it():
    from sok_lite.native import callbacks

    table = sok.DynamicVariable(2)
    tf.nn.embedding_lookup(table, [1])
    gc.collect()
    before = len(callbacks._calls)

    @tf.function
    def function(ids, flag):
        rows = tf.nn.embedding_lookup(table, ids)
        if flag:
            rows += tf.nn.embedding_lookup(table, ids + 1)
        for i in tf.range(2, 4, dtype=tf.int64):
            rows += tf.nn.embedding_lookup(table, ids + i)
        return rows

    function(tf.constant([1], tf.int64), tf.constant(True))
    gc.collect()
    assert len(callbacks._calls) > before
    for _ in range(20):  # eager calls leave nothing
        tf.nn.embedding_lookup(table, [1])
    assert not callbacks.raised
    function(tf.constant([1], tf.int64), tf.constant(True))
    del function
    gc.collect()
    assert len(callbacks._calls) == before


def test_an_asynchronous_eager_mode():
    """Python is called, and its exception raised, before the lookup returns."""
    tables = [sok.DynamicVariable(2, name) for name in ("ones", "zeros")]
    tf.config.experimental.set_synchronous_execution(False)
    try:
        rows = [tf.nn.embedding_lookup(tables[key % 2], [key]) for key in range(20)]
        with pytest.raises(ValueError, match="another type|int64|too large|fit"):
            tf.nn.embedding_lookup(tables[0], tf.constant([1 << 63], tf.uint64))
    finally:
        tf.config.experimental.set_synchronous_execution(True)
    np.testing.assert_array_equal(tf.concat(rows, 0), np.tile([[1, 1], [0, 0]], (10, 1)))
    assert [table.table.size for table in tables] == [10, 10]


def test_a_process_forks_and_ends_while_a_thread_looks_up():
    """What is made in it goes on in its child."""
    program = """
        import os, threading
        import tensorflow as tf, sok_lite as sok
        table = sok.DynamicVariable(2, initializer="ones")
        ids = tf.constant([1, 2], tf.int64)
        function = tf.function(lambda ids: tf.nn.embedding_lookup(table, ids))
        tf.nn.embedding_lookup(table, ids)
        child = os.fork()
        if child == 0:
            rows = tf.nn.embedding_lookup(table, ids).numpy()
            os._exit(0 if (rows == 1).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
        def ask():
            while True:
                function(ids)
        threading.Thread(target=ask, daemon=True).start()
        function(ids)
        print("done")
    """
    assert run_program(program) == "done\n"
