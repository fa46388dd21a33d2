"""TensorFlow's side of the GPU path, on the simulated GPU: see `gpu_play`."""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite.backend import get_backend
from sok_lite.bridge import tensor
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.native import callbacks
from tests.support.call_counts import counts_of, on_launch
from tests.support.gpu_play import play_gpu
from tests.support.pooled import gather_rows
from tests.support.public_calls import EAGER_ONLY, IN_GRAPHS, Calls
from tests.support.simt import device


@pytest.fixture
def play(monkeypatch):
    """A play in which Python launches, but where a test says otherwise."""
    play = play_gpu(monkeypatch, is_native=False)
    yield play
    play.watch.check()


DTYPES = [tf.int32, tf.int64, tf.uint64, tf.float32, tf.float16, tf.bfloat16]


def numbers(shape, dtype):
    return tf.cast(tf.reshape(tf.range(int(np.prod(shape))) % 99, shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(33, 3), (7,), (), (0, 3)])
def test_a_result_is_written_where_tensorflow_has_it(play, dtype, shape):
    source, result = numbers(shape, dtype), {}

    def copy():
        array = to_array(source, play.backend)
        result["array"] = empty(shape, dtype, play.backend)
        result["array"][...] = array
        return to_tensor(result["array"], dtype, play.backend)

    target = on_device(play.backend, copy)
    assert target.dtype == dtype
    np.testing.assert_array_equal(target.numpy(), source.numpy())  # a scalar of bfloat16 too
    assert play.num_allocations == 1
    if target.shape.num_elements() and shape:
        assert np.asarray(target).ctypes.data == play.backend.address(result["array"])


@pytest.mark.parametrize(
    "part",
    [
        lambda array: array[:2],
        lambda array: array[2:],
        lambda array: array[:0],
        lambda array: array.transpose(),
        lambda array: array.reshape(16),
        lambda array: array.view(np.int32),
    ],
    ids=["head", "tail", "nothing", "transposed", "reshaped", "bits"],
)
def test_a_part_or_another_view_of_a_result_is_a_tensor_of_its_own(play, part):
    expected = np.arange(16, dtype=np.float32).reshape(4, 4)

    def run():
        whole = empty((4, 4), tf.float32, play.backend)
        whole[...] = play.backend.from_host(expected)
        array = part(whole)
        dtype = tf.as_dtype(array.dtype)
        return to_tensor(whole, tf.float32, play.backend), to_tensor(array, dtype, play.backend)

    whole, other = on_device(play.backend, run)
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(other, part(expected))


