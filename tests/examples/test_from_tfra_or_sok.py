"""examples/from_tfra_or_sok.ipynb: what it says is true of the data that it makes."""

import re

import numpy as np

from tests.support.notebooks import data_of, notebook, numbers_of, printed

NAME = "from_tfra_or_sok"
SOK_HEADER = 296  # bytes, see sok_lite/cli/importers/sok.py


def test_what_it_says_is_true():
    check_facts(printed(notebook(NAME)))


def sizes_of(text):
    """Returns the bytes of the files that a cell lists, by their names."""
    return {
        name: int(size.replace(",", ""))
        for size, name in re.findall(r"^ *([\d,]+) bytes  (\S+)$", text, re.MULTILINE)
    }


def check_facts(outputs):
    """Compares what a run printed with counts of the data that it made, and with what it says."""
    data = data_of(NAME)
    parts = [data[name] for name in ("old", "new", "test")]
    counts = [[len(np.unique(data[kind][part])) for kind in ("user", "item")] for part in parts]
    for line, part, count in zip(outputs["data"].splitlines(), parts, counts, strict=True):
        assert numbers_of(line) == [part.stop - part.start, *count]
    users, items = counts[0]
    assert [users, items] == [data["NUM_USERS"], data["NUM_ITEMS"]]
    assert counts[1] == counts[0], "the new program would have more rows than it loads"

    size, auc = outputs["tfra"].splitlines()
    assert numbers_of(size) == [users, items]
    expected = {}
    for table, count in (("user_emb", users), ("item_emb", items)):
        for slot in ("", f"_{table}-shadow_m", f"_{table}-shadow_v"):
            base = f"{table}{slot}_mht_1of1_rank0_size1"
            expected |= {f"{base}-keys": 8 * count, f"{base}-values": 4 * data["DIM"] * count}
    assert sizes_of(outputs["files"]) == expected
    assert (
        f"tfra: 2 tables, {sum(expected.values()) - 2 * 8 * (users + items):,} bytes"
        in (outputs["inspect"])
    )
    for table, count in (("user_emb", users), ("item_emb", items)):
        keys = f"table '{table}'\n  keys      {count:,} of int64\n  rows      8 of float32\n"
        assert keys in outputs["inspect"]
    states = "states    m of 8, v of 8"
    assert outputs["inspect"].count(states) == 2
    assert f"is whole: 2 tables, {users + items:,} keys" in outputs["convert"]

    expected = {}
    for table, count in (("user_0", users), ("item_0", items)):
        expected[f"{table}-key"] = SOK_HEADER + 8 * count
        for what in ("weight", "Adam-m", "Adam-v"):
            expected[f"{table}-{what}"] = SOK_HEADER + 4 * data["DIM"] * count
    assert sizes_of(outputs["sok"]) == expected
    assert outputs["sok-back"].endswith("\nfrom_tfra and from_sok are equal\n")

    size, auc_again, same = outputs["keras"].splitlines()
    assert numbers_of(size) == [users, items]
    assert auc_again == auc and same == "scores as before: True"
    aucs, differ = outputs["train"].splitlines()
    (before,), (new, old) = numbers_of(auc), numbers_of(aucs)
    assert new == old > before > 0.6
    assert differ.endswith("True")
    assert "unknown user: [[0.0]]" in outputs["serve"]
    assert outputs["serve"].endswith("scores as those of the model: True\n")
