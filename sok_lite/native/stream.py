"""CUDA's stream on which TensorFlow runs an operation: native code launches on it (gpu.py).

Where a GPU is used, a few lines of C++ are compiled against the headers of the installed
TensorFlow, since they are of that version alone. Without a GPU it can be tried no further than that
it is compiled, is loaded, and says of a CPU that there is none.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from sok_lite.backend.build import compile_sources, target_of
from sok_lite.backend.sources import kernel_folder
from sok_lite.native.library import NEEDED

# -DNDEBUG: else TensorFlow's headers have members that its libraries have not.
_FLAGS = ["-O1", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]


def compile_stream_of() -> Path:
    """Compiles it for the installed TensorFlow, unless it is there, and returns its path.

    Raises:
      RuntimeError: it cannot be compiled: there is no compiler, or this TensorFlow is another than
        2.16 to 2.21.
    """
    import tensorflow as tf

    flags = [*_FLAGS, *tf.sysconfig.get_compile_flags()]
    source = kernel_folder() / "ops" / "stream" / "stream_of.cpp"
    # A later version may be installed in the same place.
    target = target_of(f"libsok_lite_stream_{tf.__version__}", flags, [source])
    return compile_sources(target, flags, [source], "stream of TensorFlow's", needs=NEEDED)


@cache
def load_stream_of() -> Callable[[int], int | None]:
    """Returns a function that gives CUDA's stream of a running operation, by its number.

    It takes the address of the operation's TF_OpKernelContext. It gives None where the device has
    no stream, as a CPU.

    Raises:
      RuntimeError: as `compile_stream_of`, or it cannot be loaded.
    """
    path = compile_stream_of()  # TensorFlow's libraries are loaded with it
    try:
        function = ctypes.CDLL(str(path)).sok_stream_of
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"The stream of TensorFlow's cannot be asked for: {path} cannot be loaded ({error}). "
            "Remove that file, so that it is compiled again."
        ) from error
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    return function
