"""TensorFlow's CPU tensors play tensors of a GPU, and tables live on the simulated one.

Where TensorFlow has no GPU, nothing of it can be on one. But all that `sok_lite.bridge.tensor` asks
of a GPU tensor is whether it is one and where its memory is: here every eager tensor says yes, and
its memory counts as the GPU's for as long as Python has the tensor. Kernels read and write it when
their stream is waited for, and not before: a result that was not waited for is seen to be wrong,
and memory that was given back too early to be no memory of the device.

Native code launches too, on the simulated GPU's driver (simt/driver.py), unless a test asks for the
way by Python.

On demand TensorFlow has a stream of its own too, which CuPy's null stream does not wait for. On it
is what has written a tensor until a DLPack capsule of it is made, which waits for that stream, and
from the end of the call what TensorFlow does with the memory of all of the call's tensors: it may
read it, write it and give it out again. What nothing orders is a `Race`.
"""

import ctypes
import math
import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.bridge import gpu, host_call, tensor, variable
from sok_lite.native import callbacks, plans
from sok_lite.native import gpu as native_gpu
from tests.support.gpu_kernels import Watch
from tests.support.simt import device as simulated
from tests.support.simt import runtime, streams
from tests.support.simt.backend import simt_backend, simt_module, unavailable
from tests.support.simt.driver import Driver
from tests.support.simt.streams import lock

# Native code has their addresses, in plans of graphs that may outlive a test.
_of_plays = []


class Play:
    """What a test may change, and what it may look at.

    Attributes:
      backend: of the tables, on the simulated GPU.
      pointer: what CUDA says of the memory of every tensor: `device`, and `type` (1: the host's,
        2: the GPU's).
      num_allocations: tensors that TensorFlow was asked for to write results to.
      stream: TensorFlow's, or None where it has none of its own.
      has_room: whether TensorFlow has memory for a result of an operation.
      watch: what a real GPU would send to the host.
      driver: that native code launches with; None: Python launches.
    """

    def __init__(self, backend):
        self.backend = backend
        self.pointer = SimpleNamespace(device=0, type=2)
        self.num_allocations = 0
        self.stream = None
        self.has_room = lambda: True
        self.watch = Watch()
        self.driver = None

    def check(self):
        """Raises what calls of the driver have raised."""
        if self.driver is not None and self.driver.errors:
            raise self.driver.errors.pop(0)


