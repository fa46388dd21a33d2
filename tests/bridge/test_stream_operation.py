"""The operation of docs/internals/streams.md compiles against the headers of this TensorFlow."""

import re
import shutil
import subprocess

import pytest
import tensorflow as tf

from tests.support.doc_blocks import ROOT

PAGE = ROOT / "docs/internals/streams.md"


def source_of_page():
    (source,) = re.findall(r"```cpp\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return source


def compiled(source, folder):
    """Compiles it to an object file; returns this, and what the compiler said if it could not."""
    (folder / "op.cpp").write_text(source)
    flags = [*tf.sysconfig.get_compile_flags(), "-fPIC", "-O0", "-w", "-c"]
    command = ["g++", *flags, folder / "op.cpp", "-o", folder / "op.o"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return folder / "op.o", None if run.returncode == 0 else run.stderr


def test_the_page_has_one_operation_with_the_stream_and_without_cuda():
    source = source_of_page()
    assert "platform_specific_handle().stream" in source
    assert not re.search(r"#include.*cuda", source)


@pytest.mark.full_only("TensorFlow's headers take g++ half a minute")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_operation_compiles_and_wants_what_tensorflow_has(tmp_path):
    object_file, error = compiled(source_of_page(), tmp_path)
    assert error is None, error[-3000:]
    library = tmp_path / "op.so"
    link = ["g++", "-shared", object_file, "-o", library, *tf.sysconfig.get_link_flags()]
    subprocess.run([*link, "-Wl,--no-undefined"], check=True)
    found = tf.load_op_library(str(library))  # it has no kernel where there is no GPU
    assert "tensors" in found.sok_lite_stream_and_addresses.__doc__