def test_what_the_backend_allocated_is_copied_and_a_call_ends_when_its_last_write_has(play):
    def run(x):
        array = play.backend.xp.arange(100)
        tensor = to_tensor(array, tf.int64, play.backend)
        array[...] = 0  # its memory may serve others from now on
        result = to_tensor(to_array(x, play.backend) + 1, tf.float32, play.backend)
        # Nothing has been waited for: else this test, and many more, could not fail.
        assert not np.array_equal(np.asarray(result), [2.0, 3.0])
        return tensor, result

    tensor, result = on_device(play.backend, run, tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(tensor, np.arange(100))
    np.testing.assert_array_equal(result, [2.0, 3.0])


def test_memory_is_kept_until_the_end_of_a_call(play):
    rows, order = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([2, 0, 2], np.int32)

    def run():
        gathered = empty((3, 2), tf.float32, play.backend)
        # TensorFlow gives memory out again as soon as nobody has the tensor.
        source = to_array(tf.constant(rows), play.backend)
        gathered[...] = gather_rows(
            play.backend, source, to_array(tf.constant(order), play.backend)
        )
        part = to_tensor(gathered[1:], tf.float32, play.backend)
        del source, gathered
        gc.collect()
        return part

    np.testing.assert_array_equal(on_device(play.backend, run), rows[order][1:])


def test_memory_is_not_kept_longer_and_that_of_another_gpu_is_refused(play):
    on_device(play.backend, lambda: empty((3,), tf.int64, play.backend))
    with pytest.raises(RuntimeError, match="outside of `on_device`"):
        to_array(tf.constant([1]), play.backend)
    play.pointer.device = 3
    text = "on GPU 3 and the tables of this process are on GPU 0. Call sok_lite.init"
    for call in ((to_array, tf.constant([1])), (empty, (2,), tf.int64)):
        with pytest.raises(ValueError, match=text):
            on_device(play.backend, *call, play.backend)


@pytest.mark.usefixtures("initialised")
def test_no_memory_for_a_result_is_a_memory_error(play, mode):
    table = sok.DynamicVariable(3)
    look_up = mode(lambda: tf.nn.embedding_lookup(table, tf.range(100)))
    look_up()
    play.has_room = lambda: False
    text = "no 1,200 bytes of GPU memory for a result.*OOM when allocating"
    with pytest.raises((MemoryError, tf.errors.ResourceExhaustedError), match=text):
        look_up()


@pytest.mark.usefixtures("initialised")
def test_tensorflow_gets_what_cupy_keeps(play, mode):
    pool = play.backend.xp.get_default_memory_pool()
    table = sok.DynamicVariable(3, "ones")
    look_up = mode(lambda: tf.nn.embedding_lookup(table, tf.range(100)))
    look_up()
    play.backend.xp.zeros(1 << 20)  # goes back to the pool
    assert pool.free_bytes() >= 1 << 20
    play.has_room = lambda: pool.free_bytes() < 1 << 20
    np.testing.assert_array_equal(look_up(), np.ones((100, 3)))


@pytest.mark.usefixtures("initialised")
def test_one_key_of_a_table_of_tfra_may_be_a_scalar(play, mode):
    table = de.get_variable("user", dim=3)
    table.upsert([5], [[1.0, 2.0, 3.0]])
    look_up = mode(lambda: table.lookup(tf.constant(5, tf.int64), return_exists=True))
    row, exists = look_up()
    assert row.numpy().tolist() == [1, 2, 3] and exists.numpy() == np.True_


@pytest.fixture
def trained(play, initialised):
    """Returns a table, and a step of it whose gradient nobody else has."""
    table = sok.DynamicVariable(3, "ones")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [5, 7, 5]) * 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))

    return table, step


def left_behind():
    return [memory for of_device in tensor._left_behind.values() for memory in of_device]


def test_an_update_returns_before_its_kernels_have_run(play, trained, mode):
    """What they read is TensorFlow's memory, and stays until something has waited."""
    table, step = trained
    run = mode(step)
    run(), run()
    waits = device.totals["waits"]
    (memory,) = left_behind()
    gc.collect()
    (frame,) = memory.arguments  # it owns the keys and the rows of the gradient
    assert memory.is_left and isinstance(frame, callbacks.Frame)
    assert device.totals["waits"] == waits
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [5, 7]), [[-7.0] * 3, [-3.0] * 3])
    assert not left_behind()


def test_updates_that_nothing_else_waits_for_keep_no_more_than_a_few(play, mode):
    """The kernels of a loop of them may lie far behind, and each has the gradients of a batch."""
    table = sok.DynamicVariable(3, "zeros")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    tf.nn.embedding_lookup(table, [5, 7])

    @mode
    def step(number):
        values = tf.fill([2, 3], tf.cast(number, tf.float32))
        gradient = tf.IndexedSlices(values, tf.constant([5, 7], tf.int64))
        optimizer.apply_gradients([(gradient, table)])

    kept, frames = [], []
    for number in range(20):
        step(tf.constant(number))
        kept.append(len(left_behind()))
        if number == 0:
            frames += [weakref.ref(*memory.arguments) for memory in left_behind()]
    assert max(kept) == 4 and kept[-1] <= 4
    gc.collect()
    assert [frame() for frame in frames] == [None]
    total = sum(range(20))
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [5, 7]), [[-total] * 3] * 2)
    assert not left_behind()


