"""docs/faces.md is true: its names, defaults, functions and tests are there."""

import inspect
import re

import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from sok_lite.dynamic_embedding.variable import default_partition_fn
from tests.support.faces_page import (
    assert_every_row_has_a_test,
    assert_what_is_behind_is_there,
    below,
    codes,
    names_of,
    section,
    signature_of,
    text_of,
)

# The order of the documents. `short_file_name` is newer than they are, and `row_shape` is ours.
DOCUMENTED = {
    "key_dtype": tf.int64,
    "value_dtype": tf.float32,
    "dim": 1,
    "devices": None,
    "partitioner": default_partition_fn,
    "shared_name": None,
    "name": "DynamicEmbedding_Variable",
    "initializer": None,
    "trainable": True,
    "checkpoint": True,
    "init_size": 0,
    "kv_creator": None,
    "restrict_policy": None,
    "bp_v2": False,
    "short_file_name": False,
    "row_shape": None,
}
FOLDER = "dirpath, proc_size=1, proc_rank=0, file_name_list=None, dirpath_env='TFRA_SAVED_KV'"
# Methods with their arguments, as documented; the properties without.
METHODS = {
    "accum": "keys, old_values, new_values, exists, name=None",
    "clear": "name=None",
    "export": "name=None",
    "get_slot_variables": "optimizer",
    "get_trainable_by_name": "name",
    "lookup": "keys, return_exists=False, name=None",
    "remove": "keys, name=None",
    "restrict": "num_reserved, **kwargs",
    "size": "index=None, name=None",
    "upsert": "keys, values, name=None",
    "embedding_lookup": "ids, name=None, max_norm=None, return_trainable=False",
    "export_keys_and_scores": "split_size, name=None",
    "verify_embedding_weights": "sparse_ids, sparse_weights=None",
    "save_to_file_system": f"{FOLDER}, append_to_file=False, buffer_size=4194304, name=None",
    "load_from_file_system": f"{FOLDER}, load_entire_dir=False, buffer_size=4194304, name=None",
    "load_from_file_system_with_restore_function": "dirpath, proc_size=1, proc_rank=0, "
    "buffer_size=4194304",
}
PROPERTIES = ["restrict_policy", "tables", "trainable_store"]
LOOKUP = "partition_strategy=None, name=None, validate_indices=None, max_norm=None"
LAYER = "key_dtype=tf.int64, value_dtype=tf.float32, combiner='sum', initializer=None, devices=None"
SAVE_MODEL = (
    "model, filepath, overwrite=True, include_optimizer=True, signatures=None, options=None, "
    "save_traces=True"
)
WARM_START = "ckpt_to_initialize_from, vars_to_warm_start='.*', var_name_to_prev_var_name=None"
FUNCTIONS = {
    "embedding_lookup": f"params, ids, {LOOKUP}, return_trainable=False",
    "embedding_lookup_unique": f"params, ids, {LOOKUP}, return_trainable=False",
    "embedding_lookup_sparse": "params, sp_ids, sp_weights, partition_strategy=None, "
    "name='embedding_lookup_sparse', combiner='mean', max_norm=None, return_trainable=False",
    "safe_embedding_lookup_sparse": "embedding_weights, sparse_ids, sparse_weights=None, "
    "combiner='mean', default_id=None, name='safe_embedding_lookup_sparse', "
    "partition_strategy=None, max_norm=None, return_trainable=False",
    "DynamicEmbeddingOptimizer": "bp_v2=False, synchronous=False, **kwargs",
    "TrainableWrapper": "params, ids=None, max_norm=None, *, name=None, trainable=None",
    "trainable_wrapper_filter": "iterable_object_in, test_unaggregated_function=None",
    "KVCreator": "config=None, saver=None",
    "RestrictPolicy": "var",
    "FileSystemSaver": "proc_size=None, proc_rank=None, save_path=None, buffer_size=4096",
    "RedisTableConfig": "redis_config_abs_dir=None, redis_config_abs_dir_env=None",
    "warm_start": WARM_START,
    "WarmStartHook": WARM_START,
    "train.Checkpoint": "root=None, **kwargs",
    "keras.layers.Embedding": f"embedding_size, {LAYER}, name='DynamicEmbeddingLayer', "
    "with_unique=True, short_file_name=False, **kwargs",
    "keras.layers.FieldWiseEmbedding": f"embedding_size, nslots, slot_map_fn=None, {LAYER}, "
    "name='SlotDynamicEmbeddingLayer', with_unique=True, short_file_name=False, **kwargs",
    "keras.layers.HvdAllToAllEmbedding": "embedding_size, with_unique=True, "
    "with_secondary_unique=True, mpi_size=None, batch_size=None, **kwargs",
    "keras.models.save_model": SAVE_MODEL,
    "keras.models.de_hvd_save_model": SAVE_MODEL,
    "keras.callbacks.DEHvdBroadcastGlobalVariablesCallback": "root_rank=0, device='', "
    "local_variables=None",
}


