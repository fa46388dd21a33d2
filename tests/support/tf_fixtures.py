"""Fixtures of rooms with TensorFlow: a job of one rank, and a function called at once or traced.

The conftest.py of such a room imports those that it takes.
"""

import importlib.util
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
# The modules import TensorFlow at their head; without it there is nothing to collect.
collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]


def pytest_report_header():
    return None if HAS_TENSORFLOW else "no TensorFlow: the tests that need it are left out"


@pytest.fixture
def initialised(monkeypatch):
    """As after `sok.init()` in a job of one rank."""
    from sok_lite.bridge import job
    from sok_lite.comm import SingleCommunicator

    monkeypatch.setattr(job, "_communicator", SingleCommunicator())


@pytest.fixture
def uninitialised(monkeypatch):
    """As before `sok.init()`."""
    from sok_lite.bridge import job

    monkeypatch.setattr(job, "_communicator", None)


@pytest.fixture
def two_launched(uninitialised, monkeypatch):
    """As before `sok.init()` in one of two ranks."""
    monkeypatch.setenv("HOROVOD_SIZE", "2")


def eagerly(function):
    return function


def traced(function):
    import tensorflow as tf

    return tf.function(function)


@pytest.fixture(params=[eagerly, traced], ids=["eager", "tf.function"])
def mode(request):
    """Calls a function at once, or traced."""
    return request.param


@pytest.fixture
def play(monkeypatch):
    """As on a machine with a GPU: see `gpu_play`.

    At the end it fails where values of a GPU would go to the host: see `gpu_kernels`.
    """
    from tests.support.gpu_play import play_gpu

    play = play_gpu(monkeypatch)
    yield play
    play.check()
    play.watch.check()


# All tests run with tables in RAM and on the simulated GPU, but these tests, and those of modules
# which choose for themselves, start processes of their own or look at no table.
_NOT_ON_GPU = {
    *("test_every_optimizer", "test_gpu", "test_host_call", "test_interrupts_tf"),
    *("test_on_gpu", "test_gpu_kernels", "test_tensor", "test_native_on_gpu"),
    *("test_collective_order", "test_autosave"),
    # The GPU is simulated by Python, whose garbage it is.
    "test_an_eager_lookup_leaves_nothing_for_the_garbage_collector",
    *("test_build", "test_elastic_state", "test_hash_strings", "test_init", "test_keras_guard"),
    *("test_cluster", "test_keras_data", "test_keras_input_wait"),
    *("test_initializer_spec_tf", "test_no_patches", "test_refusals"),
    *(
        "test_as_a_whole",
        "test_checks",
        "test_gradient_refusals",
        "test_saved_parts",
        "test_small_tables",
        "test_sok_document",
    ),
    *("test_sok_modules", "test_strategies", "test_tf_private", "test_without_v2"),
    # They read the tables of the engine as NumPy arrays.
    *("test_checkpoint", "test_patched_optimizers"),
    # Native code looks up on the CPU.
    *("test_native_lookup", "test_native_threads", "test_native_update", "test_native_write"),
    # What reshapes sparse ids, and fills empty rows, has no kernel of a GPU.
    "test_safe_lookups_of_a_higher_rank_and_of_no_ids",
    # Processes of their own, which put their tables into RAM.
    "test_a_program_that_only_loads_a_model_knows_it_by_its_name",
    "test_a_publisher_that_is_killed_leaves_what_was_there",
    # Its like runs with tables on a GPU too.
    "test_rows_move_as_dense_variables_do_whatever_is_set",
}


def pytest_generate_tests(metafunc):
    module = metafunc.module.__name__.rpartition(".")[2]
    if not {module, metafunc.function.__name__} & _NOT_ON_GPU:
        metafunc.parametrize("tables_on", ["cpu", "simt"], indirect=True)


@pytest.fixture(autouse=True)
def tables_on(request):
    """Puts tables on the simulated GPU where a test is to run there."""
    if getattr(request, "param", "cpu") == "simt":
        request.getfixturevalue("play")
