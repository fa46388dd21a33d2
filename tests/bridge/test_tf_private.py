"""Each private name of TensorFlow and Keras that the package relies on, looked at one by one."""

import ast
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

# Where optimizers keep their settings, by family and class.
KERAS_OPTIMIZERS = ("_learning_rate", "_use_weight_decay")  # of Keras 3 and of tf_keras
LEGACY_OPTIMIZERS = """
    Optimizer _create_hypers _hyper _initial_decay _slots _slot_names _create_all_weights
    SGD _momentum
    Adagrad _initial_accumulator_value
    RMSprop _momentum
    Ftrl _initial_accumulator_value _l2_shrinkage_regularization_strength
    Nadam _initial_decay
"""
_L1_AND_L2 = "_l1_regularization_strength _l2_regularization_strength"
V1_OPTIMIZERS = f"""
    GradientDescentOptimizer _learning_rate _slots _create_slots _use_locking
    MomentumOptimizer _learning_rate _momentum _use_nesterov
    AdamOptimizer _lr _beta1 _beta2 _epsilon
    AdagradOptimizer _learning_rate _initial_accumulator_value
    RMSPropOptimizer _learning_rate _decay _momentum _epsilon _centered
    FtrlOptimizer _learning_rate _learning_rate_power _initial_accumulator_value {_L1_AND_L2} \
        _l2_shrinkage_regularization_strength _beta
    AdadeltaOptimizer _lr _rho _epsilon
    ProximalGradientDescentOptimizer _learning_rate {_L1_AND_L2}
    ProximalAdagradOptimizer _learning_rate _initial_accumulator_value {_L1_AND_L2}
    AdagradDAOptimizer _learning_rate _initial_gradient_squared_accumulator_value {_L1_AND_L2} \
        _global_step
"""
LEGACY_OPTIMIZERS, V1_OPTIMIZERS = (
    {line.split()[0]: line.split()[1:] for line in text.strip().splitlines()}
    for text in (LEGACY_OPTIMIZERS, V1_OPTIMIZERS)
)
USED = "_handle _handle_name _in_graph_mode _graph_element _shared_name _unique_id _initializer_op"
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
        for module in tf_private.CONVERSION
    ],
    (lambda: tf.Variable(1.0), USED.split()),
    (lambda: tf_private.ResourceVariable, OVERRIDDEN),
    (lambda: tf_private.VariableSpec, OVERRIDDEN_OF_SPEC),
    (tf.__internal__.tracking.Trackable, [tf_private.GATHERS]),
    (lambda: de.Variable, [tf_private.GATHERS]),
    (tf.train.Checkpoint, tf_private.CHECKPOINT),
    (tf.Module, [tf_private.CHILDREN, tf_private.TRACK]),
    *[(importlib.import_module(package).optimizers.Adam, KERAS_OPTIMIZERS) for package in KERAS],
]


def assert_has(owner, name):
    assert hasattr(owner, name), f"TensorFlow {tf.__version__}: {owner} has no {name}"


@pytest.mark.parametrize("number", range(len(HAS)))
def test_what_has_a_private_name(number):
    owner, names = HAS[number]
    for name in names:
        assert_has(owner(), name)


def test_the_module_that_reads_variables_as_tensors_is_there():
    assert importlib.import_module(tf_private.CUSTOM_GRADIENT).__name__ == (
        inspect.getmodule(tf.custom_gradient.__wrapped__).__name__
        if hasattr(tf.custom_gradient, "__wrapped__")
        else tf_private.CUSTOM_GRADIENT
    )


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (tf_private.SAVER_SAVES, tf_private.SAVER_FILENAME),
        (tf_private.SAVER_RESTORES, tf_private.SAVER_FILENAME),
        (tf_private.SAVER_BUILDS, tf_private.SAVER_NAMES),
    ],
)
def test_methods_of_savers_that_are_known_by_their_frames(name, argument):
    builder = importlib.import_module(tf_private.SAVER).BaseSaverBuilder
    assert_has(builder, name)
    assert argument in inspect.signature(getattr(builder, name)).parameters


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


