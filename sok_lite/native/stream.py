"""The CUDA stream of a TensorFlow operation, on which native code launches (gpu.py).

On a machine with a GPU a few lines of C++ are compiled against the headers of the installed
TensorFlow, because they depend on its version. Without a GPU only compiling, loading and the answer
for a CPU, no stream, can be tested.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from sok_lite.backend.build import compile_sources, target_of
from sok_lite.backend.sources import kernel_folder
from sok_lite.native.library import NEEDED

# -DNDEBUG: otherwise TensorFlow's headers have members that its libraries lack.
_FLAGS = ["-O1", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]


def compile_stream_of() -> Path:
    """Compiles it for the installed TensorFlow if needed and returns the path; or RuntimeError."""
    import tensorflow as tf

    flags = [*_FLAGS, *tf.sysconfig.get_compile_flags()]
    source = kernel_folder() / "ops" / "stream" / "stream_of.cpp"
    # A later version may be installed in the same place.
    target = target_of(f"libsok_lite_stream_{tf.__version__}", flags, [source])
    return compile_sources(target, flags, [source], "stream of TensorFlow's", needs=NEEDED)


@cache
def load_stream_of() -> Callable[[int], int | None]:
    """Returns a function that returns the CUDA stream of a running operation, or RuntimeError.

    It takes the address of the operation's TF_OpKernelContext, and returns None if the device has
    no stream, such as a CPU.
    """
    path = compile_stream_of()  # TensorFlow's libraries are loaded with it
    try:
        function = ctypes.CDLL(str(path)).sok_stream_of
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"TensorFlow's stream is not available: {path} cannot be loaded ({error}). "
            "Remove that file, so that it is compiled again."
        ) from error
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    return function
