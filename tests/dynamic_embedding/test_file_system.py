"""`save_to_file_system` and its way back, of variables and of tables by themselves."""

import os

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de

LOADS = ["load_from_file_system", "load_from_file_system_with_restore_function"]
VALUES = [
    *(tf.float32, tf.float16, tf.bfloat16, tf.float64),
    *(tf.int32, tf.int64, tf.int8),
]


def rows_of(keys, dim=3, dtype=np.float32):
    """Rows that say their key: small integers, which every type has."""
    return ((np.asarray(keys, np.int64)[:, None] * 3 + np.arange(dim)) % 101).astype(dtype)


def filled(keys, here=None, **options):
    options = {"dim": 3, "name": "v"} | options
    variable = de.Variable(**options)
    keys = np.asarray(keys, variable.key_dtype.as_numpy_dtype)
    rows = rows_of(keys, variable.dim, variable.value_dtype.as_numpy_dtype)
    if here is None:
        variable.upsert(keys, rows)
    else:
        here.run(variable.upsert, keys, rows)
    return variable


def held(variable, here=None):
    """A variable as {key: row}."""
    keys, rows = variable.export() if here is None else here.run(variable.export)
    return {int(key): np.asarray(row).tolist() for key, row in zip(keys, rows, strict=True)}


def expected(keys, dim=3, dtype=np.float32):
    return dict(zip(map(int, keys), rows_of(keys, dim, dtype).tolist(), strict=True))


KEYS = np.unique(np.random.default_rng(3).integers(-(2**31), 2**31, 500))


def names_of(*bases):
    return {f"{base}-{end}" for base in bases for end in ("keys", "values", "meta.json")}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_variable_comes_back(here, tables_on, tmp_path, shards):
    for n in (0, 33):
        source = filled(KEYS[:n], here, name=f"v{n}", devices=["/CPU:0"] * shards)
        assert here.run(lambda to=source: to.save_to_file_system(tmp_path, buffer_size=7)) is None
        target = filled([5, 6], here, name=f"v{n}", devices=["/CPU:0"] * 2)
        folder = np.array(str(tmp_path))  # which may be a tensor
        here.run(lambda path, to=target: to.load_from_file_system(path, buffer_size=11), folder)
        assert held(target, here) == expected(KEYS[:n])
    bases = [f"v{n}_mht_{i + 1}of{shards}_rank0_size1" for n in (0, 33) for i in range(shards)]
    assert set(os.listdir(tmp_path)) == names_of(*bases)
    for i, base in enumerate(bases[shards:]):
        assert np.all(np.fromfile(tmp_path / f"{base}-keys", "<i8") % shards == i)


@pytest.mark.parametrize("named", [False, True])
def test_a_shard_is_saved_by_itself(here, tmp_path, named):
    devices = ["/CPU:0"] * 3
    source, target = filled(KEYS, here, devices=devices), filled([4, 5, 6], here, devices=devices)
    name = "mine" if named else None
    for shard in source.tables[:2]:
        base = f"{name}{shard.index}" if named else None
        assert here.run(lambda s=shard, b=base: s.save_to_file_system(tmp_path, b)) is None
    bases = ["mine0", "mine1"] if named else [f"v_mht_{i}of3_rank0_size1" for i in (1, 2)]
    assert set(os.listdir(tmp_path)) == names_of(*bases)
    base = "mine1" if named else None
    here.run(lambda: target.tables[1].load_from_file_system(tmp_path, base, buffer_size=7))
    # 4 was of this shard, 5 and 6 are of the others.
    assert held(target, here) == expected([*KEYS[KEYS % 3 == 1], 5, 6])
    if not named:
        here.run(source.tables[2].save_to_file_system, str(tmp_path))
        here.run(lambda: target.load_from_file_system(tmp_path))
        assert held(target, here) == expected(KEYS)


def test_the_folder_may_be_an_address_of_this_machine(monkeypatch, tmp_path):
    address = f"file://{tmp_path}/rows"
    filled(KEYS).save_to_file_system(address)
    assert (tmp_path / "rows").is_dir()
    for load in LOADS:
        monkeypatch.delenv("TFRA_SAVED_KV", raising=False)
        target, other = filled([5, 6]), filled([5, 6])
        getattr(target, load)(address)
        monkeypatch.setenv("TFRA_SAVED_KV", address)
        getattr(other, load)("nowhere")
        assert held(target) == held(other) == expected(KEYS)