def test_tensorflow_gets_what_an_update_keeps_and_one_that_fails_waits(play, trained):
    table, step = trained
    step()
    assert left_behind()
    play.has_room = lambda: not left_behind()
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [7]), [[-1.0] * 3])
    gradient = tf.IndexedSlices(tf.fill([1, 3], np.nan), tf.constant([5], tf.int64))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0), on_nonfinite="error")
    with pytest.raises(ValueError, match="NaN"):
        optimizer.apply_gradients([(gradient, table)])
    assert not left_behind()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_memory_of_the_host_is_copied(play, dtype, monkeypatch):
    source = numbers((5, 3), dtype)

    def there_and_back():
        array = to_array(source, play.backend)
        assert play.backend.address(array) != np.asarray(source).ctypes.data
        result = empty((5, 3), dtype, play.backend)
        result[...] = array
        return to_tensor(result, dtype, play.backend)

    play.pointer.type = 1  # a tensor of the GPU by its name, as TensorFlow's int32 can be
    np.testing.assert_array_equal(on_device(play.backend, there_and_back), source)
    monkeypatch.setattr(tensor, "_is_on_gpu", lambda _: False)
    np.testing.assert_array_equal(on_device(play.backend, there_and_back), source)
    monkeypatch.setattr(tensor, "device_name", lambda _: None)  # TensorFlow has no GPU
    np.testing.assert_array_equal(on_device(play.backend, there_and_back), source)


def test_tables_in_ram_read_tensors_of_a_gpu(play):
    array = to_array(tf.constant([1, 2]), get_backend("cpu"))
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, [1, 2])


# ---------------------------------------------------------------- what a step asks of a GPU

# However many tables: our launches, operations of CuPy, memsets, waits of the host, and
# how often TensorFlow was asked for memory of results. An operation waits when it begins, when it
# has memory of results, and when it ends; the lookup and the gradient once more, for numbers.
MOST = {"lookup": (2, 1, 1, 4, 2), "step": (12, 2, 2, 9, 4)}
# Bytes for each table, and for all of them; numbers of which no array is made but on the host.
BYTES = {"lookup": ((0, 0), (96, 0)), "step": ((0, 16), (104, 8))}


def steps_of(num_tables, mode):
    tables = [sok.DynamicVariable(4, name=f"t{i}") for i in range(num_tables)]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())
    ids = [tf.constant(np.arange(6) % 4)] * num_tables

    def look_up():
        return sok.lookup_sparse(tables, ids, combiners="sum")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(rows) for rows in look_up()])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    return mode(look_up), mode(step)