ARGUMENTS = "Arguments of `Variable` and `get_variable`"
OF_VARIABLE = "Methods and properties of `Variable`"
WRONG = "What TFRA gets wrong, and this does"
SECTIONS = [
    *(ARGUMENTS, OF_VARIABLE, "Other names"),
    *("Arguments of `DynamicEmbeddingOptimizer`", "Arguments of `HkvHashTableConfig`"),
]


def public_names(module, start=""):
    """Yields the public names of a module and of those in it."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from public_names(value, f"{start}{name}.")
        else:
            yield start + name


@pytest.mark.parametrize("title", [*SECTIONS, WRONG])
def test_every_row_has_a_test_that_exists(title):
    assert_every_row_has_a_test(title, "dynamic_embedding", "test_tfra_")


@pytest.mark.parametrize("title", SECTIONS)
def test_what_is_behind_a_name_is_there(title):
    assert_what_is_behind_is_there(title)


def test_every_name_of_the_page_is_in_the_package():
    for name in names_of("Other names"):
        below(de, name)
    for name in names_of(OF_VARIABLE):
        assert hasattr(de.Variable, name), name


def test_every_name_of_the_package_is_on_the_page():
    named = {*names_of("Other names"), "Variable"}
    # Where they are defined; programs have them of `keras`.
    again = {"keras.layers.layers_for", "keras.callbacks.callbacks_for"}
    assert set(public_names(de)) - again <= named
    methods = {
        name
        for name, value in vars(de.Variable).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    # What other modules of the package ask of a variable, and no program does.
    internal = {
        "is_differentiable",
        "is_pooled",
        "keys_of",
        "shards_of",
        "tables_held",
        "trainable_named",
    }
    assert methods - internal == set(names_of(OF_VARIABLE))


@pytest.mark.parametrize("function", [de.Variable.__init__, de.get_variable])
def test_arguments_and_defaults_are_the_documents(function):
    expected = dict(DOCUMENTED)
    if function is de.get_variable:
        # First, without a default; and `shared_name` has another.
        expected = {"name": inspect.Parameter.empty} | {
            name: default for name, default in expected.items() if name != "name"
        }
        expected["shared_name"] = "get_variable"
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    assert {name: each.default for name, each in parameters.items()} == expected
    assert list(parameters) == list(expected)
    kinds = {each.kind for each in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize(
    ("title", "function"),
    [
        (ARGUMENTS, de.Variable.__init__),
        (SECTIONS[3], de.DynamicEmbeddingOptimizer),
        (SECTIONS[4], de.HkvHashTableConfig.__init__),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_the_page_has_every_argument_with_its_default(title, function):
    texts = {
        tf.int64: "tf.int64",
        tf.float32: "tf.float32",
        default_partition_fn: "default_partition_fn",
        "DynamicEmbedding_Variable": '"DynamicEmbedding_Variable"',
        de.HkvEvictStrategy.LRU: "LRU",
    }
    expected = set()
    for name, each in inspect.signature(function).parameters.items():
        if each.kind is inspect.Parameter.VAR_KEYWORD or name == "self":
            continue
        default = each.default
        # 0 and False are equal, and so is a strategy and its number.
        is_plain = default is None or type(default) in (bool, int)
        expected.add(f"{name}={default if is_plain else texts[default]}")
    assert {codes(row[0])[0] for row in section(title)[0]} - {"self"} == expected


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_is_documented(name):
    assert signature_of(getattr(de.Variable, name)) == METHODS[name]
    assert name in names_of(OF_VARIABLE)


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_are_properties(name):
    assert isinstance(getattr(de.Variable, name), property)
    assert name in names_of(OF_VARIABLE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_is_documented(name):
    assert signature_of(below(de, name)) == FUNCTIONS[name]
    assert name in names_of("Other names")


def test_what_the_page_says_is_not_here_is_not():
    text = text_of("Not here")
    names = [name for name in codes(text) if re.fullmatch(r"[A-Za-z_]+", name)]
    absent = [name for name in names if not hasattr(de, name)]
    assert {"DistributedVariableWrapper", "create_slots", "patch_on_tf"} <= set(absent)
    assert set(names) - set(absent) == set()
