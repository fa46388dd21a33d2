"""The stream of an operation, as far as that can be tried without a GPU."""

import ctypes

import pytest
import tensorflow as tf

from sok_lite.backend import build
from sok_lite.native import stream
from sok_lite.native.callbacks import Call, operations
from tests.native.test_callbacks import OnHost, run


@pytest.mark.full_only("TensorFlow's headers take g++ many seconds")
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_an_operation_on_a_cpu_has_no_stream():
    stream_of = stream.load_stream_of()
    found = []

    def ask(frame):
        context_of = operations().library.sok_ops_context
        context_of.restype = ctypes.c_void_p
        context = context_of(ctypes.c_void_p(frame.address))
        found.append((context, stream_of(context)))
        frame.output(0, (0,), tf.float32.as_datatype_enum, OnHost)

    run(Call(ask, True))
    ((context, of_cpu),) = found
    assert context is not None
    assert of_cpu is None


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r"stream of TensorFlow's.*no C.. compiler"):
        stream.compile_stream_of()


def test_what_cannot_be_loaded_says_what_to_do(monkeypatch, tmp_path):
    broken = tmp_path / "libsok_lite_stream.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(stream, "compile_stream_of", lambda: broken)
    with pytest.raises(RuntimeError, match=r"libsok_lite_stream.so cannot be loaded.*Remove"):
        stream.load_stream_of.__wrapped__()
