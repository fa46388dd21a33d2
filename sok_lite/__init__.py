"""Dynamic embeddings for TensorFlow: SparseOperationKit's names, on one GPU, many, or none.

The names below are imported on first use, so that `import sok_lite` works, and gives the engine
(`sok_lite.engine`, `sok_lite.comm`, `sok_lite.backend`), where there is no TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sok_lite._version import __version__

if TYPE_CHECKING:  # for type checkers and the completion of editors: the same names, in full
    from sok_lite import communication as communication
    from sok_lite import distributed_variable as distributed_variable
    from sok_lite import dump_load as dump_load
    from sok_lite import dynamic_embedding as dynamic_embedding
    from sok_lite import dynamic_variable as dynamic_variable
    from sok_lite import elastic as elastic
    from sok_lite import keras as keras
    from sok_lite import kv_variable as kv_variable
    from sok_lite import lookup as lookup
    from sok_lite import metrics as metrics
    from sok_lite import optimizer as optimizer
    from sok_lite import optimizers as optimizers
    from sok_lite import plots as plots
    from sok_lite import raw_ops as raw_ops
    from sok_lite import utils as utils
    from sok_lite.bridge.inference import inference_mode as inference_mode
    from sok_lite.bridge.named_states import optimizer_states as optimizer_states
    from sok_lite.bridge.profile import profile as profile
    from sok_lite.bridge.report import report as report
    from sok_lite.bridge.serving.function import export_serving as export_serving
    from sok_lite.bridge.serving.graph import export_serving_graph as export_serving_graph
    from sok_lite.communication import init as init
    from sok_lite.communication import set_comm_tool as set_comm_tool
    from sok_lite.engine.files.readonly import open_readonly as open_readonly
    from sok_lite.sok.dump_load import dump as dump
    from sok_lite.sok.dump_load import incremental_model_dump as incremental_model_dump
    from sok_lite.sok.dump_load import load as load
    from sok_lite.sok.dynamic_variable import DynamicVariable as DynamicVariable
    from sok_lite.sok.dynamic_variable import assign as assign
    from sok_lite.sok.dynamic_variable import export as export
    from sok_lite.sok.dynamic_variable import filter_variables as filter_variables
    from sok_lite.sok.lookup import all2all_dense_embedding as all2all_dense_embedding
    from sok_lite.sok.lookup import lookup_sparse as lookup_sparse
    from sok_lite.sok.lookup import sparse_read_and_evict as sparse_read_and_evict
    from sok_lite.sok.optimizer import OptimizerWrapper as OptimizerWrapper
    from sok_lite.sok.sgd import SGD as SGD
    from sok_lite.sok.static_variable import DistributedVariable as DistributedVariable
    from sok_lite.sok.static_variable import LocalizedVariable as LocalizedVariable
    from sok_lite.sok.static_variable import Variable as Variable
    from sok_lite.strings import hash_strings as hash_strings

    tf_version: list[int]

_MODULE_OF_NAME = {
    "DynamicVariable": "sok.dynamic_variable",
    "Variable": "sok.static_variable",
    "DistributedVariable": "sok.static_variable",
    "LocalizedVariable": "sok.static_variable",
    "dump": "sok.dump_load",
    "load": "sok.dump_load",
    "incremental_model_dump": "sok.dump_load",
    "assign": "sok.dynamic_variable",
    "export": "sok.dynamic_variable",
    "export_serving": "bridge.serving.function",
    "export_serving_graph": "bridge.serving.graph",
    "filter_variables": "sok.dynamic_variable",
    "inference_mode": "bridge.inference",
    "init": "communication",
    "set_comm_tool": "communication",
    "all2all_dense_embedding": "sok.lookup",
    "lookup_sparse": "sok.lookup",
    "sparse_read_and_evict": "sok.lookup",
    "OptimizerWrapper": "sok.optimizer",
    "optimizer_states": "bridge.named_states",
    "profile": "bridge.profile",
    "report": "bridge.report",
    "SGD": "sok.sgd",
}
# What needs no TensorFlow.
_WITHOUT_TENSORFLOW = {"hash_strings": "strings", "open_readonly": "engine.files.readonly"}
# Modules that programs reach as `sok.lookup` and the like, as in SparseOperationKit; and those with
# the names of TFRA, of TFPlus and of Keras.
_TENSORFLOW_MODULES = (
    "communication",
    "distributed_variable",
    "dump_load",
    "dynamic_embedding",
    "dynamic_variable",
    "elastic",
    "keras",
    "kv_variable",
    "lookup",
    "metrics",
    "optimizer",
    "optimizers",
    "raw_ops",
    "utils",
)
# One that needs none.
_PLAIN_MODULES = ("plots",)

# Names that were removed, and why: for one version.
_GONE = {
    "prefetch": "To send the keys of the next batch ahead gained less than a tenth of a step "
    "between machines. Give the ids to sok.lookup_sparse.",
}

__all__ = ["__version__", "communication", "tf_version", *_MODULE_OF_NAME, *_WITHOUT_TENSORFLOW]


def _tensorflow_module(name: str) -> Any:
    try:
        importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            f"This part of sok_lite needs TensorFlow, which cannot be imported ({error}). "
            'Install it with `pip install "sok_lite[cpu]"`, or `pip install "sok_lite[gpu]"` on a '
            "machine with an NVIDIA GPU. The engine (sok_lite.engine) works without it."
        ) from error
    return importlib.import_module(f"sok_lite.{name}")


def _tf_version() -> list[int]:
    version = importlib.import_module("tensorflow").__version__
    # "2.21.0-rc1" is [2, 21, 0]: only the leading digits of each part count.
    return [
        int("".join(digits)) for digits in map(_leading_digits, version.split(".")[:3]) if digits
    ]


def _leading_digits(text: str) -> str:
    end = next((i for i, letter in enumerate(text) if not letter.isdigit()), len(text))
    return text[:end]


def _imported(name: str) -> Any:
    if name in _MODULE_OF_NAME:
        value = getattr(_tensorflow_module(_MODULE_OF_NAME[name]), name)
    elif name in _WITHOUT_TENSORFLOW:
        module = importlib.import_module(f"sok_lite.{_WITHOUT_TENSORFLOW[name]}")
        value = getattr(module, name)
    elif name in _TENSORFLOW_MODULES:
        value = _tensorflow_module(name)
    elif name in _PLAIN_MODULES:
        value = importlib.import_module(f"sok_lite.{name}")
    elif name == "tf_version":
        _tensorflow_module("communication")
        value = _tf_version()
    elif name in _GONE:
        raise AttributeError(f"sok_lite.{name} is gone. {_GONE[name]}")
    else:
        raise AttributeError(f"module 'sok_lite' has no attribute {name!r}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # which would then take any name for one of this module
    __getattr__ = _imported


def __dir__() -> list[str]:
    return sorted({*__all__, *_TENSORFLOW_MODULES, *_PLAIN_MODULES})