def by_hundreds(keys, shard_num):
    return tf.cast(keys // 100 % shard_num, tf.int32)


@pytest.mark.parametrize("unit", [1, 100])
def test_another_number_of_processes(tmp_path, unit):
    """By the rule of a variable of one's own too."""
    keys = KEYS[::10]
    rule = {} if unit == 1 else {"partitioner": by_hundreds}
    for save_size in (1, 2):
        folder = tmp_path / str(save_size)
        for rank in range(save_size):
            mine = keys[keys // unit % save_size == rank]
            variable = filled(mine, devices=["/CPU:0"] * (1 + rank % 2), **rule)
            variable.save_to_file_system(folder, proc_size=save_size, proc_rank=rank)
        for size, rank in ((1, 0), (2, 1), (3, 2)):
            target = filled([5], devices=["/CPU:0"] * size, **rule)
            here = {"proc_size": size, "proc_rank": rank}
            target.load_from_file_system_with_restore_function(folder, buffer_size=5, **here)
            mine = expected(keys[keys // unit % size == rank])
            assert held(target) == mine
            if save_size != size:
                with pytest.raises(FileNotFoundError, match="with_restore_function"):
                    target.load_from_file_system(folder, **here)
            else:
                target.load_from_file_system(folder, **here)
            assert held(target) == mine
            target.load_from_file_system(folder, load_entire_dir=True, **here)
            assert held(target) == expected(keys)
    for path in folder.glob("*rank0*"):  # which the other process needs not
        path.unlink()
    target.load_from_file_system(folder, proc_size=2, proc_rank=1)
    mine = expected(keys[keys // unit % 2 == 1])
    assert held(target) == mine
    for load in LOADS:
        with pytest.raises(FileNotFoundError, match="lacks 1 of the"):
            getattr(target, load)(folder, proc_size=2, proc_rank=0)
    assert held(target) == mine


def test_names_of_files(tmp_path, monkeypatch):
    variable = filled(KEYS, devices=["/CPU:0"] * 2)
    variable.save_to_file_system(tmp_path, file_name_list=["even", "odd"])
    assert sorted(np.fromfile(tmp_path / "odd-keys", "<i8")) == sorted(KEYS[KEYS % 2 == 1])
    one = filled([5])
    one.load_from_file_system(tmp_path, file_name_list=["odd"])
    assert held(one) == expected(KEYS[KEYS % 2 == 1])
    with pytest.raises(ValueError, match=r"one name for each of the 2 shards.*\['even'\]"):
        variable.save_to_file_system(tmp_path, file_name_list=["even"])
    monkeypatch.setenv("TFRA_SAVED_KV", str(tmp_path / "named"))
    variable.save_to_file_system("/nowhere")
    one.load_from_file_system_with_restore_function("/nowhere")
    assert held(one) == expected(KEYS)
    one.load_from_file_system(tmp_path, file_name_list=["even", "odd"], dirpath_env=None)
    assert held(one) == expected(KEYS)


def test_files_that_are_named_may_be_of_another_variable(here, tmp_path):
    source = filled(KEYS, here, name="one/of", devices=["/CPU:0"] * 2)
    for rank in range(3):
        here.run(
            lambda rank=rank: source.save_to_file_system(tmp_path, proc_size=3, proc_rank=rank)
        )
    shard = "one_of_mht_2of2_rank1_size3"
    target = filled([5], here, name="another")
    here.run(lambda: target.load_from_file_system(tmp_path, file_name_list=[shard]))
    assert held(target, here) == expected(KEYS[KEYS % 2 == 1])
    for name in (shard, "one_of"):
        target = filled([5], here, name="another")
        options = {"file_name_list": [name], "load_entire_dir": True}
        here.run(lambda to=target, options=options: to.load_from_file_system(tmp_path, **options))
        assert held(target, here) == expected(KEYS)
    for end in ("-keys", "-values"):
        (tmp_path / f"{shard}{end}").unlink()
    with pytest.raises((FileNotFoundError, tf.errors.InvalidArgumentError), match="lacks 1 of"):
        here.run(lambda: target.load_from_file_system(tmp_path, **options))
    with pytest.raises((FileNotFoundError, tf.errors.InvalidArgumentError), match="no files of"):
        here.run(lambda: target.load_from_file_system(tmp_path, load_entire_dir=True))
    assert held(target, here) == expected(KEYS)


def test_what_is_appended_counts_after_what_was_there(tmp_path):
    variable = filled([1, 2])
    variable.save_to_file_system(tmp_path)
    variable.clear()
    variable.upsert(np.array([2, 3]), np.full((2, 3), 7.0, np.float32))
    variable.save_to_file_system(tmp_path, append_to_file=True)
    target = filled([5])
    target.load_from_file_system(tmp_path)
    assert held(target) == {1: rows_of([1])[0].tolist(), 2: [7.0] * 3, 3: [7.0] * 3}


WRONG = [
    ({"dim": 4}, "its dim is 3. Expected dim=4"),
    ({"value_dtype": tf.float64}, "its value_dtype is 'float32'"),
    ({"key_dtype": tf.int32}, "its key_dtype is 'int64'"),
    ({"name": "w"}, "holds no files of variable 'w'"),
]


@pytest.mark.parametrize("load", LOADS)
def test_what_does_not_fit_changes_nothing(here, tmp_path, load):
    source = filled(KEYS, here)
    here.run(lambda: source.save_to_file_system(tmp_path))
    for options, text in WRONG:
        target = filled([5, 6], here, **options)
        errors = ValueError, FileNotFoundError, tf.errors.InvalidArgumentError
        with pytest.raises(errors, match=text):
            here.run(lambda to=target: getattr(to, load)(tmp_path))
        kind = target.value_dtype.as_numpy_dtype
        assert held(target, here) == expected([5, 6], target.dim, kind)


def test_arguments_that_cannot_be(tmp_path):
    texts = de.Variable(key_dtype=tf.string, dim=2, name="texts")
    for method in ("save_to_file_system", *LOADS):
        with pytest.raises(ValueError, match="hold keys of int64, int32.*'string'"):
            getattr(texts, method)(tmp_path)
        with pytest.raises(ValueError, match="rank from 0 to size - 1"):
            getattr(filled([1]), method)(tmp_path, proc_size=2, proc_rank=2)
        with pytest.raises(ValueError, match="folder of this machine.*'s3://rows/here'"):
            getattr(filled([1]), method)("s3://rows/here")
    assert os.listdir(tmp_path) == [] and not os.path.exists("s3:")


@pytest.mark.parametrize("kind", [de.CuckooHashTable, de.HkvHashTable])
def test_a_table_by_itself(here, tables_on, tmp_path, kind):
    def table():
        return kind(tf.int64, tf.float32, np.zeros(3, np.float32), name="t")

    source = table()
    here.run(source.insert, KEYS, rows_of(KEYS))
    here.run(lambda: source.save_to_file_system(tmp_path))
    here.run(lambda: source.save_to_file_system(tmp_path, file_name="named"))
    here.run(lambda: source.save_to_file_system(tmp_path, file_name="other_mht_1of2"))
    here.run(lambda: source.save_to_file_system(tmp_path, file_name="all_mht_1of1"))
    named = [{"file_name": name} for name in ("named", "other_mht_1of2")]
    whole = {"load_entire_dir": True}
    named += [{"file_name": name, **whole} for name in ("named", "all_mht_1of1", "all")]
    with pytest.raises(
        (FileNotFoundError, tf.errors.InvalidArgumentError), match="shards of one save"
    ):
        here.run(lambda: source.load_from_file_system(tmp_path, "other_mht_1of2", **whole))
    for options in ({}, *named):
        target = table()
        here.run(target.insert, [7], rows_of([7]))
        here.run(lambda options=options, to=target: to.load_from_file_system(tmp_path, **options))
        assert held(target, here) == expected(KEYS)


def test_scores_of_a_programs_own_are_given_again(tmp_path):
    config = de.HkvHashTableConfig(
        evict_strategy=de.HkvEvictStrategy.CUSTOMIZED, gen_scores_fn=lambda keys: keys % 7
    )
    creator = de.HkvHashTableCreator(config)
    keys = np.arange(200)
    filled(keys, kv_creator=creator).save_to_file_system(tmp_path)
    target = filled([5], kv_creator=creator)
    target.load_from_file_system(tmp_path)
    found, scores = target.export_keys_and_scores(10)
    np.testing.assert_array_equal(scores, found % 7)
    assert held(target) == expected(keys)
