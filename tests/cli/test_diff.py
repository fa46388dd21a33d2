"""What differs between checkpoints."""

import numpy as np
import pytest

from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.files.source import Source
from sok_lite.engine.files.source_writer import write_checkpoint
from tests.cli.helpers import CPU, ONE, dumped, fine, optimized, run
from tests.support.filled_tables import HYBRID, KINDS, filled, rows_of, some_keys
from tests.support.helpers import new_table


def findings(*arguments):
    status, out, err = run("diff", *arguments)
    assert (status, err) == (1, "")
    return out.splitlines()


@pytest.mark.parametrize(
    ("key_type", "dtype", "num_bytes"),
    [
        ("int64", "float32", 100),
        ("int32", "float16", 64 << 20),
        ("uint64", "bfloat16", 100),
        ("int64", "float64", 64 << 20),
        ("int64", "int64", 100),
    ],
)
def test_what_differs_is_counted(tmp_path, monkeypatch, num_bytes, key_type, dtype):
    monkeypatch.setattr("sok_lite.cli.buckets.BUCKET_BYTES", num_bytes)
    kinds = {"key_type": key_type, "dtype": dtype, "name": "user"}
    first, oracle = filled(CPU, 40, **kinds)
    second, _ = filled(CPU, 40, **kinds)
    keys = np.array(list(oracle), key_type)
    first.erase(keys[:3])
    second.erase(keys[10:15])
    changed = keys[20:27]
    rows = rows_of(7, 3, dtype, seed=77)
    second.insert_or_assign(changed, rows)
    ms = first.read_state("m", keys[30:34])
    second.assign_state("m", keys[30:34], ms + np.float32([[1], [64], [2], [4]]))
    dump(tmp_path / "a", [first], ONE)
    dump(tmp_path / "b", [second], ONE)
    in_a, in_b, other, states = findings(tmp_path / "a", tmp_path / "b")
    assert in_a.startswith(f"table 'user': 5 keys only in {tmp_path / 'a'}: ")
    assert {int(key) for key in in_a.split(": ")[2].split(", ")} == set(keys[10:15].tolist())
    assert in_b.startswith(f"table 'user': 3 keys only in {tmp_path / 'b'}: ")
    assert other.startswith("table 'user': rows of 7 of 32 keys differ, by up to ")
    what = "table 'user': rows of state 'm' of 4 of 32 keys differ, by up to 64: "
    assert states.startswith(what)  # of whatever bucket the key is
    fine("reshard", tmp_path / "a", tmp_path / "a3", "--ranks", 3)
    fine("diff", tmp_path / "a", tmp_path / "a3", "--all")


def with_rows(path, rows, **options):
    rows = np.array(rows)
    table = new_table(CPU, rows.shape[1], **options)
    table.insert_or_assign(np.arange(len(rows)), rows)
    dump(path, [table], ONE)


def test_a_tolerance_is_of_each_element(tmp_path):
    with_rows(tmp_path / "a", np.float32([[1, 2], [3, 4], [np.nan, np.inf], [0.0, 5]]))
    with_rows(tmp_path / "b", np.float32([[1, 2.5], [3.25, 4], [np.nan, np.inf], [-0.0, 5]]))
    paths = tmp_path / "a", tmp_path / "b"
    assert findings(*paths) == ["table 'table': rows of 2 of 4 keys differ, by up to 0.5: 0, 1"]
    assert findings(*paths, "--tolerance", 0.25) == [
        "table 'table': rows of 1 of 4 keys differ, by up to 0.5: 0"
    ]
    assert fine("diff", *paths, "--tolerance", 0.5).endswith(" are equal within 0.5\n")
    for tolerance in (-1, "nan"):
        assert run("diff", *paths, "--tolerance", tolerance)[0] == 2
    for one, other, by in (
        *(([1.0], [np.nan], "nan"), ([1.0], [np.inf], "inf")),
        ([2**60], [2**60 + 1], "1:"),
        ([-(2**63)], [2**63 - 1], "1.84467e+19:"),
    ):
        dtype = np.array(other).dtype.name
        with_rows(tmp_path / "a", np.array([one], dtype), dtype=dtype)
        with_rows(tmp_path / "b", np.array([other]), dtype=dtype)
        (line,) = findings(*paths, *["--tolerance", 1e30] * (dtype == "float64"))
        assert f"rows of 1 of 1 key differ, by up to {by}" in line
    fine("diff", *paths, "--tolerance", 2**64)


