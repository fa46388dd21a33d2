"""Texts of keys in a checkpoint: on any number of ranks, in increments, in the background."""

import json
import os

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.cli.main import main
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump, dump_in_background
from sok_lite.engine.files.load import load
from sok_lite.engine.files.shard import NOT_WRITTEN, Written
from sok_lite.engine.texts import KeyTexts, TextStore
from tests.support.helpers import new_table

ONE = SingleCommunicator()
CPU = get_backend("cpu")


def texts_of(keys):
    return {int(key): f"key {key}".encode() for key in keys}


def table_with(keys, known=None, rank=0, ranks=1):
    """A table of a rank: it owns its part of the keys, and knows texts whoever owns them."""
    table, keys = new_table(CPU, 2), np.array(keys, np.int64)
    table.texts = TextStore(lambda keys: np.ones(keys.size, bool))
    table.lookup(keys[keys % ranks == rank])
    table.texts.add(texts_of(keys if known is None else known))
    return table


def loaded(path, mode="replace", table=None, comm=ONE):
    table = table_with([]) if table is None else table
    load(path, [table], comm, mode)
    return table


def test_texts_come_back_with_the_rows(tmp_path):
    for keys in ([], [7], range(33)):
        dump(tmp_path, [table_with(keys)], ONE, chunk_bytes=50)
        table = loaded(tmp_path)
        assert table.texts.all() == texts_of(keys) and table.size == len(keys)
    begun = dump_in_background(tmp_path, [table], ONE)  # with those of when it began
    table.lookup([99])
    table.texts.add(texts_of([99]))
    begun.wait()
    assert loaded(tmp_path).texts.all() == texts_of(range(33))
    table.erase([1, 2, 3])  # texts of keys that are gone are not written
    for _ in range(2):  # what is of late outlives one
        dump(tmp_path, [table], ONE)
        assert loaded(tmp_path).texts.all() == texts_of([0, *range(4, 33), 99])
    assert table.texts.all() == texts_of([0, *range(4, 33), 99])


def test_texts_are_downloaded(stores_here):
    pytest.importorskip("fsspec")
    dump("memory://texts/c", [table_with(range(5))], ONE)
    assert loaded("memory://texts/c").texts.all() == texts_of(range(5))


def test_an_increment_has_all_texts(tmp_path):
    table = table_with(range(5))
    dump(tmp_path, [table], ONE)
    table.lookup([9])
    table.texts.add(texts_of([9]))
    dump(tmp_path, [table], ONE, incremental=True)
    (shard,) = manifest.read(tmp_path).tables[table.name].shards
    assert shard.texts.keys == 6 and [each.texts for each in shard.before] == [None]
    assert loaded(tmp_path).texts.all() == texts_of([*range(5), 9])
    table.lookup([10])
    dump(tmp_path, [table], ONE, incremental=True)  # it goes on from one with texts
    assert loaded(tmp_path).size == 7


