"""Every private name of TensorFlow and Keras that this package relies on: a test looks at each.

What TensorFlow does not promise may be gone in its next version. Then the import of this module
fails and names it, or the test does that goes through the lists below, and nothing else. Attributes
of variables and optimizers stand in the code that uses them; the test has lists of them too.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import tensorflow as tf

# What is tested, for error texts; pyproject.toml asks pip for the same.
SUPPORTED = "2.16 to 2.21"


def private(module: str, name: str) -> Any:
    """Returns what a private module of TensorFlow has under a name.

    Raises:
      ImportError: this TensorFlow has no such thing.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"sok_lite relies on {name} of {module}, which TensorFlow {tf.__version__} does not "
            f"have. Use TensorFlow {SUPPORTED}: those are tested."
        ) from error


def callers() -> Iterator[FrameType]:
    """Yields the frames of who called the function that calls this, the innermost first.

    Some calls of TensorFlow's and Keras' are told from others by nothing else.
    """
    return _outwards(sys._getframe(2))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def graphs_around() -> Iterator[Any]:
    """Yields the default graph and the graphs that it is in, the innermost first."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def kept_by(graph: Any, name: str, make: Callable[[], Any]) -> Any:
    """Returns what a graph keeps for this package under a name; it is made at the first call.

    `vars` of a graph raises: TensorFlow keeps its attributes elsewhere.
    """
    if not hasattr(graph, name):
        setattr(graph, name, make())
    return getattr(graph, name)


# ---- imported ------------------------------------------------------------------------------------

_VARIABLES = "tensorflow.python.ops.resource_variable_ops"
# What a table derives from, and the type by which tf.function knows it.
ResourceVariable: Any = private(_VARIABLES, "ResourceVariable")
VariableSpec: Any = private(_VARIABLES, "VariableSpec")
UninitializedVariable: Any = private(_VARIABLES, "UninitializedVariable")
# What TensorFlow makes of a variable in partitions.
PartitionedVariable: Any = private("tensorflow.python.ops.variables", "PartitionedVariable")
# Tell gradient tapes, and what else watches, that a variable is used.
tape_accessed: Any = private("tensorflow.python.pywrap_tfe", "TFE_Py_TapeVariableAccessed")
watcher_accessed: Any = private(
    "tensorflow.python.pywrap_tfe", "TFE_Py_VariableWatcherVariableAccessed"
)
# Whether a tape or a forward accumulator could be recording.
could_possibly_record: Any = private("tensorflow.python.eager.record", "could_possibly_record")
# Tells tapes of something whose gradient they do not know, and keeps things from them.
record_operation: Any = private("tensorflow.python.eager.record", "record_operation")
stop_recording: Any = private("tensorflow.python.eager.record", "stop_recording")
# Whether a graph, or one around it, is compiled by XLA.
is_for_xla: Any = private("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext")
# The class of eager tensors.
EagerTensor: Any = private("tensorflow.python.framework.ops", "EagerTensor")
# The graph of a tf.function, of a branch or of a loop. Its `outer_graph` is the one around it.
FuncGraph: Any = private("tensorflow.python.framework.func_graph", "FuncGraph")
# What a concrete function says of an argument that is an object of a program's.
UnknownArgument: Any = private("tensorflow.python.framework.func_graph", "UnknownArgument")
# The default graphs of each thread. `_GetGlobalDefaultGraph` gives the one outside of all that a
# program has entered.
default_graphs: Any = private("tensorflow.python.framework.ops", "_default_graph_stack")
GLOBAL_GRAPH = "_GetGlobalDefaultGraph"
# Has every tf.function within traced anew: its arguments are part of what a trace is known by.
save_context: Any = private("tensorflow.python.saved_model.save_context", "save_context")
# Writes what tells one SavedModel from another, of its files as they are.
write_fingerprint: Any = private(
    "tensorflow.python.saved_model.fingerprinting_utils", "write_fingerprint"
)
# Answers a public function for types that TensorFlow does not know. (tf.experimental's dispatch for
# types, which is public, is not asked for plain classes.)
OpDispatcher: Any = private("tensorflow.python.util.dispatch", "OpDispatcher")
# How TensorFlow's own lookups take ragged ids: names of functions of `tf.compat.v1.nn`, each of
# which has one for them.
RAGGED_LOOKUPS = "tensorflow.python.ops.ragged.ragged_embedding_ops"

# What a saver of TF1 asks a table for.
_SAVEABLES = "tensorflow.python.training.saving.saveable_object"
SaveableObject: Any = private(_SAVEABLES, "SaveableObject")
SaveSpec: Any = private(_SAVEABLES, "SaveSpec")
# What it asks an object for that is no variable, by the name that gets no ending in the checkpoint.
GATHERS = "_gather_saveables_for_checkpoint"
WHOLE: Any = private("tensorflow.python.trackable.base", "VARIABLE_VALUE_KEY")
# What a restore asks an object for by a name that the checkpoint has, and what newer versions tell
# it before that: the path of the checkpoint.
LOOKS_UP = "_lookup_dependency"
TELLS_PATH = "_checkpoint_adapter"

# How TensorFlow's generated functions call an operation eagerly, in C++, and what they give it.
execute: Any = private("tensorflow.python.pywrap_tfe", "TFE_Py_FastPathExecute")
context: Any = private("tensorflow.python.eager.context", "context")
# A `with` block in which eager operations run at once, or later: by this number at once.
execution_mode: Any = private("tensorflow.python.eager.context", "execution_mode")
# Runs eagerly, in a thread for which a program may have chosen graphs.
eager_mode: Any = private("tensorflow.python.eager.context", "eager_mode")
SYNCHRONOUS: Any = private("tensorflow.python.eager.context", "SYNC")

# Of the context, what tells the cluster that TensorFlow is connected to, None if it is not: by
# tf.config.experimental_connect_to_cluster, or by a strategy of several workers.
CLUSTER_OF_CONTEXT = ("_server_def", "_collective_ops_server_def")

# Of a collection of a graph, how it gets into a meta graph and out of one.
register_proto_function: Any = private("tensorflow.python.framework.ops", "register_proto_function")

# ---- known by name -------------------------------------------------------------------------------

_BRANCHES = "tensorflow.python.ops.control_flow_v2_func_graphs"
# (module, class) of the graphs of branches and loops, which are a part of a function.
BRANCHES_AND_LOOPS = (
    (_BRANCHES, "CondBranchFuncGraph"),
    (_BRANCHES, "WhileBodyFuncGraph"),
    (_BRANCHES, "WhileCondFuncGraph"),
)
# (module, class) of the graph of the way back through a loop.
GRADIENT_OF_A_LOOP = ("tensorflow.python.ops.while_v2", "_WhileBodyGradFuncGraph")
# (module, function) whose frame tells a lookup in a list of variables from one in a single one.
LOOKUP_IN_A_LIST = ("tensorflow.python.ops.embedding_ops", "_embedding_lookup_and_transform")
# Of a graph: tells whether a loop or branch of TF1 is being built.
CONTROL_FLOW = "_get_control_flow_context"
# Gives the operations that a new one would wait for.
CONTROL_INPUTS = "_current_control_dependencies"
# The module that reads every variable of a function as a dense tensor.
CUSTOM_GRADIENT = "tensorflow.python.ops.custom_gradient"
# The module of ForwardAccumulator, which derives the gradients of operations.
FORWARDPROP = "tensorflow.python.eager.forwardprop"
# The module of a tf.function's gradient: it makes gradients dense for a ForwardAccumulator alone.
# And those that are between it and who refuses that.
GRADIENT_OF_A_FUNCTION = "tensorflow.python.eager.polymorphic_function.concrete_function"
CONVERSION = (
    "tensorflow.python.framework.tensor_conversion_registry",
    "tensorflow.python.framework.ops",
    "tensorflow.python.profiler.trace",
)
# The module that makes zeros for the gradient of a variable that has none.
DEFAULT_GRADIENT = "tensorflow.python.ops.default_gradient"
# What tf.compat.v1.train.init_from_checkpoint calls, (module, name): with the path and the mapping.
_CHECKPOINT_UTILS = "tensorflow.python.training"
INIT_FROM_CHECKPOINT = (private(_CHECKPOINT_UTILS, "checkpoint_utils"), "_init_from_checkpoint")

# The module that has the scatters of `tf.compat.v1`.
STATE_OPS = "tensorflow.python.ops.state_ops"

# The module of savers of TF1, two methods of its BaseSaverBuilder that ask for the tensors of a
# variable, to save them and to restore them, and the argument of both that names the file; and the
# method that calls them, with its argument of what is saved.
SAVER = "tensorflow.python.training.saver"
SAVER_SAVES = "_AddSaveOps"
SAVER_RESTORES = "_AddRestoreOps"
SAVER_FILENAME = "filename_tensor"
SAVER_BUILDS = "_build_internal"
SAVER_NAMES = "names_to_saveables"

# Of tf.train.Checkpoint: what a CheckpointManager calls, and what a checkpoint holds.
CHECKPOINT = ("save", "write", "_write", "read", "restore")
CHILDREN = "_trackable_children"
# Of what it holds: takes another one, and the name that it is saved by.
TRACK = "_track_trackable"

# Of an eager tensor: give its shape as a tuple of ints, in a tenth of the time of `shape`, and the
# number of its type.
SHAPE_OF_EAGER = "_shape_tuple"
DTYPE_OF_EAGER = "_datatype_enum"

# Of a dataset: gives those that it is made of. Of some: the two seeds, how many elements a batch
# has, the tensors that it was made of, and "false" where a map may leave the order open.
INPUTS_OF_DATASET = "_inputs"
SEEDS_OF_DATASET = ("_seed", "_seed2")
BATCH_SIZE_OF_DATASET = "_batch_size"
ARRAYS_OF_DATASET = "_tensors"
ORDER_OF_DATASET = "_deterministic"
ANEW_OF_DATASET = "_reshuffle_each_iteration"

# Of a tf.function: the cache whose `values()` are the concrete ones that were made of it.
FUNCTION_CACHE = "_function_cache"

# The modules of it that ask an optimizer for the slots which they save or copy.
SLOTS_OF_CHECKPOINTS = (
    "tensorflow.python.checkpoint.util",
    "tensorflow.python.checkpoint.async_checkpoint_helper",
)

# The graph, of this name or with a number behind it, in which each Keras builds a model of input
# shapes alone: what stands for the inputs is float32 there, whatever they are.
SCRATCH_GRAPHS = {"keras": "scratch_graph", "tf_keras": "build_graph"}
# Where a functional model of each Keras keeps its inputs, in the structure that it is called with.
INPUTS_OF_MODELS = {"keras": "_inputs_struct", "tf_keras": "_nested_inputs"}

# The module of the class `Functional`, of which models of a graph are.
FUNCTIONAL_MODELS = {
    "keras": "keras.src.models.functional",
    "tf_keras": "tf_keras.src.engine.functional",
}

# What tf.saved_model.save calls, (module, name): with the object, the path, signatures and options.
SAVED_MODELS = (private("tensorflow.python.saved_model", "save"), "save_and_return_nodes")
# The module whose `save_model` and `load_model` tf_keras calls for SavedModels.
SAVED_MODELS_OF_TF_KERAS = "tf_keras.src.saving.legacy.save"

# Of an optimizer of Keras that is built: the number that each variable has in lists of states, and
# its key in there.
NUMBERS_OF_VARIABLES = {"keras": "_trainable_variables_indices", "tf_keras": "_index_dict"}
KEY_OF_A_VARIABLE = "_var_key"