def play_gpu(monkeypatch, device=0, streams=False, is_native=True):
    """Begins the play, on the last of `device + 1` simulated GPUs; returns a Play. With `streams`
    TensorFlow has a stream of its own."""
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
    known = Counter()  # by address, how many have that memory; changed by who has `lock`

    def keep(address):
        with lock:
            known[address] += 1
            return known[address] == 1  # whether nobody had it

    def forget(address):
        with lock:
            known[address] -= 1
            if known[address] == 0:
                runtime.remove_memory(address)

    class TensorMemory(cuda.UnownedMemory):
        def __init__(self, ptr, size, owner, device_id=-1):
            super().__init__(ptr, size, owner, device_id)
            is_of_frame = isinstance(owner[0], callbacks.Frame)
            with lock:
                is_new = keep(ptr)
                if play.stream is not None and not is_of_frame:
                    _take(play, self.content, is_new)
                runtime.add_memory(ptr, size, f"{size} bytes of a tensor")
            weakref.finalize(owner[0], forget, ptr)

    class FrameOnGpu(callbacks.Frame):
        """An operation's memory counts as the GPU's, as long as somebody has the frame.

        TensorFlow's stream writes the inputs before, and goes on with all of the memory after.
        """

        def __init__(self, address, capsule):
            play.check()
            super().__init__(address, capsule)
            self.is_on_gpu = True
            self.contents = []
            weakref.finalize(self, _go_on, play, self.contents, known)
            on_device = self._inputs[: len(self._inputs) - self._num_numbers]
            for its_address, dtype, shape in on_device:
                # What an operation has, TensorFlow does not write anew.
                with lock:
                    name = "TensorFlow's operation" if keep(its_address) else None
                    self._note(its_address, dtype, shape, name)
                weakref.finalize(self, forget, its_address)

        def _note(self, address, dtype, shape, name=None):
            num_bytes = math.prod(shape) * callbacks._DTYPES[dtype].itemsize
            if num_bytes and play.stream is not None:
                content = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), "u1")
                self.contents.append(content)
                _begin(play, content, name)

        def inputs(self, backend):
            if backend.name == "cpu":  # TensorFlow has put such an operation on the host
                self.is_on_gpu = False
            return super().inputs(backend)

        def allocate(self, first, shapes, dtypes, is_on_host=False):
            if is_on_host or not self.is_on_gpu:
                return super().allocate(first, shapes, dtypes, is_on_host)
            play.num_allocations += any(map(math.prod, shapes))
            if not play.has_room():
                raise MemoryError("OOM when allocating")
            addresses = super().allocate(first, shapes, dtypes)
            for address, dtype, shape in zip(addresses, dtypes, shapes, strict=True):
                num_bytes = math.prod(shape) * callbacks._DTYPES[dtype].itemsize
                with lock:
                    if num_bytes:
                        keep(address)
                        runtime.add_memory(address, num_bytes, f"{num_bytes} bytes of a result")
                        weakref.finalize(self, forget, address)
                    # Its stream may be at work in what it gives out again.
                    self._note(address, dtype, shape, "TensorFlow's earlier operation")
            return addresses

    def allocated(shape, dtype, backend):
        play.num_allocations += 1
        play.watch.eager("tensor.py", "Empty", {"dtype": [dtype]})
        return allocate(shape, dtype, backend)

    allocate = tensor._gpu_tensor
    monkeypatch.setattr(tensor, "_gpu_tensor", allocated)
    monkeypatch.setattr(cuda, "UnownedMemory", TensorMemory)
    monkeypatch.setattr(cuda.runtime, "pointerGetAttributes", lambda _: play.pointer)
    monkeypatch.setattr(tensor, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(tensor, "device_name", lambda _: "CPU:0")
    monkeypatch.setattr(callbacks, "Frame", FrameOnGpu)
    monkeypatch.setattr(gpu, "_shared", play.backend.device_id)
    monkeypatch.setattr(variable, "get_backend", lambda: play.backend)
    play.watch.begin(monkeypatch)
    if streams:
        _add_stream(monkeypatch, play)
    native_gpu.prepare(backend)  # of tables that the engine makes
    if is_native:
        play.driver = _driver(play, known, keep, forget)
    record = None if play.driver is None else play.driver.record
    of_play = {}, {}
    _of_plays.append((*of_play, play.driver))
    monkeypatch.setattr(native_gpu, "_records", of_play[0])
    monkeypatch.setattr(native_gpu, "_opened", {})
    monkeypatch.setattr(plans, "_drivers", of_play[1])
    monkeypatch.setattr(native_gpu, "open_gpu", lambda _: record)
    return play


def _driver(play, known, keep, forget):
    """Returns a driver by which operations have their memory as those that call Python.

    It calls with `lock`.
    """
    noted = {}  # by thread of the system: some are not Python's, which keeps nothing of them

    def note(address, num_bytes, is_input):
        if not num_bytes:
            return
        is_new = keep(address)
        runtime.add_memory(address, num_bytes, f"{num_bytes} bytes of an operation")
        content = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), "u1")
        noted.setdefault(threading.get_native_id(), []).append((address, content))
        if play.stream is not None:
            before = "TensorFlow's operation" if is_input else "TensorFlow's earlier operation"
            _begin(play, content, before if is_new or not is_input else None)

    def ended():
        of_operation = noted.pop(threading.get_native_id(), [])
        if play.stream is not None:
            its = Counter(address for address, _ in of_operation)
            _go_on(play, [content for _, content in of_operation], known - its)
        else:
            streams.run()
        for address, _ in of_operation:
            forget(address)

    return Driver(play.backend, lambda: play.stream or streams.NULL, note, ended)


def _add_stream(monkeypatch, play):
    play.stream = streams.new_queue("TensorFlow's stream")
    weakref.finalize(play, setattr, play.stream, "is_closed", True)
    keep = tensor.memory_of_call

    @contextmanager
    def memory_of_call(backend, left_behind=False):
        with keep(backend, left_behind) as memory:
            try:
                yield memory
            finally:
                if not memory.is_left:
                    _give_back(play, memory)

    def wait_for_all(backend, ended=None):
        left = [each for each in tensor._left_behind.get(backend.device_id, []) if each.is_left]
        wait(backend, ended)
        for memory in left:
            _give_back(play, memory)

    wait = tensor.wait_for_all
    monkeypatch.setattr(host_call, "memory_of_call", memory_of_call)
    for module in (host_call, tensor):
        monkeypatch.setattr(module, "wait_for_all", wait_for_all)


def _take(play, content, is_new):
    """A DLPack capsule is made of the memory `content`: `is_new` where it had none so far."""
    if is_new:
        streams.forget(content.ctypes.data, content.nbytes)
    of_call = vars(tensor._memory()).setdefault("contents", {})
    if content.ctypes.data not in of_call:
        of_call[content.ctypes.data] = content
        streams.put(play.stream, "TensorFlow's operation", _nothing, (content,))
    streams.wait(play.stream)


def _begin(play, content, name):
    """TensorFlow's stream has written memory, by work of a name; None: not since it was kept."""
    if name is not None:
        streams.forget(content.ctypes.data, content.nbytes)
        streams.put(play.stream, name, _nothing, (content,))


def _go_on(play, contents, others):
    """TensorFlow goes on with the memory of an operation that no other one has."""
    with lock:
        for content in contents:
            if others[content.ctypes.data]:
                continue
            streams.put(play.stream, "TensorFlow's next operation", _nothing, (content,))
        if contents:
            streams.run(play.stream.clock)


def _give_back(play, memory):
    """TensorFlow goes on, at the end of a call, with all memory that the call had."""
    for content in vars(memory).pop("contents", {}).values():
        streams.put(play.stream, "TensorFlow's next operation", _nothing, (content,))
    streams.run(play.stream.clock)


def _nothing():
    pass