def test_a_merge_keeps_the_texts_that_there_are(tmp_path):
    dump(tmp_path, [table_with(range(5))], ONE)
    table = loaded(tmp_path, "merge", table_with(range(3, 8)))
    assert table.texts.all() == texts_of(range(8))
    assert loaded(tmp_path, table=table).texts.all() == texts_of(range(5))


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_any_number_of_ranks_has_all_texts(tmp_path, readers):
    keys = range(40)
    # Each rank looks up some of all keys, and most keys come on two ranks.
    dump_by = {rank: [key for key in keys if (key // 3 + rank) % 3] for rank in range(3)}

    def writing(comm):
        dump(tmp_path, [table_with(keys, dump_by[comm.rank], comm.rank, 3)], comm)

    def reading(comm):
        table = loaded(tmp_path, comm=comm)
        return table.texts.all(), table.size

    run_ranks(3, writing)
    shards = manifest.read(tmp_path).tables["table"].shards
    assert sum(shard.texts.keys for shard in shards) == len(keys)
    found = run_ranks(readers, reading)
    assert sum(size for _, size in found) == len(keys) == sum(len(texts) for texts, _ in found)
    assert {key: text for texts, _ in found for key, text in texts.items()} == texts_of(keys)


def test_with_and_without_texts_go_together(tmp_path):
    dump(tmp_path / "with", [table_with([1, 2])], ONE)
    plain = new_table(CPU, 2)
    load(tmp_path / "with", [plain], ONE)
    assert plain.size == 2 and plain.texts is None
    dump(tmp_path / "without", [plain], ONE)
    assert "texts" not in (tmp_path / "without" / manifest.NAME).read_text()
    assert loaded(tmp_path / "without", table=table_with([5])).texts.all() == {}


def test_ranks_that_do_not_agree_raise_before_anything_is_written(tmp_path):
    def program(comm):
        table = table_with([1], rank=comm.rank, ranks=2)
        if comm.rank:
            table.texts = None
        with pytest.raises(ValueError, match="must be the same on all ranks.*with texts"):
            dump(tmp_path, [table], comm)

    run_ranks(2, program)
    assert os.listdir(tmp_path) == []


def test_every_changed_byte_of_texts_is_noticed(tmp_path):
    dump(tmp_path, [table_with(range(3))], ONE)
    (file,) = tmp_path.glob("data-*/*.texts.safetensors")
    data = file.read_bytes()
    for i in range(0, len(data), 5):
        file.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        table = table_with([8])
        with pytest.raises(ValueError, match=r"texts\.safetensors, a file of table.*is corrupt"):
            loaded(tmp_path, table=table)
        assert table.texts.all() == texts_of([8]) and table.size == 1
    file.unlink()
    with pytest.raises(FileNotFoundError):
        loaded(tmp_path)


def test_a_manifest_that_lies_of_texts_is_not_believed(tmp_path):
    for change in (
        lambda texts, rows: texts._replace(keys=4),
        lambda texts, rows: texts._replace(num_bytes=1),
        lambda texts, rows: texts._replace(written=NOT_WRITTEN),
        lambda texts, rows: texts._replace(written=Written(10, 4, (1, 2, 3))),
        lambda texts, rows: texts._replace(file="../other.safetensors"),
        lambda texts, rows: texts._replace(keys=-1),
        lambda texts, rows: texts._replace(file=rows.file, written=rows.written),
    ):
        dump(tmp_path, [table_with(range(3))], ONE)
        found = manifest.read(tmp_path)
        facts = found.tables["table"]
        (shard,) = facts.shards
        shard = shard._replace(texts=change(shard.texts, shard))
        tables = {"table": facts._replace(shards=(shard,))}
        manifest.publish(str(tmp_path), manifest.as_text(found._replace(tables=tables)))
        with pytest.raises(ValueError, match="is corrupt") as said:
            loaded(tmp_path)
    assert "corrupt: expected 'ends' I64 [3], and it has none" in str(said.value)


def test_texts_that_do_not_end_where_they_say_are_not_believed(tmp_path, monkeypatch):
    table = table_with(range(3))
    texts = KeyTexts.of(table.texts.all())
    wrong = texts._replace(ends=texts.ends[::-1].copy())
    monkeypatch.setattr("sok_lite.engine.files.dump.prune_texts", lambda *_: wrong)
    dump(tmp_path, [table], ONE)
    with pytest.raises(ValueError, match="corrupt: the ends of its texts do not rise"):
        loaded(tmp_path)


def test_a_file_of_texts_has_exactly_these_tensors(tmp_path):
    table = table_with([2, -1])
    dump(tmp_path, [table], ONE)
    (file,) = tmp_path.glob("data-*/*.texts.safetensors")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert list(head) == ["__metadata__", "keys", "ends", "data"]
    assert [head[name]["dtype"] for name in ("keys", "ends", "data")] == ["I64", "I64", "U8"]
    order = list(table.texts.all())
    texts = [table.texts.get(key) for key in order]
    ends = np.cumsum([len(text) for text in texts])
    assert body == np.array([order, ends], "<i8").tobytes() + b"".join(texts)


def test_the_command_line_takes_texts_along_and_checks_them(tmp_path):
    table, ranks = table_with(range(20)), 3
    table.lookup([99])  # a key whose text nobody knows
    dump(tmp_path / "one", [table], ONE)
    more = str(tmp_path / "more")
    assert main(["reshard", str(tmp_path / "one"), more, "--ranks", str(ranks)]) == 0
    assert main(["verify", more]) == 0
    assert loaded(more).texts.all() == texts_of(range(20))
    dump(tmp_path / "two", [table_with(range(15, 25))], ONE)
    assert main(["merge", more, str(tmp_path / "two"), str(tmp_path / "all")]) == 0
    assert loaded(tmp_path / "all").texts.all() == texts_of(range(25))
    file, *others = tmp_path.glob("more/data-*/*.texts.safetensors")
    assert len(others) == ranks - 1
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert main(["verify", more]) == 1
