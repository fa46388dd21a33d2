"""Texts of keys in what commands write and print."""

import csv

import numpy as np
import pytest

from sok_lite.cli.reading import open_sources
from sok_lite.engine.files.dump import dump
from sok_lite.engine.fingerprint import fingerprints
from sok_lite.engine.texts import TextStore
from tests.cli.helpers import CPU, ONE, fine, run
from tests.support.helpers import new_table

TEXTS = ["Oslo", "Lima", 'a "b", c\n', "", "tab\t", "x" * 500]


def with_texts(path, texts=TEXTS, row=1.0):
    """A checkpoint of a table that keeps texts, and one key whose text nobody knows."""
    encoded = [text.encode() for text in texts]
    keys = [*fingerprints(encoded).tolist(), 5]
    table = new_table(CPU, 2, name="town")
    table.texts = TextStore(lambda keys: np.ones(keys.size, bool))
    table.insert_or_assign(keys, np.full((len(keys), 2), row, np.float32))
    table.texts.add(dict(zip(keys, encoded, strict=False)))
    dump(path, [table], ONE, chunk_bytes=100)
    return dict(zip(keys, [*texts, None], strict=True))


def from_csv(path):
    with open(path, newline="", encoding="utf-8") as file:
        return {int(line["key"]): line["text"] for line in csv.DictReader(file)}


def texts_of_parquet(path):
    table = pytest.importorskip("pyarrow.parquet").read_table(path)
    assert table.column_names[:2] == ["key", "text"]
    return dict(zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True))


def texts_of_npz(path):
    with np.load(path) as found:
        parts = np.split(found["text_bytes"], found["text_ends"])[:-1]
        return {
            key: part.tobytes().decode()
            for key, part in zip(found["keys"].tolist(), parts, strict=True)
        }


@pytest.mark.parametrize(
    ("form", "read", "unknown"),
    [("csv", from_csv, ""), ("parquet", texts_of_parquet, None), ("npz", texts_of_npz, "")],
)
def test_texts_are_a_column_beside_their_keys(tmp_path, monkeypatch, form, read, unknown):
    monkeypatch.setattr("sok_lite.engine.files.saved_file.CHUNK_BYTES", 30)
    expected = with_texts(tmp_path / "c") | {5: unknown}
    fine("reshard", tmp_path / "c", tmp_path / "d", "--ranks", 2)
    fine("export", tmp_path / "d", "--format", form, "--to", tmp_path / "f")
    assert read(tmp_path / "f") == expected
    if form != "csv":
        assert open_sources(str(tmp_path / "f"))[0].num_keys == len(expected)


def test_texts_as_safetensors_and_where_there_is_no_place_for_them(tmp_path):
    expected = with_texts(tmp_path / "c")
    fine("convert", tmp_path / "c", tmp_path / "f", "--to-format", "safetensors")
    (source,) = open_sources(str(tmp_path / "f"))
    (keys,) = source.read("keys")
    texts = "".join(expected[key] or "" for key in keys.tolist())
    assert (tmp_path / "f").read_bytes().endswith(texts.encode())
    status, _, err = run("convert", tmp_path / "c", tmp_path / "h", "--to-format", "hkv")
    assert status == 0 and err == (
        "sok-lite convert: table 'town': left out the texts of 6 keys, which format hkv has no "
        "place for\n"
    )


def test_get_and_diff_show_texts(tmp_path):
    with_texts(tmp_path / "a")
    with_texts(tmp_path / "b", ["Oslo", "Paris"], row=2.0)
    key = fingerprints([b"Lima"])[0]
    for asked in ("Lima", key):
        assert f"\nkey {key} 'Lima'\n" in fine("get", tmp_path / "a", "town", asked)
    status, out, _ = run("get", tmp_path / "a", "town", "--text", "5")
    assert status == 1 and f"key {fingerprints([b'5'])[0]} '5': missing" in out
    status, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    first, second, rows = out.splitlines()
    oslo, paris, tab = fingerprints([b"Oslo", b"Paris", b"tab\t"])
    assert f"{key} 'Lima'" in first and f"{tab} 'tab\\t'" in first
    assert second.endswith(f"1 key only in {tmp_path / 'b'}: {paris} 'Paris'")
    assert rows.endswith(f"rows of 2 of 2 keys differ, by up to 1: 5, {oslo} 'Oslo'")
