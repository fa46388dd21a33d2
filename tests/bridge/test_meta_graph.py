"""A meta graph that a TF1 saver writes leaves tables out, and cannot be imported."""

import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
KINDS = {
    "sok.DynamicVariable": lambda: sok.DynamicVariable(2, initializer="ones", name="table"),
    "de.CuckooHashTable": lambda: de.get_variable("table", dim=2, initializer=1.0),
    "KvVariable": lambda: get_kv_variable("table", 2, initializer=tf1.ones_initializer()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_written_without_warnings_and_refuses_an_import(kind, tmp_path, caplog):
    with tf.Graph().as_default():
        table = KINDS[kind]()
        look_up = de.embedding_lookup if kind.startswith("de.") else tf.nn.embedding_lookup
        rows = look_up(table, tf.constant([1, 2], tf.int64))
        dense = tf1.get_variable("dense", initializer=1.0)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(rows)
            # SOK's tables are not saved by savers.
            saver = tf1.train.Saver([dense] if kind.startswith("sok.") else None)
            tf.get_logger().propagate = True
            try:
                with caplog.at_level("WARNING"):
                    path = saver.save(session, str(tmp_path / "model"))
            finally:
                tf.get_logger().propagate = False
    assert not [record for record in caplog.records if "serializ" in record.getMessage()]
    with tf.Graph().as_default():
        says = f"does not hold {kind} 'table.*Build the graph again"
        with pytest.raises(NotImplementedError, match=says):
            tf1.train.import_meta_graph(f"{path}.meta")
