"""Host calls work in every kind of graph, in order, and nothing sends one away from a GPU."""

import ast
import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import sok_lite
from sok_lite.backend import get_backend
from sok_lite.bridge import tensor
from sok_lite.bridge.host_call import host_call, on_device
from tests.support.tripwire import Tripwire

CPU = get_backend("cpu")
PACKAGE = Path(sok_lite.__file__).parent


def test_a_profiler_of_tensorflow_shows_a_call_by_what_it_does(tmp_path):
    call = tf.function(
        lambda x: host_call(lambda x: (x,), [x], [tf.float32], CPU, "A test in 'user/id:0'")
    )
    call(tf.constant(1.0))
    with tf.profiler.experimental.Profile(str(tmp_path)):
        call(tf.constant(1.0))
    (written,) = tmp_path.rglob("*.xplane.pb")
    assert b"A_test_in_user_id_0_" in written.read_bytes()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError, tf.errors.InvalidArgumentError),
        (TypeError, tf.errors.InvalidArgumentError),
        (MemoryError, tf.errors.ResourceExhaustedError),
    ],
)
def test_the_text_of_an_error_survives_a_graph(error, kind):
    def fail(x):
        raise error("what was expected, what came, what to do")

    call = tf.function(lambda x: host_call(fail, [x], [tf.float32], CPU, "A call"))
    with pytest.raises(kind, match="what was expected, what came, what to do"):
        call(tf.constant(1.0))


def test_xla_is_refused_with_the_way_out():
    @tf.function(jit_compile=True)
    def call(x):
        return host_call(lambda x: (x,), [x], [tf.float32], CPU, "A call")[0]

    with pytest.raises(NotImplementedError, match="A call cannot be compiled by XLA.*jit_compile"):
        call(tf.constant(1.0))


def test_host_calls_run_in_program_order_also_within_inner_functions_branches_and_loops():
    log = []
    read = tf.Variable(0.0)

    def note(number, delay_s=0.0):
        read.read_value()  # as a lookup does; else TensorFlow orders all calls by itself

        def run():
            time.sleep(delay_s)  # time for a later call that does not wait to pass
            log.append(number)
            return ()

        host_call(run, [], [], CPU, "A note")

    inner = tf.function(lambda: note(1))
    late_inner = tf.function(lambda: note(3, 0.05))

    def body(i):
        note(5)
        return (i + 1,)

    @tf.function
    def outer(flag):
        note(0, 0.05)
        inner()
        note(2, 0.05)
        late_inner()
        tf.cond(flag, lambda: note(4, 0.05), lambda: None)
        tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])
        note(6)

    for _ in range(3):
        outer(tf.constant(True))
    assert log == [0, 1, 2, 3, 4, 5, 5, 6] * 3


class Watched:
    """A backend that notes when it is activated and waited for."""

    device_id = 99  # of no other test
    # CuPy's current stream is CUDA's null stream.
    xp = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0)))

    def __init__(self, name="cuda"):
        self.name, self.log = name, []

    def activate(self):
        self.log.append("activate")

    def synchronize(self):
        self.log.append("wait")


def test_a_call_of_eager_tensors_begins_on_the_device_and_ends_with_a_wait(mode):
    backend = Watched()

    @mode
    def call(x):
        def run(x):
            assert tf.executing_eagerly() and hasattr(x, "numpy")
            backend.log.append("run")
            return (x + x,)

        return host_call(run, [x], [tf.float32], backend, "A call")[0]

    np.testing.assert_array_equal(call(tf.constant([1.0, 2.0])), [2.0, 4.0])
    assert backend.log == ["activate", "run", "wait"]


@pytest.mark.parametrize(
    ("name", "waits", "log_of_success", "log_of_failure"),
    [
        ("cpu", True, [], []),
        ("cuda", True, ["activate", "wait"], ["activate", "wait"]),
        ("cuda", False, ["activate"], ["activate", "wait"]),  # it gives nothing of the device
    ],
)
def test_a_call_is_waited_for(name, waits, log_of_success, log_of_failure):
    backend = Watched(name)
    assert on_device(backend, int, "1", waits=waits) == 1
    assert backend.log == log_of_success
    backend.log.clear()
    with pytest.raises(ValueError, match="no"):
        on_device(backend, int, "no", waits=waits)
    assert backend.log == log_of_failure


def test_an_interrupt_does_not_end_the_wait():
    class Interrupted(Watched):
        def synchronize(self):
            super().synchronize()
            if self.log.count("wait") == 1:
                raise KeyboardInterrupt

    backend = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        on_device(backend, lambda: backend.log.append("run"))
    assert backend.log == ["activate", "run", "wait", "wait"]


def test_no_interrupt_leaves_memory_of_a_call_behind():
    whole = Tripwire(opcodes=True)
    backend = Watched()
    whole.run(lambda: on_device(backend, tensor._memory))
    assert whole.count > 30
    for at in range(1, whole.count + 1):
        with contextlib.suppress(KeyboardInterrupt):
            Tripwire(at, KeyboardInterrupt, opcodes=True).run(
                lambda: on_device(backend, tensor._memory)
            )
        with pytest.raises(RuntimeError, match="outside of `on_device`"):
            tensor._memory()


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_int32_arrives_as_it_was(mode, name):
    backend, seen = Watched(name), []

    @mode
    def call(x, y):
        def run(x, y):
            seen.append((x.dtype, y.dtype))
            return x - 1, tf.cast(y, tf.int32)

        return host_call(run, [x, y], [tf.int32, tf.int32], backend, "A call")

    x, y = call(tf.constant([[-5], [2**31 - 1]]), tf.constant(-(2**31), tf.int64))
    assert seen == [(tf.int32, tf.int64)]
    assert (x.dtype, y.dtype) == (tf.int32, tf.int32)
    np.testing.assert_array_equal(x, [[-6], [2**31 - 2]])
    assert int(y) == -(2**31)


def files_that_call(name):
    """Returns the names of the package's files that call a function."""
    found = set()
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if name in text else ():
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            if called == name:
                found.add(path.name)
    return found


def test_the_package_has_one_door_to_python():
    assert files_that_call("py_function") == {"host_call.py"}
    # What only raises, and never runs where all is well; and what looks at the first batch of a
    # training, without a table.
    of_numpy = {"row_gradient.py", "static_lookup.py", "data.py"}
    assert files_that_call("numpy_function") == of_numpy
    # Tables are reached by operations, but where there are texts.
    of_texts = {"texts.py", "file_system.py", "checkpoint.py", "saveable.py", "table_call.py"}
    assert files_that_call("host_call") | files_that_call("text_call") == of_texts


def test_without_a_gpu_for_tables_a_call_stays_on_the_host():
    @tf.function
    def call(x):
        return host_call(lambda x: (x,), [x], [tf.float32], CPU, "A call")[0]

    (operation,) = (
        operation
        for operation in call.get_concrete_function(tf.constant(1.0)).graph.get_operations()
        if operation.type == "EagerPyFunc"
    )
    assert operation.device.endswith("CPU:0")
