"""TensorFlow's CPU tensors play tensors of a GPU, and tables live on the simulated one.

Where TensorFlow has no GPU, nothing of it can be on one. But all that `sok_lite.bridge.tensor` asks
of a GPU tensor is whether it is one and where its memory is: here every eager tensor says yes, and
its memory counts as the GPU's for as long as Python has the tensor. Kernels read and write it when
their stream is waited for, and not before: a result that was not waited for is seen to be wrong,
and memory that was given back too early to be no memory of the device.
"""

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest

from sok_lite.bridge import gpu, tensor, variable


class Play:
    """What a test may change, and what it may look at.

    Attributes:
      backend: of the tables, on the simulated GPU.
      pointer: what CUDA says of the memory of every tensor: `device`, and `type` (1: the host's,
        2: the GPU's).
      num_allocations: tensors that TensorFlow was asked for to write results to.
    """

    def __init__(self, backend):
        self.backend = backend
        self.pointer = SimpleNamespace(device=0, type=2)
        self.num_allocations = 0


def play_gpu(monkeypatch, device=0):
    """Begins the play, on the last of `device + 1` simulated GPUs; returns a Play."""
    from tests.support.simt import device as simulated
    from tests.support.simt import runtime
    from tests.support.simt.backend import simt_backend, simt_module, unavailable

    if unavailable() is not None:
        pytest.skip(f"no simulated GPU: {unavailable()}")
    backend = simt_backend()
    # What the test makes the device of this thread is forgotten after it.
    monkeypatch.setattr(simulated._current, "device", 0, raising=False)
    if device:
        monkeypatch.setattr(simulated, "num_devices", device + 1)
        monkeypatch.setenv("HOROVOD_LOCAL_RANK", str(device))
        backend = simt_module().CudaBackend()
        simulated.use_device(0)  # of this thread
    play = Play(backend)
    play.pointer.device = device
    cuda = play.backend.xp.cuda
    known = Counter()

    def forget(address):
        known[address] -= 1
        if known[address] == 0:
            runtime.remove_memory(address)

    class TensorMemory(cuda.UnownedMemory):
        def __init__(self, ptr, size, owner, device_id=-1):
            super().__init__(ptr, size, owner, device_id)
            known[ptr] += 1
            runtime.add_memory(ptr, size, f"{size} bytes of a tensor")
            weakref.finalize(owner[0], forget, ptr)

    def allocated(*arguments):
        play.num_allocations += 1
        return allocate(*arguments)

    allocate = tensor._gpu_tensor
    monkeypatch.setattr(tensor, "_gpu_tensor", allocated)
    monkeypatch.setattr(cuda, "UnownedMemory", TensorMemory)
    monkeypatch.setattr(cuda.runtime, "pointerGetAttributes", lambda _: play.pointer)
    monkeypatch.setattr(tensor, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(tensor, "device_name", lambda _: "CPU:0")
    monkeypatch.setattr(gpu, "_shared", play.backend.device_id)
    monkeypatch.setattr(variable, "get_backend", lambda: play.backend)
    return play
