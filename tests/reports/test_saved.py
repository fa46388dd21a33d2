"""Reports in files: a page of HTML, and JSON that comes back as the same report."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.engine.table.remote import RemoteTable
from sok_lite.reports.report import Report
from sok_lite.reports.tables import report_of
from tests.support.helpers import new_table


class Page(HTMLParser):
    """The tags and texts of a page, and what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.fetched = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.texts.append(data)


def made(name="a<b>"):
    table = new_table(get_backend("cpu"), 3, name=name)
    table.lookup(np.arange(20))
    far = RemoteTable(lambda: new_table(get_backend("cpu"), 3, name="far"), Far())
    return Report((report_of(table), report_of(far)), 1, 1.5e9)


class Far(dict):
    def size(self):
        return 3


def test_a_page_has_all_of_the_report_and_nothing_from_elsewhere(tmp_path):
    made().save_html(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text("utf-8")
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>") and "color-scheme: light dark" in text
    assert page.fetched == ["#table-0", "#table-1"] and "script" not in page.tags
    assert all(f'id="{link[1:]}"' in text for link in page.fetched) and "url(" not in text
    assert 'name="viewport"' in text and len(text) < 12_000
    assert {"a<b>", "far", "norm: L2 length of a row"} <= set(page.texts)
    made("other").save_html(tmp_path / "r.html")
    assert "a&lt;b&gt;" not in (tmp_path / "r.html").read_text()
    with pytest.raises(OSError, match="no/r.html"):
        made().save_html(tmp_path / "no" / "r.html")


def test_json_comes_back_as_the_same_report():
    for report in (made(), replace(made(), source="runs/model", tables=())):
        again = Report.from_json(report.to_json())
        assert again == report and str(again) == str(report)
        assert Report.from_json(report.to_json().encode()).as_dict() == report.as_dict()


def test_what_is_no_report_is_refused():
    for text in [
        *("", "[]", "{}", '{"tables": [{}]}', "3", b"\xff", '{"tables": {"a": 1}}', None),
        '{"tables": [], "ranks": "x", "time": 0, "source": ""}',
        '{"tables": [], "ranks": 1, "time": null, "source": ""}',
        '{"tables": [], "ranks": 1, "time": 1%s, "source": ""}' % ("0" * 400),
        "[" * 1_000_000,
    ]:
        with pytest.raises(ValueError, match="This is no report as `to_json` gives it"):
            Report.from_json(text)


def test_a_report_of_another_version_names_what_it_lacks():
    described = made().as_dict()
    del described["tables"][0]["pending"]
    with pytest.raises(ValueError, match="another version.*KeyError: 'pending'"):
        Report.from_json(json.dumps(described))
