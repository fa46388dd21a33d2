"""What is shown of single keys of a checkpoint, and what is read for it."""

import json

import numpy as np
import pytest

from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.files.dump import dump
from tests.cli.helpers import CPU, ONE, dumped, fine, optimized, run
from tests.support.filled_tables import KINDS, filled, some_keys
from tests.support.helpers import new_table


def shown(path, table, *keys, status=0, **options):
    """What --json says of keys."""
    flags = [f"--{name}" for name, is_on in options.items() if is_on]
    code, out, err = run("get", path, table, *flags, "--json", "--", *keys)
    assert (code, err) == (status, "")
    return json.loads(out)["keys"]


@pytest.mark.parametrize(
    ("key_type", "dtype"), [("int64", "float32"), ("uint64", "bfloat16"), ("int32", "int8")]
)
@pytest.mark.parametrize("form", ["sok_lite", "npz"])
def test_every_row_is_that_of_its_key(tmp_path, key_type, dtype, form):
    oracle = dumped(tmp_path / "c", 33, names=["user"], key_type=key_type, dtype=dtype)["user"]
    fine("reshard", tmp_path / "c", tmp_path / "d", "--ranks", 2)
    path = tmp_path / ("d" if form == "sok_lite" else "d.npz")
    if form == "npz":
        fine("export", tmp_path / "d", "--format", "npz", "--to", path, "--columns", "all")
    found = shown(path, "user", *oracle, states=True)
    assert [each["key"] for each in found] == list(oracle)
    for each, (row, state) in zip(found, oracle.values(), strict=True):
        expected = np.frombuffer(row, "uint16" if dtype == "bfloat16" else dtype)
        expected = bfloat16_to_float32(np, expected) if dtype == "bfloat16" else expected
        assert np.array_equal(np.array(each["row"], expected.dtype), expected)
        assert np.float32(each["states"][0]["row"]).tobytes() == state
        assert each["found"] and "text" not in each


def test_people_see_rows_in_columns_and_when_a_key_was_seen(tmp_path):
    table = new_table(CPU, 10, name="user")
    table.insert_or_assign([-3, 7], np.arange(20, dtype=np.float32).reshape(2, 10) / 8)
    table.lookup([7])
    dump(tmp_path / "c", [table], ONE)
    status, out, _ = run("get", tmp_path / "c", "user", -3, 9)
    head, _, key, first, second, seen, _, missing = out.splitlines()
    assert (status, head) == (1, "table 'user': 2 keys of int64, rows of 10 x float32")
    assert (key, missing) == ("key -3", "key 9: missing")
    assert first == "  row            0 0.125  0.25 0.375   0.5 0.625  0.75 0.875"
    assert second == "                 1 1.125"
    assert seen.startswith("  last seen  in lookup 1 of 2, at 20")
    assert shown(tmp_path / "c", "user", 7)[0]["last_seen_lookup"] == 2


def test_a_key_without_a_row_yet_is_shown_with_how_often_it_was_seen(tmp_path):
    table = new_table(CPU, 3, name="user", **KINDS["sightings"] | {"enter_threshold": 3})
    for _ in range(2):
        table.lookup([7])
    dump(tmp_path / "c", [table], ONE)
    status, out, _ = run("get", tmp_path / "c", "user", 7)
    assert status == 1 and "key 7: no row yet, seen 2 times, last in lookup 2 of 2, at 20" in out
    assert shown(tmp_path / "c", "user", 7, status=1)[0]["seen"] == 2


def test_states_of_ranks_and_numbers_that_json_has_not(tmp_path):
    keys = some_keys(20)
    optimized(tmp_path / "c", keys, np.nan, ranks=2)
    (each,) = shown(tmp_path / "c", "table", keys[3], states=True)
    assert each["row"] == [None] * 3
    names = [(state["name"], state["group"]) for state in each["states"]]
    assert names == [("m", 1), ("v", 1), ("acc", 2)]
    assert "row        nan nan nan" in fine("get", tmp_path / "c", "table", keys[3])


def test_only_the_chunks_of_a_row_are_read(tmp_path):
    oracle = dumped(tmp_path / "c", 500, names=["user"])["user"]
    (path,) = (tmp_path / "c").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the state of the last key
    path.write_bytes(data)
    assert len(shown(tmp_path / "c", "user", *oracle)) == 500
    status, _, err = run("get", tmp_path / "c", "user", *oracle, "--states")
    assert status == 3 and "is corrupt: chunk " in err


def test_what_is_no_key_is_told_in_one_line(tmp_path):
    table, _ = filled(CPU, 3, name="user", key_type="uint64")
    dump(tmp_path / "c", [table], ONE)
    cases = {
        ("user", "-1"): "keys of table 'user' are uint64, from 0 to 18446744073709551615. Rec",
        ("user", "x"): "a hash of a text is int64: give an integer. Received: 'x'",
        ("item", "1"): "has no table 'item'; it has: 'user'",
    }
    for arguments, text in cases.items():
        status, out, err = run("get", tmp_path / "c", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1) and text in err