@pytest.mark.usefixtures("initialised")
# A function is as many operations; one of 300 tables takes a quarter of a minute to trace.
@pytest.mark.parametrize(
    ("mode", "num_tables"),
    [(lambda call: call, 26), (lambda call: call, 300), (tf.function, 26)],
    ids=["eager-26", "eager-300", "tf.function-26"],
)
def test_what_is_asked_of_a_gpu_does_not_depend_on_the_number_of_tables(
    play, monkeypatch, mode, num_tables
):
    """But for launches of more tables than one takes, and numbers of each table."""
    kernels = []
    on_launch(play.backend, monkeypatch, kernels.append)
    look_up, step = steps_of(num_tables, mode)
    for _ in range(3):
        look_up()
        step()
    for name, call in {"lookup": look_up, "step": step}.items():
        kernels.clear()
        before = play.num_allocations
        counts = counts_of(play.backend, call)
        launches, *others = MOST[name]
        assert counts.launches <= launches + (num_tables > 200) * len(kernels)
        found = (*counts[1:4], play.num_allocations - before)
        assert all(a <= b for a, b in zip(found, others, strict=True)), (name, found)
        for count, (of_each, of_all) in zip(counts[4:], BYTES[name], strict=True):
            assert count <= num_tables * of_each + of_all, (name, counts)
        assert kernels.count("find") == 1  # a step's update looks for no key again


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize(("num_tables", "length"), [(1, 6), (26, None)])
def test_a_step_stops_three_times_for_our_kernels(play, monkeypatch, num_tables, length):
    """The lookup waits for what it has found, the gradient for how many keys there are and for its
    sums; the step waits for nothing. To wait for nothing takes 2 us."""
    launched, waits = [], []  # since the last wait; whether there was something
    wait, enqueue = device.wait, device.enqueue

    def enqueued(name, *arguments):
        if name not in ("free", "copy to the host"):
            launched.append(name)
        enqueue(name, *arguments)

    def waiting(*arguments):
        waits.append(bool(launched))
        launched.clear()
        wait(*arguments)

    monkeypatch.setattr(device, "wait", waiting)
    monkeypatch.setattr(device, "enqueue", enqueued)
    tables = [sok.DynamicVariable(4, name=f"t{i}") for i in range(num_tables)]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())
    ids = [tf.constant(np.arange(6) % 4)] * num_tables

    @tf.function(input_signature=[[tf.TensorSpec([length], tf.int64)] * num_tables])
    def step(ids):
        with tf.GradientTape() as tape:
            found = sok.lookup_sparse(tables, ids, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    for _ in range(3):
        step(ids)
    device.wait()
    waits.clear()
    step(ids)
    assert sum(waits) == 3


# ---------------------------------------------------------------- TensorFlow's stream and ours


REFUSED = (ValueError, tf.errors.InvalidArgumentError)
OF_THREADS = "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"


@pytest.mark.cases("call")
@pytest.mark.parametrize("stream", [OF_THREADS, "non-blocking", "blocking"])
@pytest.mark.parametrize("call", ["look up", "assign"])
def test_another_stream_is_refused_before_a_table_changes(play, mode, call, stream):
    """The next call may be of another thread, whose kernels would not wait for it."""
    table, keys = sok.DynamicVariable(4, "ones"), tf.constant([3], tf.int64)

    @mode
    def run():
        if call == "assign":
            sok.assign(table, keys, tf.ones([1, 4]))
        else:
            tf.nn.embedding_lookup(table, keys)

    text = "the program's own, 0x" if stream != OF_THREADS else f"{stream}. Start the program with"
    with pytest.MonkeyPatch.context() as patch:
        if stream == OF_THREADS:
            patch.setenv(stream, "1")
            with pytest.raises(ValueError, match=f"Received.*{OF_THREADS}"):
                sok.DynamicVariable(4)
        else:  # on all threads: TensorFlow may run a graph on another one
            current = play.backend.xp.cuda.Stream(non_blocking=stream == "non-blocking")
            patch.setattr(play.backend.xp.cuda, "get_current_stream", lambda: current)
        with pytest.raises(
            (ValueError, tf.errors.InvalidArgumentError), match=f"null stream.*{text}"
        ):
            run()
    assert len(table) == 0
    run()
    assert len(table) == 1


def results_of(calls, names, mode):
    return {name: tf.nest.flatten(mode(getattr(calls, name))()) for name in names}


@pytest.mark.full_only("traces every call twice")
@pytest.mark.usefixtures("initialised")
def test_every_call_works_on_the_second_gpu_from_any_thread(monkeypatch, mode, request):
    """A thread begins on GPU 0, where the simulated GPU refuses memory of GPU 1."""
    is_eager = request.node.callspec.id.startswith("eager")
    names = IN_GRAPHS + EAGER_ONLY * is_eager
    expected = results_of(Calls(), names, mode)
    play_gpu(monkeypatch, device=1)
    calls = Calls()
    results, errors = {}, []

    def run(name):
        try:
            results.update(results_of(calls, [name], mode))
        except Exception as error:
            errors.append((name, error))

    for name in names:
        thread = threading.Thread(target=run, args=[name])
        thread.start()
        thread.join()
    assert not errors
    for name in names:
        for mine, theirs in zip(results[name], expected[name], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
