"""Files of keys and values: those that the real TFRA wrote are read, and those for it written."""

import shutil

import numpy as np
import pytest

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.importers import tfra_files
from sok_lite.engine.files.source import checkpoint_sources
from sok_lite.engine.files.source_writer import write_checkpoint
from tests.cli.recorded import CASES, FOLDER, TYPES, check, expected_rows, rows_of

ONE, TWO = FOLDER / "files_of_one_shard", FOLDER / "files_of_two_shards"
ADAM = {f"user_emb_user_emb-shadow_{state}": (state, 0.0) for state in "mv"}
ADAGRAD = {"two_shards_two_shards-shadow_accumulator": ("accumulator", 0.25)}


def copied(tmp_path, case):
    return shutil.copytree(FOLDER / case, tmp_path / case)


def test_what_tfra_wrote_is_what_tfra_says_is_there(monkeypatch):
    for case, slots, options in (
        ("files_of_one_shard", ADAM, TYPES),
        ("files_of_two_shards", ADAGRAD, {"initial": "accumulator=0.25"}),
        ("files_of_two_processes", {}, {}),
        ("files_of_a_table_alone", {}, {}),
    ):
        assert tfra_files.detect(FOLDER / case)
        for chunk in (1, 40, 1 << 20):
            monkeypatch.setattr("sok_lite.cli.importers.tfra_tables.CHUNK_BYTES", chunk)
            check(tfra_files.sources(FOLDER / case, **options), case, slots, "_")


def test_by_way_of_a_checkpoint_and_back(tmp_path):
    """The written files are those of TFRA but for the order of keys, and rows that slots lack."""
    write_checkpoint(
        tmp_path / "c", tfra_files.sources(ONE, names="user_emb=user/emb", **TYPES), ranks=3
    )
    tfra_files.write(tmp_path / "again", checkpoint_sources(tmp_path / "c"))
    for path in sorted(ONE.iterdir()):
        written = (tmp_path / "again" / path.name).read_bytes()
        if "shadow" not in path.name:
            assert len(written) == path.stat().st_size
    slots = {f"user/emb/user/emb-shadow/{state}": (state, 0.0) for state in "mv"}
    check(tfra_files.sources(tmp_path / "again"), "files_of_one_shard", slots)


def test_an_accumulator_begins_with_what_frameworks_let_it_begin_with():
    (source,) = tfra_files.sources(TWO)
    assert [state.initial for state in source.states] == [0.1]
    assert [0.1, 0.1, 0.1] in np.round(list(rows_of(source, "states.0.accumulator").values()), 6)
    with pytest.raises(WrongUse, match="names 'm'; the states that are there are: accumulator"):
        tfra_files.sources(TWO, initial="m=1")


def test_the_bytes_that_are_written(tmp_path):
    (source,) = tfra_files.sources(FOLDER / "files_of_a_table_alone", tables="alone")
    tfra_files.write(tmp_path / "f", [source])
    for what in ("keys", "values"):
        written = (tmp_path / "f" / f"alone_mht_1of1_rank0_size1-{what}").read_bytes()
        recorded = (FOLDER / "files_of_a_table_alone" / f"alone_mht_1of1-{what}").read_bytes()
        assert written == recorded


def test_states_of_half_rows_are_written_as_halves(tmp_path):
    """TFRA makes a slot of the type of its variable."""
    (source,) = tfra_files.sources(TWO, initial="accumulator=0.25")
    source.name, source.dtype = "half", "float16"
    rows = [rows.astype(np.float16) for rows in source.read("values")]
    states = list(source.read("states.0.accumulator"))
    source.read = lambda column: iter({"keys": keys, "values": rows}.get(column, states))
    keys = [np.arange(len(each)) + 10 * i for i, each in enumerate(rows)]
    tfra_files.write(tmp_path, [source], trainable="Adagrad")
    name = "half_Adagrad_accumulator_mht_1of1_rank0_size1-values"
    assert (tmp_path / name).read_bytes() == np.concatenate(states).astype(np.float16).tobytes()
    for path in tmp_path.glob("*.json"):
        path.unlink()
    (again,) = tfra_files.sources(tmp_path, dtype="half=float16")
    assert [state.name for state in again.states] == ["accumulator"]


def test_a_key_that_was_appended_again_has_its_last_row(tmp_path):
    folder = copied(tmp_path, "files_of_a_table_alone")
    with open(folder / "alone_mht_1of1-keys", "ab") as keys:
        keys.write(np.int64([4, 77, 4]).tobytes())
    with open(folder / "alone_mht_1of1-values", "ab") as values:
        values.write(np.arange(9, dtype=np.float32).tobytes())
    (source,) = tfra_files.sources(folder)
    expected = expected_rows(CASES["files_of_a_table_alone"]["alone"])
    assert rows_of(source) == expected | {4: [6.0, 7.0, 8.0], 77: [3.0, 4.0, 5.0]}


