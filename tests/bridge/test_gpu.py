"""TensorFlow and the tables share one GPU of the right number, and its memory.

No GPU is needed: `Config` plays the part of tf.config that knows GPUs, with TensorFlow's rules for
what may still be changed when. The last tests hold it against TensorFlow's own.
"""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import gpu, job, variable


class Config:
    """What TensorFlow has been told of its GPUs.

    Attributes:
      physical, visible: GPUs.
      growing: those that take memory as they need it.
      divided: those for which a program has set limits.
      has_started: whether TensorFlow has run an operation.
    """

    def __init__(self, numbers=(0, 1, 2, 3)):
        self.physical = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in numbers
        ]
        self.visible, self.growing, self.divided = list(self.physical), [], []
        self.has_started = False

    def list_physical_devices(self, kind):
        assert kind == "GPU"
        return list(self.physical)

    def get_visible_devices(self, kind):
        assert kind == "GPU"
        return list(self.visible)

    def set_visible_devices(self, devices, kind):
        assert kind == "GPU"
        if devices != self.visible:
            if self.has_started:
                raise RuntimeError("Visible devices cannot be modified after being initialized")
            self.visible = list(devices)

    def set_memory_growth(self, device, enable):
        assert enable
        if device in self.divided:
            raise ValueError("Cannot set memory growth on device when virtual devices configured")
        if device not in self.growing:
            if self.has_started:
                raise RuntimeError("Physical devices cannot be modified after being initialized")
            self.growing.append(device)


def backend_on(number, num_devices=4, stream=0):
    """A backend of a GPU, where CuPy's current stream has that number."""
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=stream))
    xp = SimpleNamespace(cuda=cuda)
    return SimpleNamespace(name="cuda", device_id=number, num_devices=num_devices, xp=xp)


@pytest.fixture
def config(monkeypatch):
    config = Config()
    for name in ("list_physical_devices", "get_visible_devices", "set_visible_devices"):
        monkeypatch.setattr(tf.config, name, getattr(config, name))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", config.set_memory_growth)
    monkeypatch.setattr(gpu, "_shared", None)
    return config


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.cases("before")
@pytest.mark.parametrize("before", ["nothing", "all of it", "limits", "a GPU that it leaves out"])
@pytest.mark.parametrize("number", [0, 2])
def test_tensorflow_gets_the_gpu_of_the_tables_alone(config, number, before):
    """A number is no place in a list: GPUs behind one that TensorFlow cannot use keep theirs."""
    mine = config.physical[number]
    if before == "all of it":
        config.visible = config.growing = [mine]
        config.has_started = True
    elif before == "limits":
        config.divided = [mine]
    elif before == "a GPU that it leaves out":
        del config.physical[1], config.visible[1]
    for _ in range(2):
        gpu.share_gpu(backend_on(number))
        assert config.visible == [mine]
        assert config.growing == ([] if before == "limits" else [mine])
        assert gpu.device_name(backend_on(number)) == "GPU:0"
        config.has_started = True


def test_too_late_for_the_memory_warns(config):
    config.has_started = True
    with pytest.warns(UserWarning, match=r"had started GPU 0 before sok_lite.init\(\).*nearly all"):
        gpu.share_gpu(backend_on(0))
    gpu.share_gpu(backend_on(0))  # once
    assert gpu.device_name(backend_on(0)) == "GPU:0"


def test_too_late_for_the_gpu_is_an_error(config):
    config.has_started = True
    with pytest.raises(RuntimeError, match="uses GPU 0, GPU 1, GPU 2, GPU 3, the.* GPU 2.*cannot"):
        gpu.share_gpu(backend_on(2))


def test_another_gpu_that_the_program_has_chosen_is_an_error(config):
    config.visible = [config.physical[1]]
    with pytest.raises(
        RuntimeError, match="uses GPU 1, the.* GPU 0: tf.config.set_visible.*sok_lite.i"
    ):
        gpu.share_gpu(backend_on(0))
    assert config.visible == [config.physical[1]]


def test_a_gpu_that_tensorflow_does_not_see_warns(config):
    config.physical, config.visible = [], []
    with pytest.warns(UserWarning, match="does not see GPU 0.*it sees none.*SOK_LITE_BACKEND=cpu"):
        gpu.share_gpu(backend_on(0))
    assert gpu.device_name(backend_on(0)) is None


