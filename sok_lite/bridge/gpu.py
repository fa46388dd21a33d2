"""The one GPU of this process, shared by TensorFlow and the tables.

CUDA numbers the GPUs of CUDA_VISIBLE_DEVICES in the order of CUDA_DEVICE_ORDER. Both libraries use
these numbers: CuPy's device n is TensorFlow's "/physical_device:GPU:n". TensorFlow's "GPU:0",
however, is the first of those that `tf.config.set_visible_devices` leaves.
"""

import tensorflow as tf

from sok_lite.backend import Backend, default_backend, get_backend
from sok_lite.engine.callers import warn

# Number of the GPU that `share_gpu` has prepared.
_shared: int | None = None


def share_gpu_of_rank() -> None:
    """Calls `share_gpu` for the default backend; does nothing without a GPU."""
    if default_backend() == "cuda":
        share_gpu(get_backend())


def share_gpu(backend: Backend) -> None:
    """Limits TensorFlow to the backend's GPU, with memory taken as needed.

    Otherwise TensorFlow takes nearly all memory of every GPU at its first operation and leaves none
    for tables. A second call does nothing. Warns if it is too late to limit the memory, or if
    TensorFlow does not see the GPU; raises RuntimeError if it uses another one for good.
    """
    global _shared
    if backend.name == "cpu":
        return
    check_stream(backend)
    if _shared == backend.device_id:
        return
    number = backend.device_id
    gpus = {_number(gpu): gpu for gpu in tf.config.list_physical_devices("GPU")}
    gpu = gpus.get(number)
    if gpu is None:
        warn(
            f"TensorFlow does not see GPU {number}, on which the tables are: it sees "
            f"{_names(tf.config.list_physical_devices('GPU'))}. Every row will be copied through "
            'the host. Install TensorFlow for GPUs (`pip install "sok_lite[gpu]"`), or keep the '
            "tables in RAM with SOK_LITE_BACKEND=cpu.",
        )
    else:
        _use_alone(gpu, number)
        _let_grow(gpu, number)
    _shared = number


# CUDA's numbers for its null stream and for the per-thread default stream.
_NULL_STREAM, _STREAM_OF_THREAD = 0, 2


def check_stream(backend: Backend) -> None:
    """Raises ValueError unless this thread launches on CUDA's null stream.

    TensorFlow calls from several threads, and a call may return before its kernels have run; only
    the null stream orders them all. CuPy's current stream belongs to a thread and may differ in the
    next call. TensorFlow keeps the type of a ValueError raised in a py_function.
    """
    stream = backend.xp.cuda.get_current_stream().ptr
    if stream == _NULL_STREAM:
        return
    came = f"the program's own, {stream:#x}. Make this call outside of its `with` block"
    if stream == _STREAM_OF_THREAD:
        came = (
            "one for each thread, by CUPY_CUDA_PER_THREAD_DEFAULT_STREAM. Start the program "
            "without that variable"
        )
    raise ValueError(
        "Tables on a GPU must be used by TensorFlow on CUDA's null stream, which has the calls of "
        f"all threads in order. Received: CuPy's current stream is {came}."
    )


def check_local_rank(local_rank: int) -> None:
    """Raises RuntimeError unless the tables are on the GPU of the local rank.

    The GPU is chosen before ranks communicate: that may go through TensorFlow, which starts GPUs.
    """
    if default_backend() != "cuda":
        return
    backend = get_backend()
    expected = local_rank % backend.num_devices
    if backend.device_id != expected:
        raise RuntimeError(
            f"This process is rank {local_rank} of its machine and has taken GPU "
            f"{backend.device_id} instead of {expected}: the launcher has set no variable that "
            f"says so. Start each rank with CUDA_VISIBLE_DEVICES of one GPU, or with "
            f"HOROVOD_LOCAL_RANK={local_rank} here."
        )


def device_name(backend: Backend) -> str | None:
    """Returns TensorFlow's name for the backend's GPU; None if TensorFlow does not use it."""
    visible = [_number(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    return f"GPU:{visible.index(backend.device_id)}" if backend.device_id in visible else None


def _use_alone(gpu: tf.config.PhysicalDevice, number: int) -> None:
    visible = tf.config.get_visible_devices("GPU")
    if gpu in visible:
        try:
            return tf.config.set_visible_devices([gpu], "GPU")
        except RuntimeError as error:  # it has started them
            if visible[0] == gpu:
                return  # its operations go to the first
            reason = f"it cannot be changed any more ({error})"
    else:
        reason = "tf.config.set_visible_devices was called"
    raise RuntimeError(
        f"TensorFlow uses {_names(visible)}, the tables of this process GPU {number}: {reason}. "
        "Call sok_lite.init() before TensorFlow's first operation and leave "
        "tf.config.set_visible_devices to it; CUDA_VISIBLE_DEVICES chooses another GPU for both."
    )


def _let_grow(gpu: tf.config.PhysicalDevice, number: int) -> None:
    try:
        tf.config.experimental.set_memory_growth(gpu, True)
    except ValueError:
        pass  # the program has divided it, and says how much TensorFlow may take
    except RuntimeError:
        warn(
            f"TensorFlow had started GPU {number} before sok_lite.init() and has taken nearly all "
            "of its memory: tables may find none. Call sok_lite.init() before TensorFlow's first "
            "operation, or tf.config.experimental.set_memory_growth before it.",
        )


def _number(gpu: tf.config.PhysicalDevice) -> int:
    return int(gpu.name.rsplit(":", 1)[1])


def _names(gpus: list[tf.config.PhysicalDevice]) -> str:
    return ", ".join(f"GPU {_number(gpu)}" for gpu in gpus) or "none"
