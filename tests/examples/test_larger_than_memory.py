"""examples/larger_than_memory.ipynb: what it says is true of the data that it makes."""

import numpy as np
import pytest

from tests.support.notebooks import data_of, notebook, numbers_of, printed

NAME = "larger_than_memory"


def test_what_it_says_is_true():
    check_facts(printed(notebook(NAME)))


def table_of(text):
    """Returns the numbers of each line of a table of results, by the name before them."""
    return {line[:19].rstrip(): numbers_of(line[19:]) for line in text.splitlines()[1:]}


def check_facts(outputs):
    """Compares what a run printed with counts of the data that it made, and with what it says."""
    data = data_of(NAME)
    shown = data["shown"]
    total, times = len(np.unique(shown)), np.bincount(shown.ravel())
    ad, distinct = outputs["data"].splitlines()
    assert ad == f"ad {data['ad_ids'][0, 0]}: clicked {data['clicked'][0, 0]:.0f}"
    assert numbers_of(distinct) == [len(np.unique(shown[0])), 1, total, data["NUM_DAYS"]]
    assert (times == 1).sum() / shown.size > 0.4
    assert total / data["CAPACITY"] == pytest.approx(64, abs=1)

    found = table_of(outputs["limit"]) | table_of(outputs["admission"])
    for name, (keys, *_) in found.items():
        assert keys == (total if name == "no limit" else data["CAPACITY"])
    # Whom the text calls better.
    lru, lfu, epoch_lru, epoch_lfu = (
        found[name][1:] for name in ("kLru", "kLfu", "kEpochLru", "kEpochLfu")
    )
    assert lfu[0] == 0.44 > epoch_lfu[0] > lru[0] and lfu[1] == 0.35 < lru[1] < epoch_lfu[1]
    assert epoch_lru == pytest.approx(lru, abs=0.01) and epoch_lfu[:2] == [0.43, 0.43]
    no_limit = found["no limit"][1:]
    for name in ("kLru, 2nd time", "kEpochLfu, 2nd time"):
        rates, aucs = found[name][1:3], found[name][3:]
        assert rates == pytest.approx([0.5, 0.5], abs=0.015) and max(rates) < no_limit[0]
        assert aucs == pytest.approx(no_limit[2:], abs=0.025)
