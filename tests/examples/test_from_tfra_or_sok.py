"""examples/from_tfra_or_sok.ipynb: what it says is true of the data that it makes."""

import numpy as np

from tests.support.notebooks import data_of, notebook, numbers_of, printed

NAME = "from_tfra_or_sok"


def test_what_it_says_is_true():
    check_facts(printed(notebook(NAME)))


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
    for table, count in (("user_emb", users), ("item_emb", items)):
        keys = f"table '{table}'\n  keys      {count:,} of int64\n  rows      8 of float32\n"
        assert keys in outputs["inspect"]
    states = "states    m of 8, v of 8"
    assert outputs["inspect"].count(states) == 2
    assert f"is whole: 2 tables, {users + items:,} keys" in outputs["convert"]

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