def test_a_key_of_two_shards_has_the_row_of_the_later_one(tmp_path):
    folder = copied(tmp_path, "files_of_two_processes")
    expected = expected_rows(CASES["files_of_two_processes"]["table"])
    first, last = (
        folder / f"table_mht_{shard}_size2-keys" for shard in ("1of2_rank0", "2of2_rank1")
    )
    lost, kept = (np.fromfile(path, np.int64) for path in (first, last))
    kept[1], gone = lost[0], kept[1]
    last.write_bytes(kept.tobytes())
    (source,) = tfra_files.sources(folder)
    expected[int(lost[0])] = expected.pop(int(gone))
    assert rows_of(source) == expected


def test_keys_that_a_slot_has_more_are_left_out_and_said(tmp_path, caplog):
    """As after `remove` of TFRA, which leaves them in the slots."""

    def write(name, keys, value):
        base = f"{name}_mht_1of1_rank0_size1"
        (tmp_path / f"{base}-keys").write_bytes(np.array(keys, "<i8").tobytes())
        rows = np.full((len(keys), 2), value, "<f4")
        (tmp_path / f"{base}-values").write_bytes(rows.tobytes())

    write("emb", [3, 1, 2], 1.0)
    write("emb_Adam_v", [1, 2], 0.25)
    for num_more in (0, 1, 3, 4):
        write("emb_Adam_m", [*[5, 7, 9, 11][:num_more], 2, 1, 3], 0.5)
        caplog.clear()
        first, *others = tfra_files.sources(tmp_path)
        texts = [record.getMessage() for record in caplog.records]
        end = "they are left out" if num_more < 4 else "it stays a table"
        said = f"state of 'emb', which does not have {num_more} of its {num_more + 3} keys: {end}."
        assert texts == ([f"'emb_Adam_m' is named as a {said}"] if num_more else [])
        states = {"m": {k: [0.5, 0.5] for k in (1, 2, 3)}} if num_more < 4 else {}
        states["v"] = {1: [0.25] * 2, 2: [0.25] * 2, 3: [0, 0]}
        assert {s.name: rows_of(first, s.tensor) for s in first.states} == states
        assert [source.name for source in others] == ["emb_Adam_m"] * (num_more == 4)


