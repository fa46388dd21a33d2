"""`keep_texts=True`: a key finds its text again, after training, checkpoints and files of Keras."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.cli.main import main
from sok_lite.engine import texts as engine_texts
from sok_lite.engine.files import manifest
from sok_lite.engine.files.text_file import texts_in

CITIES = ["Oslo", "São Paulo", "", "zero\0", "x" * 500]


@pytest.fixture
def table(sk):
    return sk.Table("city", 2, key_type=str, keep_texts=True)


def said(table, keys=None, **options):
    """The texts of keys of a table, of all that it holds without any, as a list of bytes."""
    keys = table.export()[0] if keys is None else keys
    return table.texts(keys, **options).numpy().tolist()


def encoded(texts):
    return [text.encode() for text in texts]


def fitted(keras, table, texts, **options):
    ids = keras.Input([], dtype="string")
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    model.compile("sgd", "mse", **options)
    model.fit(tf.constant(texts), np.ones([len(texts), 1]), verbose=0)
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_rows_find_their_texts_after_fit(keras, table, run_eagerly):
    fitted(keras, table, CITIES + CITIES[:2], run_eagerly=run_eagerly)
    assert sorted(said(table)) == sorted(encoded(CITIES))
    keys = sok.hash_strings([["Oslo", "zero\0"], ["", "Oslo"]])
    assert said(table, keys) == [[b"Oslo", b"zero\0"], [b"", b"Oslo"]]
    assert table.texts(tf.constant(keys[0, 0])).numpy() == b"Oslo"
    assert said(table, keys[0].tolist()) == [b"Oslo", b"zero\0"]
    assert said(table, np.zeros([0, 3], np.int64)) == []


def test_every_kind_of_ids_is_remembered(sk, table):
    layer = sk.Embedding(table, "sum", mask_value="pad")
    layer(tf.constant([["a", "pad"]]), training=True)
    layer(tf.ragged.constant([["b"], ["c", "pad"]]), training=True)
    layer(tf.SparseTensor([[0, 0], [1, 0]], ["d", "pad"], [2, 1]), training=True)
    sk.Embedding(table)(tf.ragged.constant([["e"], []]), training=True)
    table(tf.constant("f"), training=True)
    table.assign(["g"], np.ones([1, 2]))
    assert sorted(said(table)) == encoded("abcdefg")


def test_what_only_looks_is_not_remembered(keras, table):
    model = fitted(keras, table, ["Oslo"])
    model.predict(tf.constant(["Lima"]), verbose=0)
    table(tf.constant(["Lima"]))
    table.contains(["Lima"])
    table.trainable = False
    table(tf.constant(["Lima"]), training=True)
    (key,) = sok.hash_strings(["Lima"])
    assert said(table, [key], missing="?") == [b"?"]
    with pytest.raises(ValueError, match=f"No rank knows the text of 1 key of.*{key}"):
        table.texts([key])


def test_the_memory_of_texts_is_counted(keras, sk, table):
    texts, counts = [f"{i:020}" for i in range(3000)], sk.TableMetrics()
    ids = keras.Input([], dtype="string")
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    model.compile("sgd", "mse")
    data = tf.constant(texts), np.ones([len(texts), 1])
    model.fit(*data, batch_size=1000, verbose=0, callbacks=[counts])
    kept, numbers = table.variable.table.texts.all(), table.statistics()
    objects = sum(sys.getsizeof(each) for pair in kept.items() for each in pair)
    assert len(kept) == 3000
    assert numbers.text_bytes == pytest.approx(objects + sys.getsizeof(kept), rel=0.2)
    in_tables = numbers.index_bytes + numbers.near_bytes
    assert counts.history["city/bytes"] == [in_tables + numbers.text_bytes]
    report = sok.report(table)["city"]
    assert report.memory["texts"] == numbers.text_bytes == report.num_bytes - in_tables
    assert f'part="texts",tier="host"}} {numbers.text_bytes}' in sok.metrics.prometheus(table)
    assert " texts=" in str(table.variable) and "memory of texts" in table.variable._repr_html_()
    assert sk.Table("plain", 2, key_type=str).statistics().text_bytes == 0


def test_texts_are_in_checkpoints(sk, table, tmp_path):
    table(tf.constant(CITIES), training=True)
    table.erase(["Oslo"])
    sok.dump(tmp_path, table)
    again = sk.Table("city", 2, key_type=str, keep_texts=True)
    sok.load(tmp_path, again)
    assert sorted(said(again)) == sorted(encoded(CITIES[1:]))
    (oslo,) = sok.hash_strings(["Oslo"])
    assert said(again, [oslo], missing=b"") == [b""]
    sok.dump(tmp_path, table)  # what is of late outlives one
    assert said(table, [oslo], missing=b"") == [b""]


@pytest.mark.parametrize("keep_texts", [False, True])
def test_texts_that_are_loaded_as_integers_are_told(sk, tmp_path, caplog, keep_texts):
    saved = sk.Table("city", 2, key_type=str, keep_texts=keep_texts)
    saved(tf.constant(CITIES), training=True)
    sok.dump(tmp_path, saved)
    for again in (sk.Table("city", 2, key_type=str), sok.DynamicVariable(2, name="city")):
        sok.load(tmp_path, again)  # hashes may come as integers
    assert not caplog.records
    table = sk.Table("city", 2)
    sok.load(tmp_path, table)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "'city' was made for integers" in said and "key_type=str" in said
    rows = table(tf.constant(sok.hash_strings(CITIES)))
    np.testing.assert_array_equal(rows, saved(tf.constant(CITIES)))


def test_files_of_keras_have_the_texts(keras, table, tmp_path):
    model = fitted(keras, table, CITIES)
    model.save(tmp_path / "m.keras")
    (loaded,) = [
        layer
        for layer in keras.models.load_model(tmp_path / "m.keras").layers
        if layer.name == "city"
    ]
    assert sorted(said(loaded)) == sorted(encoded(CITIES))
    config = loaded.get_config()
    assert config["keep_texts"] is True and type(table).from_config(config).get_config() == config
    model.save_weights(tmp_path / "m.weights.h5")
    fitted(keras, table, ["other"])
    model.load_weights(tmp_path / "m.weights.h5")
    assert sorted(said(table)) == sorted(encoded(CITIES))
    assert said(table, sok.hash_strings(["other"]), missing="") == [b""]


def test_texts_of_a_file_of_keras_become_those_of_a_checkpoint(keras, table, tmp_path):
    fitted(keras, table, CITIES).save_weights(tmp_path / "m.weights.h5")
    assert main(["convert", str(tmp_path / "m.weights.h5"), str(tmp_path / "c")]) == 0
    (facts,) = manifest.read(tmp_path / "c").tables.values()
    assert sorted(texts_in(facts, str(tmp_path / "c")).values()) == sorted(encoded(CITIES))


def test_a_file_without_texts_is_read(keras, sk, table, tmp_path):
    plain = sk.Table("city", 2, key_type=str)
    fitted(keras, plain, CITIES).save_weights(tmp_path / "m.weights.h5")
    model = fitted(keras, table, ["Oslo"])
    model.load_weights(tmp_path / "m.weights.h5")
    assert len(table) == len(CITIES) and set(said(table, missing="?")) == {b"?"}


def test_texts_of_keys_that_went_go_after_a_while(table, monkeypatch):
    monkeypatch.setattr(engine_texts, "RECENT", 50)
    table(tf.constant([f"kept {i}" for i in range(20)]), training=True)
    for step in range(20):
        texts = [f"{step} {i}" for i in range(30)]
        table(tf.constant(texts), training=True)
        table.erase(texts)
    assert len(table.variable.table.texts) < 200 and len(said(table)) == 20


REFUSED = {
    "no texts to keep": (
        lambda sk, t: sk.Table("t", 2, keep_texts=True),
        ValueError,
        "Only a table of key_type=str",
    ),
    "no bool": (
        lambda sk, t: sk.Table("t", 2, key_type=str, keep_texts=1),
        TypeError,
        "`keep_texts` must be a bool",
    ),
    "not kept": (
        lambda sk, t: sk.Table("t", 2, key_type=str).texts([3]),
        ValueError,
        "'t' are not kept. Make it with keep_texts=True",
    ),
    "texts for keys": (lambda sk, t: t.texts(["Oslo"]), TypeError, "int64 keys.*str"),
    "int32": (lambda sk, t: t.texts(np.int32([3])), TypeError, "int64 keys.*int32"),
    "missing": (lambda sk, t: t.texts([3], missing=3), TypeError, "`missing` must be a text"),
    "a function": (
        lambda sk, t: tf.function(lambda: t.texts(tf.constant([3], tf.int64)))(),
        RuntimeError,
        "outside of the tf.function",
    ),
}


def test_what_does_not_fit_is_refused(sk, table):
    for call, error, text in REFUSED.values():
        with pytest.raises(error, match=text):
            call(sk, table)