def test_the_shape_and_the_type_of_an_eager_tensor():
    tensor = tf.ones([0, 2, 3], tf.uint64)
    assert type(tensor) is tf_private.EagerTensor
    assert getattr(tensor, tf_private.SHAPE_OF_EAGER)() == (0, 2, 3)
    assert getattr(tensor, tf_private.DTYPE_OF_EAGER)() == tf.uint64.as_datatype_enum


@pytest.mark.parametrize("name", tf_private.CLUSTER_OF_CONTEXT)
def test_the_context_knows_the_cluster(name):
    assert getattr(tf_private.context(), name) is None


def test_what_datasets_are_made_of():
    def only(dataset):
        (found,) = getattr(dataset, tf_private.INPUTS_OF_DATASET)()
        return found

    rows = tf.data.Dataset.from_tensor_slices([3, 4, 5])
    mapped = rows.shuffle(3, seed=7).batch(2).map(tf.identity, 2, deterministic=False)
    batched = only(mapped)
    shuffled = only(batched)
    assert getattr(mapped, tf_private.ORDER_OF_DATASET) == "false"
    assert getattr(batched, tf_private.BATCH_SIZE_OF_DATASET) == 2
    assert getattr(shuffled, tf_private.SEEDS_OF_DATASET[1]) == 7
    assert [list(each) for each in getattr(only(shuffled), tf_private.ARRAYS_OF_DATASET)] == [
        [3, 4, 5]
    ]
    assert getattr(only(shuffled), tf_private.INPUTS_OF_DATASET)() == []
    for is_anew in (True, False):
        once = rows.shuffle(3, reshuffle_each_iteration=is_anew)
        assert getattr(once, tf_private.ANEW_OF_DATASET) is is_anew
    assert getattr(shuffled, tf_private.ANEW_OF_DATASET) is True
    with tf.Graph().as_default():  # eager mode may have a seed for all
        without = tf.data.Dataset.from_tensor_slices([3, 4, 5]).shuffle(3)
        for name in tf_private.SEEDS_OF_DATASET:
            assert tf.get_static_value(getattr(without, name)) == 0
    for name in tf_private.SEEDS_OF_DATASET:
        assert_has(tf.data.Dataset.random(), name)


def test_the_global_default_graph():
    graph = getattr(tf_private.default_graphs, tf_private.GLOBAL_GRAPH)
    assert graph() is graph() is tf.compat.v1.get_default_graph()
    with tf.Graph().as_default() as entered:
        assert graph() is not entered


def test_what_a_restore_asks_an_object_for():
    own = tf.__internal__.tracking.Trackable()
    for method, arguments in (
        (tf_private.LOOKS_UP, ["name", "cached_dependencies"]),
        (tf_private.TELLS_PATH, ["path"]),
    ):
        assert_has(de.Variable, method)
        if method != tf_private.TELLS_PATH or hasattr(own, method):  # newer versions have it
            assert list(inspect.signature(getattr(own, method)).parameters) == arguments


@pytest.mark.parametrize("package", KERAS)
def test_inputs_of_a_functional_model(package):
    keras = importlib.import_module(package)
    inputs = {"a": keras.Input([1], name="a")}
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["a"]))
    assert set(getattr(model, tf_private.INPUTS_OF_MODELS[package])) == {"a"}


@pytest.mark.parametrize("package", KERAS)
def test_the_graph_in_which_a_model_is_built_by_its_shapes(package):
    keras, seen = importlib.import_module(package), []

    class Model(keras.Model):
        def call(self, inputs):
            seen.append((tf.compat.v1.get_default_graph().name, inputs.dtype))
            return inputs

    model = Model()
    if package == "keras":
        model.build_from_config({"input_shape": (None, 2)})
    else:
        model.build((None, 2))
    name, dtype = seen[0]
    assert name.startswith(tf_private.SCRATCH_GRAPHS[package])
    assert dtype == tf.float32


def test_what_restores_initial_values():
    module, name = tf_private.INIT_FROM_CHECKPOINT
    assert len(inspect.signature(getattr(module, name)).parameters) == 2
    assert f"{name}(" in inspect.getsource(module.init_from_checkpoint)


def test_what_an_operation_of_a_graph_would_wait_for():
    with tf.Graph().as_default() as graph:
        first = tf.no_op()
        with tf.control_dependencies([first]):
            assert getattr(graph, tf_private.CONTROL_INPUTS)() == {first}
        assert not getattr(graph, tf_private.CONTROL_INPUTS)()


