"""KvVariables in checkpoints of TF1: files as TFPlus writes them, and those of our own API."""

import time

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.cli.importers import tfplus
from sok_lite.engine.files.source import checkpoint_sources
from sok_lite.engine.files.source_writer import write_checkpoint
from tests.cli.importers.arrays import whole
from tests.cli.recorded import rows_of
from tests.support.saved_graphs import DAY, DIM, Saved, Trained, tf1
from tests.support.saved_graphs import tfplus_part as part
from tests.support.saved_graphs import write_tfplus as write


def row(key):
    return [float(key), key + 0.5, 1.0]


def known(source):
    """Rows by key, counts by key, and counts of keys without a row."""
    counts = dict(
        zip(whole(source, "keys").tolist(), whole(source, "scores").tolist(), strict=True)
    )
    keys, pending = whole(source, "sighted_keys"), whole(source, "sightings")
    return rows_of(source), counts, dict(zip(keys.tolist(), pending.tolist(), strict=True))


def times(source, keys):
    """When keys with a row were last seen, by the numbers of lookups and their spans."""
    facts = source.about.facts
    numbers, spans = whole(source, "stamps"), facts["spans"]
    assert numbers.max(initial=0) < facts["num_lookups"]
    at = dict(zip(whole(source, "keys").tolist(), numbers.tolist(), strict=True))
    return [spans["times"][spans["numbers"].index(at[key])] for key in keys]


PARTS = [
    part([4, 2], [8], {2: 5, 8: 7, 4: 65535, 6: 1}, DAY << 16),
    part([], [], {}),
    part([-3], [], {-3: 2}, DAY << 16),
]
DENSE = {"dense": np.array([1.0, 2.0], np.float32), "global_step": np.int64(9)}


def test_what_tfplus_writes(tmp_path):
    path = write(tmp_path / "c", PARTS, more=DENSE)
    assert tfplus.detect(f"{path}.index")
    (source,) = tfplus.sources(f"{path}.index", enter_threshold="kv=2")
    assert (source.name, source.key_type, source.dtype, source.dim) == ("kv", "int64", "float32", 3)
    zeros = [0.0] * DIM
    rows = {-3: row(-3), 2: row(2), 4: row(4), 8: zeros}
    assert known(source) == (rows, {-3: 2, 2: 5, 4: 65535, 8: 7}, {6: 1})
    assert times(source, [-3, 2, 8]) == [DAY * 86400.0] * 3
    # Without a threshold every key that was seen has a row, of zeros if none was saved.
    (source,) = tfplus.sources(path, names="emb")
    assert known(source)[0] == rows | {6: zeros} and source.name == "emb"


def test_what_does_not_know_the_time(tmp_path):
    path = write(tmp_path / "c", [part([5], [], {5: 3})], "odd name/kv:0")
    started = time.time()
    (source,) = tfplus.sources(path)
    assert source.name == "odd name/kv"
    assert started <= times(source, [5])[0] <= time.time()


def test_deltas_in_their_order(tmp_path):
    is_delta = {"need_full_import": np.array([False])}
    full = write(tmp_path / "full", PARTS[:1])
    gone = np.array([8, 77], np.int64)
    first = part([10], [], {10: 1, 6: 2}, DAY << 16, delete_keys=gone, **is_delta)
    last = part([4, 6], [10], {4: 9, 6: 3, 10: 1}, DAY << 16, delete_keys=gone[:0], **is_delta)
    deltas = [write(tmp_path / f"delta-{i}", [each]) for i, each in enumerate((first, last))]
    (source,) = tfplus.sources(full, deltas=",".join(deltas), enter_threshold="2")
    expected = {2: row(2), 4: row(4), 6: row(6), 10: [0.0] * DIM}
    assert known(source) == (expected, {2: 5, 4: 9, 6: 3, 10: 1}, {})
    with pytest.raises(ValueError, match="what has changed since another save"):
        tfplus.sources(deltas[0])
    with pytest.raises(ValueError, match="no delta of the save"):
        tfplus.sources(full, deltas=full)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_way_of_a_checkpoint(tmp_path, dtype):
    parts = [dict(each, values=tf.cast(each["values"], dtype)) for each in PARTS]
    path = write(tmp_path / "c", parts)
    given = tfplus.sources(path, enter_threshold="2")
    write_checkpoint(tmp_path / "ours", given, ranks=2)
    (found,) = checkpoint_sources(tmp_path / "ours")
    assert found.dtype == dtype and known(found) == known(given[0])
    assert times(found, [2, 8]) == times(given[0], [2, 8])
    assert found.about.facts["strategy"] == "kLfu"


def test_what_our_own_face_has_saved(tmp_path):
    """With its states, and a delta of it, which knows its full save."""
    graph = Trained(3, name="kv")
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.train([1, 2, 3, 3], [-5, 3])
        path = saver.save(session, str(tmp_path / "c"))
        expected = {key: (list(row), count) for key, (row, count) in graph.known()[0].items()}
        graph.train([1, 7])
        other = saver.save(session, str(tmp_path / "other"))
    (source,) = tfplus.sources(path)
    rows, counts, pending = known(source)
    assert {key: (rows[key], counts[key]) for key in rows} == expected and not pending
    assert [state.name for state in source.states] == ["m", "v"]
    assert {state.group for state in source.states} == {1}
    moments = rows_of(source, source.states[1].tensor)
    assert all(min(row) > 0 for row in moments.values()) and set(moments) == set(expected)
    with pytest.raises(ValueError, match="no delta of the save"):
        tfplus.sources(path, deltas=other)


@pytest.mark.parametrize("given", [["delta"], ["later"], ["delta", "later"]])
def test_deltas_of_our_own_face(tmp_path, given):
    """Each has all that has changed since the full save, and no other save takes it."""
    kv.enable_delta_export()
    try:
        ours, other = (Saved(tmp_path / name) for name in ("ours", "other"))
    finally:
        kv.disable_delta_export()
    deltas = ",".join(getattr(ours, name) for name in given)
    (source,) = tfplus.sources(ours.full, deltas=deltas)
    last = ours.known[1 if given[-1] == "delta" else 2][0]
    rows, counts, _ = known(source)
    assert {key: (tuple(rows[key]), counts[key]) for key in rows} == last
    with pytest.raises(ValueError, match="no delta of the save"):
        tfplus.sources(other.full, deltas=deltas)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"values": np.ones((2, 4), np.float32)}, "does not fit 'kv'"),
        ({"values": np.ones((3, DIM), np.float32)}, "differ in length"),
        ({"keys": np.array([-3, 5])}, "keys in common"),
        ({"keys": np.array([5, 5])}, "keys repeat"),
    ],
)
def test_what_is_corrupt(tmp_path, change, text):
    parts = [part([-3], [], {}), part([2, 9], [], {}) | change]
    with pytest.raises(ValueError, match=text):
        tfplus.sources(write(tmp_path / "c", parts))


def test_what_is_not_there(tmp_path):
    path = write(tmp_path / "c", [], more=DENSE)
    assert not tfplus.detect(path) and not tfplus.detect(tmp_path / "none")
    with pytest.raises(ValueError, match="no KvVariables"):
        tfplus.sources(path)
    path = write(tmp_path / "d", PARTS[:1], "a/part_0:0")
    with pytest.raises(ValueError, match="no table 'b'. It has: 'a'"):
        tfplus.sources(path, tables="b")
    path = write(tmp_path / "e", PARTS[:1], "a/part_1:0")
    with pytest.raises(ValueError, match="not all partitions of 'a'"):
        tfplus.sources(path)