def test_slots_that_are_no_slots_stay_tables(tmp_path):
    assert len(tfra_files.sources(ONE, slots="tables", **TYPES)) == 8
    folder = copied(tmp_path, "files_of_two_shards")
    for path in folder.glob("*accumulator*keys"):
        path.write_bytes(np.full(path.stat().st_size // 8, 12345).tobytes())
    assert {source.name for source in tfra_files.sources(folder)} == {
        "two_shards",
        "two_shards_two_shards-shadow_accumulator",
    }


def test_a_table_of_a_policy_has_numbers_of_int32(tmp_path):
    folder = copied(tmp_path, "files_of_a_table_alone")
    base = "alone_frequency_mht_1of1"
    (folder / f"{base}-keys").write_bytes(np.int64([3, 4]).tobytes())
    (folder / f"{base}-values").write_bytes(np.int32([7, 2**24 + 1]).tobytes())
    *_, source = tfra_files.sources(folder, dtype="float32", dim="3")
    assert (source.name, source.dtype, source.dim) == ("alone_frequency", "int32", 1)
    assert np.concatenate(list(source.read("values"))).tolist() == [[7], [2**24 + 1]]


# ---- what is refused -----------------------------------------------------------------------------


WRONG = [
    ({**TYPES, "dim": None}, "'empty'.*Give `dim`, such as dim=empty=8"),
    ({**TYPES, "dtype": "float64"}, "do not hold 4 keys of int64 and as many rows of float64"),
    ({**TYPES, "key_type": "int32"}, "rows of"),
    ({**TYPES, "dim": "empty=4,user_emb=5"}, "user_emb.* does not hold whole rows of 5"),
    ({**TYPES, "dim": "0"}, "`dim` must be a number above 0"),
    ({**TYPES, "dim": "x"}, "`dim` must be a number above 0"),
    ({**TYPES, "dtype": "string"}, "Received: 'string'"),
    ({**TYPES, "slots": "no"}, "`slots` must be 'states' or 'tables'"),
]


def test_what_does_not_fit_the_files():
    for options, text in WRONG:
        with pytest.raises(ValueError, match=text):
            tfra_files.sources(ONE, **options)


def test_tables_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="no table 'other'. It has: 'alone'"):
        tfra_files.sources(FOLDER / "files_of_a_table_alone", tables="alone,other")
    for option in ("names", "dtype", "key_type", "dim"):
        with pytest.raises(ValueError, match="has no table 'zzz'. It has: 'alone'"):
            tfra_files.sources(FOLDER / "files_of_a_table_alone", **{option: "zzz=8,alone=8"})
    assert not tfra_files.detect(tmp_path) and not tfra_files.detect(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="table_mht_1of1_rank0_size1-keys"):
        tfra_files.sources(tmp_path)


def test_files_of_two_saves(tmp_path):
    folder = copied(tmp_path, "files_of_two_processes")
    for what in ("keys", "values"):
        alone = FOLDER / "files_of_a_table_alone" / f"alone_mht_1of1-{what}"
        shutil.copy(alone, folder / f"table_mht_1of1_rank0_size1-{what}")
    with pytest.raises(ValueError, match="size 1 with 1 shard .* size 2 with 4 shards"):
        tfra_files.sources(folder)
    (source,) = tfra_files.sources(folder, size="2")
    assert rows_of(source) == expected_rows(CASES["files_of_two_processes"]["table"])
    for what in ("keys", "values"):
        alone = folder / f"table_mht_1of1_rank0_size1-{what}"
        alone.rename(folder / f"table_mht_1of1-{what}")
    with pytest.raises(ValueError, match="that name a process and files that do not"):
        tfra_files.sources(folder, size=2)


def test_what_cannot_be_written(tmp_path):
    (source,) = tfra_files.sources(FOLDER / "files_of_a_table_alone")
    tfra_files.write(tmp_path, [source])
    with pytest.raises(FileExistsError, match="'alone'"):
        tfra_files.write(tmp_path, [source])
    (other,) = tfra_files.sources(FOLDER / "files_of_a_table_alone", names="a_b")
    source.name = "a/b"
    with pytest.raises(ValueError, match="'a_b' and 'a/b' have one name, 'a_b'"):
        tfra_files.write(tmp_path / "new", [source, other])
    source.key_type = "uint64"
    with pytest.raises(ValueError, match="'uint64'"):
        tfra_files.write(tmp_path / "new", [source])
    assert not (tmp_path / "new").exists()


# ---- what this package has written beside --------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """The folder of a de.Variable that was saved from two processes with Adam's states."""
    keras = pytest.importorskip("keras")
    import tensorflow as tf

    from sok_lite import dynamic_embedding as de

    def save(rank):
        saver = de.FileSystemSaver(proc_size=2, proc_rank=rank, save_path=str(tmp_path / "f"))
        options = {"devices": ["/CPU:0"] * 2, "initializer": 1.0, "name": "a/b"}
        table = de.Variable(dim=2, kv_creator=de.CuckooHashTableCreator(saver=saver), **options)
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
        shadow = de.shadow_ops.ShadowVariable(table, name="shadow")
        keys = tf.constant([9 - rank, 4 + rank, -3 - rank], tf.int64)
        with tf.GradientTape() as tape:
            rows = de.shadow_ops.embedding_lookup(shadow, keys)
            loss = tf.reduce_sum(rows * tf.cast(keys, tf.float32)[:, None])
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
        tf.train.Checkpoint(table=table).write(str(tmp_path / f"c{rank}"))

    save(0)
    save(1)
    return tmp_path / "f"


def test_states_of_our_own_files_come_too(saved):
    (source,) = tfra_files.sources(saved)
    assert (source.name, source.dim) == ("a/b", 2)
    m, v = (rows_of(source, facts.tensor) for facts in source.states)
    keys = [9, 4, -3, 8, 5, -4]
    assert m.keys() == set(keys)
    np.testing.assert_allclose([m[key] for key in keys], np.outer(keys, [0.1] * 2), rtol=1e-6)
    squares = np.outer(np.square(keys), [0.001] * 2)
    np.testing.assert_allclose([v[key] for key in keys], squares, rtol=1e-6)
    (source,) = tfra_files.sources(saved, slots="tables")
    assert source.states == ()


def test_states_of_another_save_or_of_one_process_alone(saved):
    first, second = sorted(saved.glob("*-states.npz"))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match="from two saves"):
        tfra_files.sources(saved)
    first.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match="states.npz' is corrupt"):
        tfra_files.sources(saved)
    first.unlink()
    with pytest.raises(ValueError, match="states of several kinds"):
        tfra_files.sources(saved)
