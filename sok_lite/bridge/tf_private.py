"""Every private name of TensorFlow and Keras that this package uses; a test probes each.

A new version may lack one. Then only the import of this module, or the test of the lists below,
fails and names it. Attributes of variables and optimizers stand where they are used; the test lists
them too.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# The tested versions, for errors; pyproject.toml requires the same.
SUPPORTED = "2.16 to 2.21"


def private(module: str, name: str) -> Any:
    """Returns a name of a private module of TensorFlow; raises ImportError if it is missing."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"sok_lite relies on {name} of {module}, which TensorFlow {tf.__version__} does not "
            f"have. Use TensorFlow {SUPPORTED}: those are tested."
        ) from error


def graphs_around() -> Iterator[Any]:
    """Yields the default graph and the graphs around it, the innermost first."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def kept_by(graph: Any, name: str, make: Callable[[], Any]) -> Any:
    """Returns an attribute of a graph, created at the first call; `vars` of a graph raises."""
    if not hasattr(graph, name):
        setattr(graph, name, make())
    return getattr(graph, name)


# ---- imported ------------------------------------------------------------------------------------

_VARIABLES = "tensorflow.python.ops.resource_variable_ops"
# The base class of a table, and its type for tf.function.
ResourceVariable: Any = private(_VARIABLES, "ResourceVariable")
VariableSpec: Any = private(_VARIABLES, "VariableSpec")
UninitializedVariable: Any = private(_VARIABLES, "UninitializedVariable")
# A variable in partitions.
PartitionedVariable: Any = private("tensorflow.python.ops.variables", "PartitionedVariable")
# Report the use of a variable to gradient tapes and other watchers.
tape_accessed: Any = private("tensorflow.python.pywrap_tfe", "TFE_Py_TapeVariableAccessed")
watcher_accessed: Any = private(
    "tensorflow.python.pywrap_tfe", "TFE_Py_VariableWatcherVariableAccessed"
)
# Whether a tape or a forward accumulator could be recording.
could_possibly_record: Any = private("tensorflow.python.eager.record", "could_possibly_record")
# Record an operation of unknown gradient on tapes, and hide operations from them.
record_operation: Any = private("tensorflow.python.eager.record", "record_operation")
stop_recording: Any = private("tensorflow.python.eager.record", "stop_recording")
# Whether a graph, or one around it, is compiled by XLA.
is_for_xla: Any = private("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext")
# The class of eager tensors.
EagerTensor: Any = private("tensorflow.python.framework.ops", "EagerTensor")
# The graph of a tf.function, a branch or a loop; `outer_graph` is the one around it.
FuncGraph: Any = private("tensorflow.python.framework.func_graph", "FuncGraph")
# A concrete function's placeholder for an argument that is a Python object.
UnknownArgument: Any = private("tensorflow.python.framework.func_graph", "UnknownArgument")
# The default graphs of each thread. `_GetGlobalDefaultGraph` returns the one outside of all that a
# program has entered.
default_graphs: Any = private("tensorflow.python.framework.ops", "_default_graph_stack")
GLOBAL_GRAPH = "_GetGlobalDefaultGraph"
# Makes every tf.function within trace anew: its arguments are part of a trace's key.
save_context: Any = private("tensorflow.python.saved_model.save_context", "save_context")
# Writes the fingerprint of a SavedModel from its files.
write_fingerprint: Any = private(
    "tensorflow.python.saved_model.fingerprinting_utils", "write_fingerprint"
)
# Dispatches a public function for types that TensorFlow does not know. (tf.experimental's public
# dispatch ignores plain classes.)
OpDispatcher: Any = private("tensorflow.python.util.dispatch", "OpDispatcher")
# TensorFlow's lookups of ragged ids, by the names of the functions of `tf.compat.v1.nn`.
RAGGED_LOOKUPS = "tensorflow.python.ops.ragged.ragged_embedding_ops"

# Interface of a TF1 saver to a table.
_SAVEABLES = "tensorflow.python.training.saving.saveable_object"
SaveableObject: Any = private(_SAVEABLES, "SaveableObject")
SaveSpec: Any = private(_SAVEABLES, "SaveSpec")
# Method of an object that is not a variable, and the name without an ending in the checkpoint.
GATHERS = "_gather_saveables_for_checkpoint"
WHOLE: Any = private("tensorflow.python.trackable.base", "VARIABLE_VALUE_KEY")
# Method of an object that a restore calls with a name in the checkpoint; newer versions first set
# the path of the checkpoint.
LOOKS_UP = "_lookup_dependency"
TELLS_PATH = "_checkpoint_adapter"

# How TensorFlow's generated functions run an operation eagerly, in C++, and its first argument.
execute: Any = private("tensorflow.python.pywrap_tfe", "TFE_Py_FastPathExecute")
context: Any = private("tensorflow.python.eager.context", "context")
# A `with` block in which eager operations run synchronously, by the constant below, or later.
execution_mode: Any = private("tensorflow.python.eager.context", "execution_mode")
# Runs eagerly, in a thread for which a program may have entered graphs.
eager_mode: Any = private("tensorflow.python.eager.context", "eager_mode")
SYNCHRONOUS: Any = private("tensorflow.python.eager.context", "SYNC")

# Attributes of the context: the cluster that TensorFlow is connected to, or None, by
# tf.config.experimental_connect_to_cluster or a strategy of several workers.
CLUSTER_OF_CONTEXT = ("_server_def", "_collective_ops_server_def")

# Converts a collection of a graph to a meta graph and back.
register_proto_function: Any = private("tensorflow.python.framework.ops", "register_proto_function")

# ---- known by name -------------------------------------------------------------------------------

_BRANCHES = "tensorflow.python.ops.control_flow_v2_func_graphs"
# (module, class) of the graphs of branches and loops, parts of a function.
BRANCHES_AND_LOOPS = (
    (_BRANCHES, "CondBranchFuncGraph"),
    (_BRANCHES, "WhileBodyFuncGraph"),
    (_BRANCHES, "WhileCondFuncGraph"),
)
# (module, class) of the graph of a loop's gradient.
GRADIENT_OF_A_LOOP = ("tensorflow.python.ops.while_v2", "_WhileBodyGradFuncGraph")
# (module, function) whose frame distinguishes a lookup in a list of variables.
LOOKUP_IN_A_LIST = ("tensorflow.python.ops.embedding_ops", "_embedding_lookup_and_transform")
# Method of a graph: the TF1 loop or branch being built.
CONTROL_FLOW = "_get_control_flow_context"
# Method of a graph: the operations that a new one would wait for.
CONTROL_INPUTS = "_current_control_dependencies"
# The module that reads every variable of a function as a dense tensor.
CUSTOM_GRADIENT = "tensorflow.python.ops.custom_gradient"
# The module of ForwardAccumulator, which differentiates gradients of operations.
FORWARDPROP = "tensorflow.python.eager.forwardprop"
# The module of a tf.function's gradient, which makes gradients dense only for a ForwardAccumulator;
# and the modules between it and our refusal.
GRADIENT_OF_A_FUNCTION = "tensorflow.python.eager.polymorphic_function.concrete_function"
CONVERSION = (
    "tensorflow.python.framework.tensor_conversion_registry",
    "tensorflow.python.framework.ops",
    "tensorflow.python.profiler.trace",
)
# The module that makes zeros for the gradient of an unconnected variable.
DEFAULT_GRADIENT = "tensorflow.python.ops.default_gradient"
# (module, name) called by tf.compat.v1.train.init_from_checkpoint with path and mapping.
_CHECKPOINT_UTILS = "tensorflow.python.training"
INIT_FROM_CHECKPOINT = (private(_CHECKPOINT_UTILS, "checkpoint_utils"), "_init_from_checkpoint")

# The module of the scatters of `tf.compat.v1`.
STATE_OPS = "tensorflow.python.ops.state_ops"

# The module that writes meta graphs.
META_GRAPH = "tensorflow.python.framework.meta_graph"

# The module of TF1 savers; two methods of BaseSaverBuilder that request the tensors of a variable,
# for save and restore, and their argument with the file name; the method that calls them, and its
# argument with what is saved.
SAVER = "tensorflow.python.training.saver"
SAVER_SAVES = "_AddSaveOps"
SAVER_RESTORES = "_AddRestoreOps"
SAVER_FILENAME = "filename_tensor"
SAVER_BUILDS = "_build_internal"
SAVER_NAMES = "names_to_saveables"

# Methods of tf.train.Checkpoint that a CheckpointManager calls, and its children.
CHECKPOINT = ("save", "write", "_write", "read", "restore")
CHILDREN = "_trackable_children"
# Method of a child: adds another one under the name by which it is saved.
TRACK = "_track_trackable"

# Of an eager tensor: its shape as a tuple of ints, in a tenth of the time of `shape`, and its dtype
# number.
SHAPE_OF_EAGER = "_shape_tuple"
DTYPE_OF_EAGER = "_datatype_enum"

# Of a dataset: its inputs. Of some datasets: the two seeds, the batch size, the tensors, and
# "false" if a map may be unordered.
INPUTS_OF_DATASET = "_inputs"
SEEDS_OF_DATASET = ("_seed", "_seed2")
BATCH_SIZE_OF_DATASET = "_batch_size"
ARRAYS_OF_DATASET = "_tensors"
ORDER_OF_DATASET = "_deterministic"
ANEW_OF_DATASET = "_reshuffle_each_iteration"

# Of a tf.function: the cache whose `values()` are its concrete functions.
FUNCTION_CACHE = "_function_cache"

# The modules that ask an optimizer for slots, to save or copy them.
SLOTS_OF_CHECKPOINTS = (
    "tensorflow.python.checkpoint.util",
    "tensorflow.python.checkpoint.async_checkpoint_helper",
)

# The graph, possibly with a number appended, in which each Keras builds a model from input shapes:
# all placeholders are float32 there.
SCRATCH_GRAPHS = {"keras": "scratch_graph", "tf_keras": "build_graph"}
# Attribute of a functional model with its inputs, in the structure of a call.
INPUTS_OF_MODELS = {"keras": "_inputs_struct", "tf_keras": "_nested_inputs"}

# The module of the class `Functional`.
FUNCTIONAL_MODELS = {
    "keras": "keras.src.models.functional",
    "tf_keras": "tf_keras.src.engine.functional",
}

# (module, name) called by tf.saved_model.save with object, path, signatures and options.
SAVED_MODELS = (private("tensorflow.python.saved_model", "save"), "save_and_return_nodes")
# The module whose `save_model` and `load_model` tf_keras calls for SavedModels.
SAVED_MODELS_OF_TF_KERAS = "tf_keras.src.saving.legacy.save"

# Of a built Keras optimizer: the index of each variable in lists of states, and the variable's key
# in there.
NUMBERS_OF_VARIABLES = {"keras": "_trainable_variables_indices", "tf_keras": "_index_dict"}
KEY_OF_A_VARIABLE = "_var_key"