def test_tables_and_kinds_that_differ(tmp_path):
    first, rows, dim3 = tmp_path / "a", np.float32([[1, 2]]), np.float32([[1, 2, 3]])
    with_rows(first, rows)
    for name, (its, options, said) in {
        "b": (np.float64(rows), {"dtype": "float64"}, "dtype float32 and float64"),
        "c": (dim3, {}, "dim 2 and 3"),
        "d": (rows, {"key_type": "int32"}, "key_type int64 and int32"),
        "e": (rows, {"name": "x"}, f"only in {first}"),
    }.items():
        with_rows(tmp_path / name, its, **options)
        found = findings(first, tmp_path / name)
        assert found[0] == f"table 'table': {said}"
        assert found[1:] == [f"table 'x': only in {tmp_path / 'e'}"] * (name == "e")
    dumped(tmp_path / "none", 0)
    dumped(tmp_path / "still none", 0)
    dumped(tmp_path / "some", 4)
    fine("diff", tmp_path / "none", tmp_path / "still none")
    assert len(findings(tmp_path / "none", tmp_path / "some")) == 2
    fine("reshard", tmp_path / "some", tmp_path / "again", "--ranks", 1)
    fine("diff", tmp_path / "some", tmp_path / "again", "--table", "user")


def test_states_that_only_one_has_and_those_of_other_ranks(tmp_path):
    keys = some_keys(30)
    optimized(tmp_path / "a", keys, 4, ranks=2)
    optimized(tmp_path / "b", keys, 4, ranks=1)
    fine("diff", tmp_path / "a", tmp_path / "b")
    table = new_table(CPU, 3)
    table.insert_or_assign(keys, np.full((30, 3), 4, np.float32))
    dump(tmp_path / "c", [table], ONE)
    assert findings(tmp_path / "a", tmp_path / "c") == [
        f"table 'table': state {name!r}: only in {tmp_path / 'a'}" for name in ("m", "v", "acc")
    ]


def test_all_tells_of_scores_and_stamps(tmp_path):
    table, oracle = filled(CPU, 9, name="user", **HYBRID | {"evict_strategy": "kLfu"})
    dump(tmp_path / "a", [table], ONE)
    table.lookup(list(oracle)[:2])
    dump(tmp_path / "b", [table], ONE)
    fine("diff", tmp_path / "a", tmp_path / "b")
    stamps, scores = findings(tmp_path / "a", tmp_path / "b", "--all")
    assert stamps.startswith("table 'user': stamps of 2 of 9 keys differ")
    assert scores.startswith("table 'user': scores of 2 of 9 keys differ")


class Repeating(Source):
    """The keys 0 to 9, ten times over; rows say how often a key was there before."""

    name, dim, dtype, key_type, num_keys = "x", 1, "float32", "int64", 100

    def read(self, column):
        for i in range(10):
            yield np.arange(10) if column == "keys" else np.full((10, 1), i, np.float32)


def test_of_a_key_that_repeats_the_first_counts_as_for_a_load(tmp_path):
    write_checkpoint(tmp_path / "a", [Repeating()])
    table = new_table(CPU, 1, name="x")
    load(tmp_path / "a", [table], ONE)
    assert (table.export()[1] == 0).all()
    dump(tmp_path / "b", [table], ONE)
    fine("diff", tmp_path / "a", tmp_path / "b")
    assert "key 3\n  row        0\n" in fine("get", tmp_path / "a", "x", 3)


def test_keys_that_were_only_seen_are_compared(tmp_path):
    kinds = KINDS["sightings"] | {"enter_threshold": 3}
    first, second, none = (new_table(CPU, 3, name="user", **kinds) for _ in range(3))
    for table, keys in ((first, [7, 8]), (second, [8, -9, 10])):
        table.lookup(keys)
    for name, table in (("a", first), ("b", second), ("none", none)):
        dump(tmp_path / name, [table], ONE)
    a, b = tmp_path / "a", tmp_path / "b"
    fine("diff", a, b)
    assert findings(a, b, "--all") == [
        f"table 'user': 1 key without a row only in {a}: 7",
        f"table 'user': 2 keys without a row only in {b}: -9, 10",
    ]
    assert findings(tmp_path / "none", a, "--all") == [
        f"table 'user': 2 keys without a row only in {a}: 7, 8"
    ]
    second.lookup([8])
    dump(tmp_path / "more", [second], ONE)
    assert findings(b, tmp_path / "more", "--all") == [
        "table 'user': sightings of 1 of 3 keys differ, by up to 1: 8",
        "table 'user': sighting_stamps of 1 of 3 keys differ, by up to 1: 8",
    ]
    fine("reshard", b, tmp_path / "three", "--ranks", 3)
    fine("diff", b, tmp_path / "three", "--all")