def test_init_shares_the_gpu(config, monkeypatch, uninitialised):
    monkeypatch.setattr(gpu, "default_backend", lambda: "cuda")
    monkeypatch.setattr(gpu, "get_backend", lambda name=None: backend_on(0))
    sok.init("single")
    assert config.visible == config.growing == [config.physical[0]]


@pytest.mark.parametrize(
    ("stream", "text"),
    [(2, "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM. Start the program without"), (0x77, "outside of")],
)
def test_init_refuses_other_streams_than_the_null_stream(
    config, monkeypatch, uninitialised, stream, text
):
    monkeypatch.setattr(gpu, "default_backend", lambda: "cuda")
    monkeypatch.setattr(gpu, "get_backend", lambda name=None: backend_on(0, stream=stream))
    with pytest.raises(ValueError, match=f"CUDA's null stream.*Received.*{text}"):
        sok.init("single")
    assert config.visible == config.physical


def test_without_init_the_first_table_does_before_it_starts_tensorflow(config, monkeypatch, play):
    def start():
        config.has_started = True

    monkeypatch.setattr(gpu, "_shared", None)
    monkeypatch.setattr(variable, "make_turn", start)
    sok.DynamicVariable(3)
    assert config.visible == config.growing == [config.physical[0]]


def test_the_gpu_is_shared_before_ranks_can_talk(config, monkeypatch, uninitialised):
    """Horovod's collectives are TensorFlow's operations: they start its GPUs."""

    def make(tool):
        assert config.visible == [config.physical[1]]
        config.has_started = True
        return SimpleNamespace(rank=0, size=2, local_rank=1)

    monkeypatch.setattr(gpu, "default_backend", lambda: "cuda")
    monkeypatch.setattr(gpu, "get_backend", lambda name=None: backend_on(1))
    monkeypatch.setattr(job, "make_communicator", make)
    monkeypatch.setattr(job, "choose_transport", lambda *_: "")
    sok.init("horovod")


@pytest.mark.parametrize(
    ("local_rank", "number", "num_devices"), [(0, 0, 1), (3, 3, 4), (3, 0, 1), (5, 1, 4), (3, 0, 4)]
)
def test_a_rank_has_the_gpu_of_its_number(monkeypatch, local_rank, number, num_devices):
    monkeypatch.setattr(gpu, "default_backend", lambda: "cuda")
    monkeypatch.setattr(gpu, "get_backend", lambda name=None: backend_on(number, num_devices))
    refused = contextlib.nullcontext()
    if (number, num_devices) == (0, 4) and local_rank:  # the launcher does not say the number
        text = "rank 3 of its machine.*GPU 0 instead of 3.*CUDA_VIS"
        refused = pytest.raises(RuntimeError, match=text)
    with refused:
        gpu.check_local_rank(local_rank)


def test_ranks_that_asked_to_be_single_keep_their_gpus(config, monkeypatch, uninitialised):
    monkeypatch.setattr(gpu, "default_backend", lambda: "cuda")
    monkeypatch.setattr(gpu, "get_backend", lambda name=None: backend_on(3))
    sok.init("single")  # a launcher has started four
    assert config.visible == [config.physical[3]]


def test_nothing_is_asked_of_tensorflow_where_tables_are_in_ram(config, monkeypatch):
    monkeypatch.setattr(gpu, "default_backend", lambda: "cpu")
    gpu.share_gpu_of_rank()
    gpu.check_local_rank(7)
    gpu.share_gpu(sok.backend.get_backend("cpu"))
    assert config.visible == config.physical
    assert config.growing == []


def test_tensorflows_own_config_raises_what_the_play_raises():
    tf.constant(1.0)
    cpu = tf.config.list_physical_devices("CPU")
    tf.config.set_visible_devices(cpu, "CPU")  # as it is
    with pytest.raises(RuntimeError, match="cannot be modified after"):
        tf.config.set_visible_devices([], "CPU")
    with pytest.raises(ValueError, match="Cannot set memory growth on"):
        tf.config.experimental.set_memory_growth(cpu[0], True)
