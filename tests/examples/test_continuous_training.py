"""examples/continuous_training.ipynb: what it says is true of the data that it makes."""

import numpy as np
import pytest

from tests.support.notebooks import data_of, notebook, numbers_of, printed

NAME = "continuous_training"
KEPT = {"reader": 5, "article": 1}  # days


def test_what_it_says_is_true():
    check_facts(printed(notebook(NAME)))


def a_week(data):
    """Yields of each day and kind of id: keys kept, new and expired, of today, and ever seen."""
    last = {kind: {} for kind in KEPT}
    ever = {kind: set() for kind in KEPT}
    for day in data["days"]:
        facts = {}
        for kind, limit in KEPT.items():
            today = set(data[f"{kind}_ids"][day].tolist())
            new = len(today - last[kind].keys())
            last[kind] |= dict.fromkeys(today, day)
            gone = [key for key, seen in last[kind].items() if seen <= day - limit]
            for key in gone:
                del last[kind][key]
            ever[kind] |= today
            facts[kind] = len(last[kind]), new, len(gone), len(today), len(ever[kind])
        yield int(day), facts


def check_facts(outputs):
    """Compares what a run printed with counts of the data that it made, and with what it says."""
    data = data_of(NAME)
    week = dict(a_week(data))
    num_days, articles = data["NUM_DAYS"], data["article_ids"]
    seen = set()
    lines = outputs["data"].splitlines()[1:]
    for line, (day, facts) in zip(lines, week.items(), strict=True):
        today = set(articles[day].tolist())
        counts = facts["reader"][3], facts["article"][3], len(today - seen)
        assert numbers_of(line) == [day, data["STEPS"] * data["BATCH_SIZE"], *counts]
        seen |= today

    assert numbers_of(outputs["model"]) == [0, 0]
    tomorrow = week.pop(num_days + 1)
    lines = outputs["week"].splitlines()[1:]
    for line, (day, facts) in zip(lines, week.items(), strict=True):
        assert numbers_of(line) == [day, *facts["reader"][:3], *facts["article"][:3]]
        assert (facts["reader"][2] > 0) == (day >= 6)
        assert facts["article"][0] == facts["article"][3]
        assert day == 1 or 290 <= facts["article"][1] <= 305
        assert day < 5 or facts["reader"][3] / facts["reader"][0] == pytest.approx(0.4, abs=0.02)

    end = week[num_days]
    kept = [numbers_of(line) for line in outputs["keys"].splitlines()[1:]]
    assert kept == [[end[kind][4], end[kind][0]] for kind in ("reader", "article")]

    aucs = np.array([numbers_of(line)[-3::2] for line in outputs["auc"].splitlines()])
    for line, name in zip(
        outputs["auc"].splitlines(), ("trains, ", "trains, ", "stopped"), strict=True
    ):
        assert line.startswith(name)
    expiring, keeping, stopped = aucs
    assert abs(aucs[:, 0] - aucs[0, 0]).max() <= 0.02 and 0.5 < stopped[1] < 0.58
    assert min(expiring.min(), keeping.min()) > 0.69 and abs(expiring - keeping).max() <= 0.02
    assert not set(articles[1].tolist()) & set(articles[4].tolist())

    loaded, auc, after = (numbers_of(line) for line in outputs["next"].splitlines())
    assert loaded == [end[kind][0] for kind in KEPT]
    assert after == [tomorrow[kind][0] for kind in KEPT]
    same_auc, same = outputs["same"].splitlines()
    assert numbers_of(same_auc) == pytest.approx(auc, abs=0.002) and auc[0] > 0.69
    assert same == "tables and never_stopped are equal within 1e-06"
