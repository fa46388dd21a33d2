"""Commands read checkpoints whose rows are in several files, and write them as one."""

import json

import numpy as np
import pytest

from sok_lite.engine.files import manifest
from sok_lite.engine.files.source import checkpoint_sources, columns_of
from tests.cli.helpers import fine, loaded, run
from tests.support.filled_tables import KINDS, some_keys
from tests.support.in_parts import dump_in_parts


def in_parts(path, ranks, kind="hbm"):
    """A checkpoint of increments, and beside it one of the same at once."""
    dump_in_parts(path / "parts", ranks, chunk_bytes=100, at_once=path / "whole", **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_increments_are_read_as_one(tmp_path, monkeypatch, kind):
    ranks, piece_bytes = (1, 1 << 20) if kind == "kLru" else (2, 100)
    monkeypatch.setattr("sok_lite.engine.files.saved_file.CHUNK_BYTES", piece_bytes)
    in_parts(tmp_path, ranks, kind)
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    fine("diff", parts, whole, "--all")
    fine("verify", parts)
    for number in (1, 3):
        to = tmp_path / f"of {number}"
        fine("reshard", parts, to, "--ranks", number)
        fine("diff", to, whole, "--all")
        (facts,) = manifest.read(to).tables.values()
        assert all(shard.changed is None for shard in facts.shards)
        expected = loaded(whole, "table", number, **KINDS[kind])
        assert loaded(to, "table", number, **KINDS[kind]) == expected
    shown = json.loads(fine("inspect", parts, "--json"))["tables"][0]
    assert shown["increments"] == 3
    assert shown["bytes"] == sum(path.stat().st_size for path in parts.rglob("*.safetensors"))
    assert "bytes     " in (text := fine("inspect", parts)) and "with 3 increments" in text


def test_what_is_wrong_with_an_increment_is_found(tmp_path):
    in_parts(tmp_path, 1)
    (facts,) = manifest.read(tmp_path / "parts").tables.values()
    for part in facts.shards[0].chain:
        path = tmp_path / "parts" / part.file
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        status, out, _ = run("verify", tmp_path / "parts")
        assert status == 1 and f"{path}: table 'table', chunk " in out and "1 finding\n" in out
        path.unlink()
        status, out, _ = run("verify", tmp_path / "parts")
        assert status == 1 and f"{path}: table 'table': the file is missing" in out
        path.write_bytes(data)
    fine("verify", tmp_path / "parts")


def test_keys_of_an_increment_without_a_row_are_found(tmp_path):
    in_parts(tmp_path, 1)
    found = manifest.read(tmp_path / "parts")
    (shard,) = found.tables["table"].shards
    # The file that has the rows of new keys is left out.
    cut = shard._replace(before=shard.before[:2])
    tables = {"table": found.tables["table"]._replace(shards=(cut,))}
    manifest.publish(tmp_path / "parts", manifest.as_text(found._replace(tables=tables)))
    status, out, _ = run("verify", tmp_path / "parts")
    assert status == 1 and "3 of its keys have no row there" in out
    assert run("reshard", tmp_path / "parts", tmp_path / "to", "--ranks", 2)[0] == 3
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("kind", ["hbm", "kEpochLfu"])
def test_single_keys_are_found_in_increments(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("sok_lite.engine.files.saved_file.CHUNK_BYTES", 50)
    in_parts(tmp_path, 2, kind)
    parts, whole = (checkpoint_sources(tmp_path / name)[0] for name in ("parts", "whole"))
    names = [column.name for column in columns_of(whole)]
    columns = [np.concatenate(list(whole.read(name))) for name in names]
    expected = dict(zip(columns[0].tolist(), zip(*columns, strict=True), strict=True))
    missing = set(some_keys(61).tolist()) - expected.keys()
    found = parts.find([*expected, *missing], names)
    assert missing and found.keys() == expected.keys()
    for key, entries in expected.items():
        for name, entry in zip(names, entries, strict=True):
            np.testing.assert_array_equal(found[key][name], entry, strict=True)
