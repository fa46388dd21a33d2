"""docs/faces.md is true of TFPlus' face: its names, defaults, functions and tests are there."""

import inspect
import re

import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import kv_variable_ops
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

ARGUMENTS = "Arguments of `get_kv_variable`"
OF_VARIABLE = "Methods and properties of `KvVariable`"
OTHER = "Other names of TFPlus"
WRONG = "What TFPlus gets wrong, and this does"
NOT_HERE = "What of TFPlus is not here"
SECTIONS = [ARGUMENTS, OF_VARIABLE, OTHER]

# As TFPlus has them; then what is ours.
SCATTER = "sparse_delta, use_locking=False, name=None"
METHODS = {
    "sparse_read": "indices, name=None, training=None, missing=None",
    "sparse_read_with_counts": "indices, counts, name=None, training=None",
    "value": "",
    "read_value": "",
    "export": "name=None, cutoff=1e-20",
    "get_counting": "indices, name=None",
    "increase_counting": "indices, counts, name=None",
    "get_timestamp": "indices, name=None",
    "delete": "indices, name=None",
    "delete_with_timestamp": "threshold=7, name=None, *, seconds=None",
    "is_initialized": "name=None",
    "has_storage": "storage_type=<StorageCombination.MEM_SSD: 'mem_ssd'>",
    **{f"scatter_{each}": SCATTER for each in ("add", "sub", "mul", "div", "min", "max", "update")},
}
PROPERTIES = [
    *("embedding_dim", "enter_threshold", "initializer", "key_dtype", "parts", "whole"),
    *("total_count", "total_freq", "storage_size_count"),
]
FUNCTIONS = {
    "embedding_lookup": "params, ids, partition_strategy='mod', name=None, validate_indices=True, "
    "max_norm=None, *, training=None",
    "embedding_lookup_unique": "params, ids, partition_strategy='mod', name=None, *, training=None",
    "embedding_lookup_sparse": "params, sp_ids, sp_weights, partition_strategy='mod', name=None, "
    "combiner=None, max_norm=None, *, training=None",
    "safe_embedding_lookup_sparse": "embedding_weights, sparse_ids, sparse_weights=None, "
    "combiner='mean', default_id=None, name=None, partition_strategy='div', max_norm=None, *, "
    "training=None",
    "insert_kv_embedding": "params, ids, values",
    "use_tf_embedding_ops": "",
    "use_tfplus_embedding_ops": "",
    "set_tfplus_saver_mode": "mode",
    "set_new_num_shards": "num_shards",
    "enable_delta_export": "",
    "disable_delta_export": "",
    "patch_tf": "*, disable_eager=True",
    "training_mode": "is_training",
}


@pytest.mark.parametrize("title", [*SECTIONS, WRONG])
def test_every_row_has_a_test_that_exists(title):
    assert_every_row_has_a_test(title, "kv_variable", "test_kv_")


@pytest.mark.parametrize("title", SECTIONS)
def test_what_is_behind_a_name_is_there(title):
    assert_what_is_behind_is_there(title)


def test_every_name_of_the_page_is_in_the_package():
    for name in names_of(OTHER):
        below(kv, name)
    for name in names_of(OF_VARIABLE):
        assert hasattr(kv.KvVariable, name), name


def test_every_name_of_the_package_is_on_the_page():
    names = {name for name in kv.__all__ if not inspect.ismodule(getattr(kv, name))}
    names |= {f"train.{name}" for name in kv.train.__all__}
    assert names <= set(names_of(OTHER))
    methods = {
        name
        for name, value in vars(kv.KvVariable).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    # What other modules of the package ask of a variable, and no program does.
    internal = {"readable_source", "resolved"}
    # Refused, as the page says below.
    internal |= {"add_multi_level_hash", "apply_snapshot", "dynamic_restore", "load_remote_storage"}
    assert methods - internal == set(names_of(OF_VARIABLE)) - {"training"}


def test_the_page_has_every_argument_with_its_default():
    texts = {tf.int64: "tf.int64", tf.float32: "tf.float32"}
    expected = []
    for name, each in inspect.signature(kv.get_kv_variable).parameters.items():
        default = each.default
        if default is inspect.Parameter.empty:
            expected.append(name)
        else:
            is_plain = default is None or isinstance(default, int)
            expected.append(f"{name}={default if is_plain else texts[default]}")
    assert [codes(row[0])[0] for row in section(ARGUMENTS)[0]] == expected


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_is_documented(name):
    assert signature_of(getattr(kv.KvVariable, name)) == METHODS[name]


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_are_properties(name):
    assert isinstance(getattr(kv.KvVariable, name), property)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_is_documented(name):
    assert signature_of(getattr(kv, name)) == FUNCTIONS[name]


def test_what_the_page_says_is_not_here_is_not():
    names = [name for name in codes(text_of(NOT_HERE)) if re.fullmatch(r"[a-z_]+", name)]
    assert {"get_name_info", "import_meta_graph"} <= set(names)
    for owner in (kv, kv_variable_ops, kv.KvVariable):
        assert not [name for name in names if hasattr(owner, name)]