def test_what_saves_a_saved_model():
    module, name = tf_private.SAVED_MODELS
    names = list(inspect.signature(getattr(module, name)).parameters)
    assert names[:4] == ["obj", "export_dir", "signatures", "options"]
    assert f"{name}(" in inspect.getsource(module.save)


@pytest.mark.parametrize("function", ["save_model", "load_model"])
def test_what_tf_keras_calls_for_saved_models(function):
    pytest.importorskip("tf_keras")
    module = importlib.import_module(tf_private.SAVED_MODELS_OF_TF_KERAS)
    first = next(iter(inspect.signature(getattr(module, function)).parameters))
    assert first == {"save_model": "model", "load_model": "filepath"}[function]
    api = inspect.getsource(importlib.import_module("tf_keras.src.saving.saving_api"))
    assert f"legacy_sm_saving_lib.{function}(" in api


def test_concrete_functions_of_a_function():
    function = tf.function(lambda x: x + 1)
    made = [function.get_concrete_function(tf.TensorSpec([n])) for n in (1, 2)]
    found = list(getattr(function, tf_private.FUNCTION_CACHE).values())
    assert len(found) == 2 and all(any(each is one for one in found) for each in made)


@pytest.mark.parametrize("module", tf_private.SLOTS_OF_CHECKPOINTS)
def test_what_asks_for_slots_of_a_checkpoint(module):
    source = inspect.getsource(importlib.import_module(module))
    assert re.search(r"\.get_slot\(", source)


@pytest.mark.parametrize("package", KERAS)
def test_numbers_of_the_variables_of_a_keras_optimizer(package):
    optimizer = importlib.import_module(package).optimizers.Adam()
    variables = [tf.Variable([1.0]), tf.Variable([2.0, 3.0])]
    optimizer.build(variables)
    numbers = getattr(optimizer, tf_private.NUMBERS_OF_VARIABLES[package])
    key_of = getattr(optimizer, tf_private.KEY_OF_A_VARIABLE)
    assert [numbers[key_of(variable)] for variable in variables] == [0, 1]


def test_an_operation_is_called_as_generated_functions_do():
    variable = tf.Variable([1.0])
    handle, value = variable.handle, tf.constant([2.0])
    tf_private.execute(tf_private.context(), "AssignVariableOp", None, handle, value)
    assert variable.numpy() == [2.0]


@pytest.mark.parametrize("cls", LEGACY_OPTIMIZERS)
def test_settings_of_legacy_optimizers(cls):
    legacy = pytest.importorskip("tf_keras").optimizers.legacy
    optimizer = legacy.SGD() if cls == "Optimizer" else getattr(legacy, cls)()
    for name in LEGACY_OPTIMIZERS[cls]:
        assert_has(optimizer, name)


@pytest.mark.parametrize("cls", V1_OPTIMIZERS)
def test_settings_of_v1_optimizers(cls):
    optimizer_class = getattr(tf.compat.v1.train, cls)
    needed = list(inspect.signature(optimizer_class.__init__).parameters)[2:3]
    second = {"momentum": 0.9, "global_step": tf.Variable(0, dtype=tf.int64)}
    optimizer = optimizer_class(0.1, *(second[name] for name in needed if name in second))
    for name in V1_OPTIMIZERS[cls]:
        assert_has(optimizer, name)


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


def test_every_private_setting_of_an_optimizer_is_listed():
    """What the files of the families read of an optimizer, by its own name."""
    listed = {
        *KERAS_OPTIMIZERS,
        *(name for names in LEGACY_OPTIMIZERS.values() for name in names),
        *(name for names in V1_OPTIMIZERS.values() for name in names),
    }
    read = set()
    for path in (PACKAGE / "bridge" / "optimizers").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("o", "optimizer", "copy")
                and node.attr.startswith("_")
            ):
                read.add(node.attr)
    assert len(read) > 15
    assert read == listed


def test_what_is_missing_is_named_with_the_version():
    with pytest.raises(ImportError, match=rf"no_such of os.*TensorFlow {tf.__version__} does not"):
        tf_private.private("os", "no_such")
    with pytest.raises(ImportError, match=r"x of tensorflow\.no_such_module.*2\.16 to 2\.21"):
        tf_private.private("tensorflow.no_such_module", "x")
