"""Each private name of TensorFlow and Keras that the package relies on, looked at one by one."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import tensorflow as tf

import sok_lite
from sok_lite import dynamic_embedding as de
from sok_lite.bridge import tf_private
from sok_lite.bridge.refusals import RefusesDense
from sok_lite.bridge.type_spec import TableSpec
from sok_lite.bridge.variable import TableVariable
from sok_lite.sok.dynamic_variable import DynamicVariable

PACKAGE = Path(sok_lite.__file__).parent
KERAS = [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]

# Methods of ResourceVariable and its bases that a table overrides: were they renamed, TensorFlow
# would act on the empty tensor that stands for the rows.
OVERRIDDEN = (
    "_variable_call",
    "_type_spec",
    "__tf_tracing_type__",
    "_serialize_to_tensors",
    "_restore_from_tensors",
    "_read_variable_op",
    "_lazy_read",
    "_dense_var_to_tensor",
    "_strided_slice_assign",
    "_copy_trackable_to_cpu",
    "_write_object_proto",
    "_export_to_saved_model_graph",
)
# The same of VariableSpec.
OVERRIDDEN_OF_SPEC = ("_from_components", "_serialize")

USED = "_handle _handle_name _in_graph_mode _graph_element _shared_name _unique_id _initializer_op"


def built_optimizer(package):
    optimizer = importlib.import_module(package).optimizers.Adam()
    optimizer.build([tf.Variable(1.0)])
    return optimizer


def functional_model(package):
    keras = importlib.import_module(package)
    inputs = {"a": keras.Input([1], name="a")}
    return keras.Model(inputs, keras.layers.Dense(1)(inputs["a"]))


# What has which names.
HAS = [
    *[
        (lambda module=module: importlib.import_module(module), [name])
        for module, name in (
            *tf_private.BRANCHES_AND_LOOPS,
            tf_private.GRADIENT_OF_A_LOOP,
            tf_private.LOOKUP_IN_A_LIST,
            (tf_private.STATE_OPS, "scatter_update"),
            (tf_private.DEFAULT_GRADIENT, "zeros_like"),
            (tf_private.FORWARDPROP, "_jvp_helper"),
            (tf_private.GRADIENT_OF_A_FUNCTION, "ConcreteFunction"),
        )
    ],
    *[
        (lambda module=module: importlib.import_module(module), [])
        for module in (*tf_private.CONVERSION, tf_private.CUSTOM_GRADIENT)
    ],
    (lambda: tf.Variable(1.0), USED.split()),
    (lambda: tf_private.ResourceVariable, OVERRIDDEN),
    (lambda: tf_private.VariableSpec, OVERRIDDEN_OF_SPEC),
    (tf.__internal__.tracking.Trackable, [tf_private.GATHERS]),
    (lambda: de.Variable, [tf_private.GATHERS]),
    (tf.train.Checkpoint, tf_private.CHECKPOINT),
    (tf.data.Dataset.random, tf_private.SEEDS_OF_DATASET),
    (
        lambda: tf.data.Dataset.range(3).shuffle(3),
        (*tf_private.SEEDS_OF_DATASET, tf_private.ANEW_OF_DATASET, tf_private.INPUTS_OF_DATASET),
    ),
    (lambda: tf.data.Dataset.range(3).batch(2), [tf_private.BATCH_SIZE_OF_DATASET]),
    (
        lambda: tf.data.Dataset.range(3).map(tf.identity, 2, deterministic=False),
        [tf_private.ORDER_OF_DATASET],
    ),
    (lambda: tf.data.Dataset.from_tensor_slices([3]), [tf_private.ARRAYS_OF_DATASET]),
    (lambda: tf.ones([2]), [tf_private.SHAPE_OF_EAGER, tf_private.DTYPE_OF_EAGER]),
    (tf_private.context, tf_private.CLUSTER_OF_CONTEXT),
    (lambda: tf_private.default_graphs, [tf_private.GLOBAL_GRAPH]),
    (tf.Graph, [tf_private.CONTROL_INPUTS]),
    (lambda: tf.function(abs), [tf_private.FUNCTION_CACHE]),
    *[
        (lambda package=package: functional_model(package), [tf_private.INPUTS_OF_MODELS[package]])
        for package in KERAS
    ],
    *[
        (
            lambda package=package: built_optimizer(package),
            [tf_private.NUMBERS_OF_VARIABLES[package], tf_private.KEY_OF_A_VARIABLE],
        )
        for package in KERAS
    ],
    (tf.Module, [tf_private.CHILDREN, tf_private.TRACK]),
]


def assert_has(owner, name):
    assert hasattr(owner, name), f"TensorFlow {tf.__version__}: {owner} has no {name}"


@pytest.mark.cases("number")
@pytest.mark.parametrize("number", range(len(HAS)))
def test_what_has_a_private_name(number):
    owner, names = HAS[number]
    for name in names:
        assert_has(owner(), name)


# (what has a function, its name, names of its parameters that must be there)
SAVER = importlib.import_module(tf_private.SAVER).BaseSaverBuilder
CALLED_WITH = [
    (SAVER, tf_private.SAVER_SAVES, [tf_private.SAVER_FILENAME]),
    (SAVER, tf_private.SAVER_RESTORES, [tf_private.SAVER_FILENAME]),
    (SAVER, tf_private.SAVER_BUILDS, [tf_private.SAVER_NAMES]),
    (*tf_private.SAVED_MODELS, ["obj", "export_dir", "signatures", "options"]),
    (tf.__internal__.tracking.Trackable, tf_private.LOOKS_UP, ["name", "cached_dependencies"]),
    (de.Variable, tf_private.LOOKS_UP, ["name", "cached_dependencies"]),
    (de.Variable, tf_private.TELLS_PATH, ["path"]),
]
if "tf_keras" in KERAS:
    module = importlib.import_module(tf_private.SAVED_MODELS_OF_TF_KERAS)
    CALLED_WITH += [(module, "save_model", ["model"]), (module, "load_model", ["filepath"])]


@pytest.mark.cases("number")
@pytest.mark.parametrize("number", range(len(CALLED_WITH)))
def test_what_is_called_with_which_arguments(number):
    owner, name, expected = CALLED_WITH[number]
    assert_has(owner, name)
    assert set(expected) <= inspect.signature(getattr(owner, name)).parameters.keys()


INIT_MODULE, INIT_NAME = tf_private.INIT_FROM_CHECKPOINT
# (a module, what its source must say: the package takes the place of what is called there)
CALLERS = [
    (INIT_MODULE, f"{INIT_NAME}("),
    (tf_private.SAVED_MODELS[0], f"{tf_private.SAVED_MODELS[1]}("),
    *[(importlib.import_module(name), ".get_slot(") for name in tf_private.SLOTS_OF_CHECKPOINTS],
]
if "tf_keras" in KERAS:
    module = importlib.import_module("tf_keras.src.saving.saving_api")
    CALLERS += [(module, f"legacy_sm_saving_lib.{name}(") for name in ("save_model", "load_model")]


@pytest.mark.parametrize("number", range(len(CALLERS)))
def test_what_is_replaced_is_what_tensorflow_calls(number):
    module, text = CALLERS[number]
    assert text in inspect.getsource(module)


@pytest.mark.parametrize(
    ("own", "base", "names"),
    [
        (TableVariable, tf_private.ResourceVariable, OVERRIDDEN),
        (TableSpec, tf_private.VariableSpec, OVERRIDDEN_OF_SPEC),
    ],
)
def test_methods_that_are_overridden(own, base, names):
    for name in names:
        assert getattr(own, name) is not getattr(base, name)


@pytest.mark.parametrize("cls", [RefusesDense, TableVariable, DynamicVariable, TableSpec])
def test_every_private_method_that_is_overridden_is_listed(cls):
    """An override of what TensorFlow has no more would be dead, and nobody would know."""
    base = tf_private.VariableSpec if cls is TableSpec else tf_private.ResourceVariable
    named = re.compile("_(?!abc_)[a-z].*|__tf_.*")  # not Python's own
    private = {name for name in vars(cls) if named.fullmatch(name) and hasattr(base, name)}
    assert private <= {*OVERRIDDEN, *OVERRIDDEN_OF_SPEC}


def sources():
    return sorted(path for part in ("bridge", "sok") for path in (PACKAGE / part).rglob("*.py")) + [
        PACKAGE / "communication.py"
    ]


def test_nobody_else_imports_a_private_module():
    for path in sources():
        if path.name == "tf_private.py":
            continue
        text = path.read_text()
        assert not re.search(r"(?:import|from) (?:tensorflow|keras|tf_keras)\.", text), path


def test_what_is_missing_is_named_with_the_version():
    with pytest.raises(ImportError, match=rf"no_such of os.*TensorFlow {tf.__version__} does not"):
        tf_private.private("os", "no_such")
    with pytest.raises(ImportError, match=r"x of tensorflow\.no_such_module.*2\.16 to 2\.21"):
        tf_private.private("tensorflow.no_such_module", "x")
