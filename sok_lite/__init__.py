"""Dynamic embeddings for TensorFlow: SparseOperationKit's names, on one GPU, many, or none.

Names are imported on first use, so that `import sok_lite` works, and gives the engine
(`sok_lite.engine`, `sok_lite.comm`, `sok_lite.backend`), where there is no TensorFlow.
"""

import importlib
import re
from typing import Any

from sok_lite._version import __version__

# What needs no TensorFlow.
_WITHOUT_TENSORFLOW = {"Report", "hash_strings", "metrics", "open_readonly", "plots", "rollback"}

# Names that were removed, and why: for one version.
_GONE = {
    "profile": "TensorFlow's profiler shows the whole step, with the calls of tables by name: "
    "tf.profiler.experimental.Profile(folder).",
    "prefetch": "To send the keys of the next batch ahead gained less than a tenth of a step "
    "between machines. Give the ids to sok.lookup_sparse.",
}
# Names of SOK 1, and what there is in place of each.
_OF_SOK_1 = {
    "Init": "sok.init()",
    "DistributedEmbedding": "sok.DynamicVariable and sok.lookup_sparse",
    "All2AllDenseEmbedding": "sok.DynamicVariable and sok.all2all_dense_embedding",
    "TFDistributedEmbedding": "sok.DynamicVariable and sok.lookup_sparse",
    "OptimizerScope": "sok.OptimizerWrapper(optimizer)",
    "Saver": "sok.dump and sok.load",
    "split_embedding_variable_from_others": "sok.filter_variables",
    "tf": "any optimizer of Keras in sok.OptimizerWrapper(optimizer)",
    "experiment": "sok_lite itself, which has its names",
}
# Modules of the package that are public names.
_MODULES = (
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
    "plots",
    "raw_ops",
    "utils",
)
# The module, below the package, that has each other public name.
_MODULE_OF = {
    "inference_mode": "bridge.inference",
    "optimizer_states": "bridge.optimizer_states",
    "report": "bridge.report",
    "export_serving": "bridge.serving.function",
    "export_serving_graph": "bridge.serving.graph",
    "publish": "bridge.serving.publish",
    "rollback": "engine.files.versions",
    "hash_strings": "bridge.strings",
    "open_readonly": "engine.files.readonly",
    "Report": "reports.report",
    "Autosave": "sok.autosave",
    "init": "sok.communication",
    "set_comm_tool": "sok.communication",
    "dump": "sok.dump_load",
    "incremental_model_dump": "sok.dump_load",
    "log_removals": "sok.dump_load",
    "load": "sok.dump_load",
    "DynamicVariable": "sok.dynamic_variable",
    "all2all_dense_embedding": "sok.lookup",
    "lookup_sparse": "sok.lookup",
    "sparse_read_and_evict": "sok.lookup",
    "OptimizerWrapper": "sok.optimizer",
    "SGD": "sok.optimizer",
    "DistributedVariable": "sok.static_variable",
    "LocalizedVariable": "sok.static_variable",
    "Variable": "sok.static_variable",
    "assign": "sok.table_functions",
    "export": "sok.table_functions",
    "filter_variables": "sok.table_functions",
}

__all__ = ["__version__", "communication", "tf_version", *_MODULE_OF]


def _tensorflow() -> Any:
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            f"This part of sok_lite needs TensorFlow, which cannot be imported ({error}). "
            'Install it with `pip install "sok_lite[cpu]"`, or `pip install "sok_lite[gpu]"` on a '
            "machine with an NVIDIA GPU. The engine (sok_lite.engine) works without it."
        ) from error


def _tf_version() -> list[int]:
    # "2.21.0-rc1" is [2, 21, 0]: only the leading digits of each part count.
    parts = _tensorflow().__version__.split(".")[:3]
    return [int(digits[0]) for part in parts if (digits := re.match(r"\d+", part))]


def __getattr__(name: str) -> Any:
    if name == "tf_version":
        value: Any = _tf_version()
    elif name in _MODULES or name in _MODULE_OF:
        if name not in _WITHOUT_TENSORFLOW:
            _tensorflow()
        module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, name)}")
        value = module if name in _MODULES else getattr(module, name)
    elif name in _GONE:
        raise AttributeError(f"sok_lite.{name} is gone. {_GONE[name]}")
    elif name in _OF_SOK_1:
        raise AttributeError(
            f"{name!r} is a name of SparseOperationKit 1, and sok_lite has those of version 2: use "
            f"{_OF_SOK_1[name]}."
        )
    else:
        raise AttributeError(f"module 'sok_lite' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
