"""Keys as programs write them: lists of Python's integers keep each bit, and others are refused."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras as sk
from sok_lite import dynamic_embedding as de

# Below and above 2**63: of such a list NumPy makes float64, in which these are others.
KEYS = [2**63 + 7, 5, 2**64 - 1]
ROWS = np.array([[1.0], [2.0], [3.0]], np.float32)

MAKES = {
    "sok": lambda key_type="uint64": sok.DynamicVariable(1, key_type=key_type, name="t"),
    "keras": lambda key_type="uint64": sk.Table("t", 1, key_type=key_type),
}


@pytest.mark.parametrize("keys", [KEYS, tuple(KEYS), np.array(KEYS, object)], ids=type)
def test_integers_of_python_become_the_keys_that_they_are(keys, mode):
    table = MAKES["keras" if isinstance(keys, tuple) else "sok"]()
    table.assign(keys, ROWS)
    found, rows = table.export()
    found = zip(found.numpy().tolist(), rows.numpy()[:, 0], strict=True)
    assert dict(found) == dict(zip(KEYS, [1, 2, 3], strict=True))
    asked = [[2**63 + 7, 6], [5, 2**63]]
    assert mode(lambda: table.contains(asked))().numpy().tolist() == [[True, False], [True, False]]
    assert (table.scores(keys).numpy() > 0).all()
    if isinstance(table, sok.DynamicVariable):
        look_up = mode(lambda: sok.lookup_sparse(table, [[KEYS, KEYS[::-1]]], combiners="sum"))
        np.testing.assert_array_equal(look_up()[0], [[6.0], [6.0]])
        np.testing.assert_array_equal(mode(lambda: table.sparse_read(KEYS))(), ROWS)
    assert int(table.erase(keys[1:])) == 2 and len(table) == 1 and KEYS[0] in table


REFUSED = {
    "above int64": ("sok", "int64", KEYS, "9223372036854775815. Make the table"),
    "above uint64": ("sok", "uint64", [5, 2**64], "18446744073709551616. No key has more"),
    "one above uint64": ("keras", "int64", 2**64, "18446744073709551616. No key has more"),
    "below int64": ("sok", "int64", [-(2**63) - 1], "-9223372036854775809. No key has more"),
    "below 0": ("keras", "uint64", [2**63, -1], "Received: -1. Make the table"),
}


@pytest.mark.cases("case")
@pytest.mark.parametrize("case", REFUSED)
def test_integers_of_python_that_do_not_fit_are_refused(case):
    api, key_type, keys, text = REFUSED[case]
    table = MAKES[api](key_type)
    with pytest.raises(ValueError, match=f"Keys of 't:0' must fit {key_type}.*{text}"):
        table.contains(keys)
    with pytest.raises(ValueError, match=text):
        table.assign(keys, ROWS[: np.size(keys)])
    if api == "sok":
        with pytest.raises(ValueError, match=rf"sp_ids\[0\] must fit {key_type}.*{text[:19]}"):
            sok.lookup_sparse(table, [keys])
    assert len(table) == 0


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        *[(["a", "b"], "texts"), (np.array(["a", "b"]), "string|texts"), ([b"a"], "texts")],
        *[(tf.constant(["a"]), "string"), ([1.0, 2.0], ""), ([1, None], ""), ([2.0**63], "")],
    ],
    ids=lambda each: str(each)[:20],
)
@pytest.mark.parametrize("api", MAKES)
def test_what_is_no_integer_is_refused(api, keys, text):
    table = MAKES[api]("int64")
    text = f"must be integers.*({text}). Turn strings into" if text else "must be integers"
    calls = [table.contains, table.scores, table.erase, lambda keys: table.assign(keys, ROWS)]
    for call in calls:
        with pytest.raises(TypeError, match=text):
            call(keys)
    assert len(table) == 0


# NumPy refuses at once to make a copy of it.
TOO_MANY = np.broadcast_to(np.int32(1), [1 << 46])
TOO_LARGE = np.broadcast_to(np.float64(1.0), [1 << 46, 1])


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("keys", "rows", "text"),
    [(TOO_MANY, ROWS, "Keys of 't.*int64"), (np.array([1]), TOO_LARGE, "alues.* of 't.*float32")],
    ids=["keys", "rows"],
)
@pytest.mark.parametrize("api", ["sok", "keras", "de", "engine"])
def test_a_copy_without_memory_names_the_table(api, keys, rows, text):
    if api == "de":
        write = de.get_variable("t", dim=1).upsert
    elif api == "engine":
        write = sok.DynamicVariable(1, name="t").table.insert_or_assign
        text = "Keys and rows of table 't': .*int64 and float32"
    else:
        write = MAKES[api]("int64").assign
    with pytest.raises(
        MemoryError, match=f"{text}.*as it was.*fewer at a time.*Unable to allocate"
    ):
        write(keys, rows)
