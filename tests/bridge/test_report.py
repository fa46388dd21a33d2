"""`sok.report` finds the tables in what it is given, and refuses what has none."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite import kv_variable


def looked_up(n=5, **options):
    table = sok.DynamicVariable(2, initializer="ones", **options)
    tf.nn.embedding_lookup(table, np.arange(n))
    return table


def test_the_numbers_are_those_of_the_table():
    table = looked_up(name="shop")
    report = sok.report(table)
    assert (report.ranks, report.source) == (1, "")
    found = report["shop"]
    assert (found.keys, found.dim, found.dtype, found.var_type) == (5, 2, "float32", "hbm")
    assert found.counts["inserted"] == table.statistics().inserted_total == 5
    assert found.norms.shown() == [("1.25 to 1.6", 5)]  # the root of 2
    assert "table 'shop'" in str(report) and ">shop<" in report._repr_html_()


def test_variables_of_other_apis_are_reported():
    tfra = de.get_variable("users", dim=3)
    tfra.upsert(tf.range(4, dtype=tf.int64), tf.zeros([4, 3]))
    tfplus = kv_variable.get_kv_variable("clicks", embedding_dim=3)
    report = sok.report({"a": tfra, "b": tfplus})
    assert [(table.name, table.keys) for table in report.tables] == [("users", 4), ("clicks", 0)]
    assert report["users"].norms.others["zero"] == 4


def test_tables_come_once_and_in_their_order():
    one, two = looked_up(3, name="one"), looked_up(4, name="two")
    report = sok.report([one, (two, one)])
    assert [table.name for table in report.tables] == ["one", "two"]


def test_a_table_that_is_somewhere_else_tells_its_size():
    from sok_lite.engine.table.remote import RemoteTable
    from sok_lite.reports.tables import report_of

    class Rows(dict):
        def size(self):
            return len(self)

    report = report_of(RemoteTable(lambda: looked_up(0, name="far").table, Rows({1: b"", 2: b""})))
    assert (report.keys, report.var_type, report.counts, report.norms) == (2, "remote", None, None)


def test_what_cannot_be_reported_is_refused():
    for given in (3, [], tf.Module(), tf.Variable([1.0])):
        with pytest.raises(TypeError, match="Expected tables: a variable such as"):
            sok.report(given)
    static = sok.Variable(np.ones((3, 2), np.float32), name="fixed")
    with pytest.raises(TypeError, match="'fixed.*', a static variable"):
        sok.report([looked_up(), static])
    with pytest.raises(RuntimeError, match="outside of the tf.function"):
        tf.function(lambda: sok.report(looked_up()))()
