"""What TFRA has written and recorded (tools/record_tfra_files.py), and what sources hold."""

import json
from pathlib import Path

import numpy as np

from sok_lite.engine.dtypes import row_dtype
from tests.cli.importers.arrays import whole

FOLDER = Path(__file__).parent / "data" / "tfra"
CASES = json.loads((FOLDER / "expected.json").read_text())["cases"]

# What the files of `files_of_one_shard` do not say of themselves.
TYPES = {
    "dtype": "halves=float16,bytes=int8,brains=bfloat16",
    "key_type": "odd.name-1_b=int32",
    "dim": "empty=4",
}


def rows_of(source, column="values"):
    """The rows of a source by key, as floats."""
    rows = whole(source, column)
    if column == "values":
        rows = row_dtype(source.dtype).to_float32(np, rows) if rows.dtype != np.float64 else rows
    keys = whole(source, "keys").tolist()
    assert len(keys) == source.num_keys == len(set(keys))
    return dict(zip(keys, rows.tolist(), strict=True))


def expected_rows(table):
    """The rows by key that TFRA has recorded of a table."""
    return dict(zip(table["keys"], table["values"], strict=True))


def check(sources, case, slots, separator="/"):
    """Checks that sources are what TFRA says is in a case.

    Args:
      slots: (state, initial value) of each table of the case that is a slot, by name.
    """
    expected = {name.replace("/", separator): table for name, table in CASES[case].items()}
    mains = {name: table for name, table in expected.items() if name not in slots}
    assert {source.name for source in sources} == set(mains)
    for source in sources:
        table = mains[source.name]
        assert (source.key_type, source.dtype, source.dim) == (
            table["key_type"],
            table["dtype"],
            table["dim"],
        )
        assert rows_of(source) == expected_rows(table)
        its = {state: name for name, (state, _) in slots.items() if name.startswith(source.name)}
        assert [state.name for state in source.states] == sorted(its)
        for facts in source.states:
            initial = slots[its[facts.name]][1]
            slot = expected_rows(expected[its[facts.name]])
            assert facts.initial == initial and facts.group == 1
            begun = [float(np.float32(initial))] * source.dim
            assert set(slot) <= set(table["keys"])
            assert rows_of(source, facts.tensor) == {
                key: slot.get(key, begun) for key in table["keys"]
            }
