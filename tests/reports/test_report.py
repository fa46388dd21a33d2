"""A report as text, HTML and JSON; what several ranks say together."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.engine.table import clock as clock_module
from sok_lite.reports.report import Report, TableReport
from sok_lite.reports.tables import report_of
from tests.support.filled_tables import filled
from tests.support.helpers import new_table

CPU = get_backend("cpu")
KEY = 7_777_777_123
NAME = '<b>&"item'


def parts():
    tables = [new_table(CPU, 2, name=NAME) for _ in range(2)]
    for table, count in zip(tables, (30, 10), strict=True):
        table.lookup(np.arange(KEY, KEY + count))
        table.lookup(np.arange(KEY, KEY + 5))
    return [report_of(table) for table in tables]


def report(ranks=2):
    return Report((TableReport.sum_of(parts()[:ranks]),), ranks, 0.0)


def test_the_reports_of_ranks_add_up():
    both, each = report().tables[0], parts()
    assert (both.keys, both.keys_of_ranks, both.balance) == (40, (30, 10), 1.5)
    assert both.hit_rate == 10 / 50
    assert both.num_bytes == sum(both.bytes_of_ranks) == sum(part.num_bytes for part in each)
    assert both.norms.num_keys == both.ages.num_keys == 40
    assert TableReport.sum_of(each[:1]) == each[0]
    assert each[0].balance is None


def test_rows_that_all_ranks_share_are_counted_once():
    shared = report_of(new_table(CPU))._replace(var_type="remote", keys=7)
    assert TableReport.sum_of([shared, shared]).keys == 7


def test_the_text_says_what_there_is(monkeypatch):
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(time=lambda: 1000.0))
    made = report()
    text = str(made)
    for said in (
        "Tables in memory at 1970-01-01 00:00:00 UTC: 1 table, 2 ranks, ",
        "keys       40 of int64, rows of 2 x float32, hbm",
        "new        40",
        "lost       0 evicted, 0 expired or erased",
        "hit rate   0.200 of 50 looked up keys",
        "balance    10 to 30 keys on a rank; rank 0 has 1.50 of the mean",
        "below 1 s  ############################## 40",
    ):
        assert said in text, said
    assert repr(made) == text


def test_the_json_is_the_numbers():
    made = report()
    shown = json.loads(made.to_json())
    assert shown == made.as_dict()
    (table,) = shown["tables"]
    assert (table["keys"], table["balance"], table["hit_rate"]) == (40, 1.5, 0.2)
    assert TableReport.of_dict(table) == made.tables[0]
    assert made[NAME] is made.tables[0]
    with pytest.raises(KeyError, match="There is no table"):
        made["x"]


def test_the_html_is_well_formed_and_escaped():
    html = report()._repr_html_()
    root = ElementTree.fromstring(html)  # of HTML that is XML too
    named = [each.text for each in root.iter("div") if each.get("class") == "sok-name"]
    assert named == [NAME] and "<b>" not in html
    captions = [each.text.split(":")[0] for each in root.iter("caption")]
    assert captions == ["bytes by part", "age", "norm"]
    for chart in (each for each in root.iter("table") if each.get("class") == "sok-bars"):
        bars = [float(each.get("style")[len("width:") : -1]) for each in chart.iter("div")]
        counts = [line.findall("td")[1].text for line in chart.iter("tr")]
        counts = [count for count in counts if count not in ("0", "0 B")]
        assert len(bars) == len(counts) > 0 and max(bars) == 100
        if "KiB" not in counts[0]:
            counts = [int(count) for count in counts]
            np.testing.assert_allclose(bars, 100 * np.array(counts) / max(counts), atol=0.05)
    assert "<script" not in html and "http" not in html and len(html) < 5000
    # Nothing else on the page of a notebook is meant, and it has no color of its own.
    style = root.find("style").text
    assert all(each.strip().startswith(".sok-report") for each in style.split("}")[:-1])
    assert "#" not in style and "rgb" not in style


def test_no_key_is_in_it():
    made = report()
    for text in (str(made), made._repr_html_(), made.to_json()):
        assert str(KEY)[:7] not in text


def test_a_table_with_two_tiers_and_states_says_where_they_are():
    options = {"var_type": "hybrid", "max_capacity": 256, "max_hbm_for_vectors": 60 * 12 / 2**30}
    table, _ = filled(CPU, 100, **options)
    for _ in range(3):
        table.lookup(np.arange(100))
    text = str(Report((report_of(table),), 1, 0.0))
    for part in ("rows near", "states near", "rows far", "states far", "looked up lately"):
        assert part in text
