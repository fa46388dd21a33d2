"""Checkpoints of variables: with their rows inside, and with files beside them."""

import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import dynamic_embedding as de
from sok_lite.dynamic_embedding import savers
from sok_lite.engine.table.content import Content
from tests.dynamic_embedding.test_file_system import KEYS, VALUES, expected, filled, held, rows_of

tf1 = tf.compat.v1
UNIFORM = keras.initializers.RandomUniform(seed=3)


def creator(in_files, kind=de.CuckooHashTableCreator, config=None, **options):
    return kind(config, de.FileSystemSaver(**options) if in_files else None)


@pytest.fixture(params=[False, True], ids=["inside", "in files"])
def in_files(request):
    return request.param


def through(tmp_path, source, target):
    """Saves one thing and restores another from it; returns the status."""
    path = de.train.Checkpoint(it=source).save(str(tmp_path / "c"))
    return de.train.Checkpoint(it=target).restore(path)


# ---------------------------------------------------------------- what comes back


def test_rows_come_back_into_any_number_of_shards(tmp_path, tables_on, in_files):
    """Of every type."""
    sizes = itertools.cycle([(0, (1, 3)), (33, (1, 2)), (500, (3, 2))])
    key_dtypes = itertools.cycle([tf.int64, tf.int32])
    for value_dtype, key_dtype, (n, shards) in zip(VALUES, key_dtypes, sizes, strict=False):
        options = {"key_dtype": key_dtype, "value_dtype": value_dtype}
        options["kv_creator"] = creator(in_files)
        source, target = (
            filled(keys, devices=["/CPU:0"] * number, **options)
            for keys, number in zip((KEYS[:n], [5, 6, 7]), shards, strict=True)
        )
        folder = tmp_path / value_dtype.name
        folder.mkdir()
        through(folder, source, target).assert_consumed()
        whole = expected(KEYS[:n], dtype=value_dtype.as_numpy_dtype)
        assert held(target) == whole == held(source)


def test_texts_as_keys(tmp_path):
    keys = tf.constant([b"", b"one", "zwei\0 drei", b"\xff"])
    source, target = (
        de.Variable(tf.string, dim=2, name="v", devices=["/CPU:0"] * n) for n in (1, 2)
    )
    source.upsert(keys, np.arange(8, dtype=np.float32).reshape(4, 2))
    target.upsert(tf.constant(["gone"]), np.ones((1, 2), np.float32))
    through(tmp_path, source, target).assert_consumed()
    found, rows = target.export()
    assert sorted(found.numpy().tolist()) == sorted(keys.numpy().tolist())
    np.testing.assert_array_equal(rows, source.lookup(found))
    with pytest.raises(ValueError, match="hold keys of int64, int32.*'string'"):
        de.Variable(tf.string, dim=2, kv_creator=creator(True))


@pytest.mark.filterwarnings("ignore:Table 'v' had no room")
def test_a_full_table_evicts_on_as_if_nothing_had_been(tmp_path, in_files):
    def table(strategy):
        config = de.HkvHashTableConfig(
            max_capacity=128,
            evict_strategy=strategy,
            step_per_epoch=2,
            gen_scores_fn=lambda keys: keys % 11,
        )
        of_kind = creator(in_files, de.HkvHashTableCreator, config)
        return de.Variable(dim=3, name="v", kv_creator=of_kind)

    def write(variable, seed, times=10):
        rng = np.random.default_rng(seed)
        for _ in range(times):
            keys = np.unique(rng.integers(0, 1000, 20))
            variable.upsert(keys, rows_of(keys))

    for strategy in de.HkvEvictStrategy:
        source, target = table(strategy), table(strategy)
        write(source, 0)
        write(target, 1, 3)
        through(tmp_path, source, target).assert_consumed()
        for _ in range(2):
            assert held(target) == held(source)
            keys, scores = source.export_keys_and_scores(50)
            theirs = target.export_keys_and_scores(50)
            np.testing.assert_array_equal(theirs[0], keys)
            np.testing.assert_array_equal(theirs[1], scores)
            assert target.rows.table.epoch == source.rows.table.epoch
            target.rows._steps = source.rows._steps  # a program knows itself where it is
            write(source, 2)
            write(target, 2)


def test_what_a_policy_has_noted_comes_back(tmp_path, in_files):
    options = {"restrict_policy": de.FrequencyRestrictPolicy, "kv_creator": creator(in_files)}
    source, target = filled(np.arange(6), **options), filled([7, 8], **options)
    for batch in ([1, 2, 3], [2, 3], [3]):
        source.restrict_policy.apply_update(tf.constant(batch, tf.int64))
    target.restrict_policy.apply_update(tf.constant([7], tf.int64))
    through(tmp_path, source, target).assert_consumed()
    status = target.restrict_policy.status
    assert {key: row[0] for key, row in held(status).items()} == {1: 1, 2: 2, 3: 3}
    target.restrict(1)
    assert held(target) == expected([0, 3, 4, 5])


OPTIMIZERS = {
    "keras 3": lambda: keras.optimizers.Adam(0.1),
    "keras 3 ftrl": lambda: keras.optimizers.Ftrl(0.1, initial_accumulator_value=0.3),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adagrad(0.1, initial_accumulator_value=0.3),
    "v1": lambda: tf1.train.AdamOptimizer(0.1),
}


def trained(variable, optimizer, seed, steps, limit=40):
    shadow = variable.get_trainable_by_name("t")
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            rows = de.embedding_lookup(variable, rng.integers(-limit, limit, 30), name="t")
            loss = tf.reduce_sum(tf.sin(rows))
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])


def states(variable, optimizer):
    slots = sorted(variable.get_slot_variables(optimizer), key=lambda slot: slot.slot_name)
    return {slot.slot_name: held(slot) for slot in slots}


@pytest.mark.parametrize(
    ("family", "steps_before"), [*zip(OPTIMIZERS, [0, 1, 1, 0, 1], strict=True)]
)
def test_training_goes_on_bit_for_bit(tmp_path, in_files, family, steps_before):
    """Also by an optimizer that is made anew while the one that trained the variable is there."""

    def pair(**options):
        options |= {"kv_creator": creator(in_files), "initializer": UNIFORM}
        variable = de.get_variable("two", dim=3, **options)
        return variable, de.DynamicEmbeddingOptimizer(OPTIMIZERS[family]())

    first = pair()
    trained(*first, seed=0, steps=3)
    saved = held(first[0]), states(*first)
    path = de.train.Checkpoint(v=first[0], o=first[1]).save(str(tmp_path / "c"))
    tf1.reset_default_graph()
    fresh = pair(devices=["/CPU:0"] * 2)
    trained(*fresh, seed=1, steps=2)

    tf1.reset_default_graph()
    kept = pair()
    trained(*kept, seed=0, steps=3)
    again = pair()  # `get_variable` gives the same variable, as TFRA does
    assert again[0] is kept[0]
    trained(*again, seed=1, steps=steps_before)
    for each in (fresh, again):
        de.train.Checkpoint(v=each[0], o=each[1]).restore(path)
        assert held(each[0]) == saved[0]
        assert states(*each) == (saved[1] if each is fresh or steps_before else {})
    for each in (first, fresh, again):
        trained(*each, seed=8, steps=2)
        assert held(each[0]) == held(first[0])
        assert states(*each) == states(*first) != {}
    assert states(*kept).keys() == saved[1].keys()


def test_a_variable_that_is_not_in_checkpoints(tmp_path):
    variable = filled(KEYS, checkpoint=False, kv_creator=creator(True))
    path = de.train.Checkpoint(it=variable).save(str(tmp_path / "c"))
    assert not [name for name, _ in tf.train.list_variables(path) if name.startswith("it")]
    assert not (tmp_path / "TFRADynamicEmbedding-1").exists()
    variable.upsert([5], rows_of([6]))
    before = held(variable)
    de.train.Checkpoint(it=variable).restore(path)
    assert held(variable) == before
    with tf.Graph().as_default():
        kept = de.Variable(dim=3, name="v", checkpoint=False)
        assert tf1.get_collection(tf1.GraphKeys.SAVEABLE_OBJECTS) == []
        assert kept.checkpoint is False


WRONG = [
    ({"dim": 4}, "Expected dim=4"),
    ({"name": "w"}, "its name is 'v'. Expected name='w'|w-.* not found"),
    ({"value_dtype": tf.float64}, "expected dtype double|Expected value_dtype="),
    ({"key_dtype": tf.int32}, "expected dtype int32|Expected key_dtype="),
]


def test_another_variable_is_refused_and_as_it_was(tmp_path, in_files):
    for options, text in WRONG:
        target = filled([5, 6], **options, kv_creator=creator(in_files))
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=text):
            through(tmp_path, filled(KEYS, kv_creator=creator(in_files)), target)
        assert held(target) == expected([5, 6], target.dim, target.value_dtype.as_numpy_dtype)


def test_texts_and_numbers_are_not_taken_for_each_other(tmp_path):
    texts = de.Variable(tf.string, dim=3, name="v")
    texts.upsert(tf.constant(["a"]), np.ones((1, 3), np.float32))
    numbers = filled([5])
    with pytest.raises(ValueError, match="its key_dtype is 'string'. Expected key_dtype='int64'"):
        through(tmp_path, texts, numbers)
    with pytest.raises(tf.errors.NotFoundError, match="texts not found"):
        through(tmp_path, numbers, texts)
    assert held(numbers) == expected([5])
    assert texts.export()[0].numpy().tolist() == [b"a"]


def test_a_saved_model_is_refused(tmp_path):
    module, spec = tf.Module(), [tf.TensorSpec([None], tf.int64)]
    # Of what no checkpoint has, by TensorFlow itself.
    for checkpoint, error in ((True, NotImplementedError), (False, AssertionError)):
        module.variable = filled(KEYS, checkpoint=checkpoint)
        module.serve = tf.function(lambda keys: module.variable.lookup(keys), input_signature=spec)
        with pytest.raises(error, match="tf.saved_model.save|untracked"):
            tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.serve)


# ---------------------------------------------------------------- graphs of TF1


def graph_step(variable, rate=0.1):
    rows, trainable = de.embedding_lookup(
        variable, tf.range(3, 9, dtype=tf.int64), name="t", return_trainable=True
    )
    optimizer = de.DynamicEmbeddingOptimizer(tf1.train.AdamOptimizer(rate))
    return optimizer.minimize(tf.reduce_sum(tf.sin(rows)), var_list=[trainable])


def test_a_saver_of_tf1(tmp_path, in_files):
    """Of one graph into another, with the states; the rows are those of the time of the save."""
    options = {"dim": 3, "name": "v", "initializer": UNIFORM}
    kind = de.train.DEHvdSaver if in_files else tf1.train.Saver
    keys = KEYS[:50]
    exported, paths = [], []
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.Variable(**options, kv_creator=creator(in_files))
        step = graph_step(variable)
        upsert, export = variable.upsert(keys, rows_of(keys)), variable.export()
        session.run(tf1.global_variables_initializer())
        saver = kind()
        for number in range(3):
            session.run(upsert if number == 0 else step)
            exported.append(session.run(export))
            paths.append(saver.save(session, str(tmp_path / "c"), global_step=number))
    assert (tmp_path / "TFRADynamicEmbedding-1").exists() == in_files
    with tf.Graph().as_default(), tf1.Session() as session:
        shards = ["/CPU:0"] * 3
        variable = de.Variable(**options, devices=shards, kv_creator=creator(in_files))
        step = graph_step(variable)
        others, export = variable.upsert([1, 2], rows_of([1, 2])), variable.rows.export()
        session.run(tf1.global_variables_initializer())
        for number in (0, 1):
            session.run(others)
            kind().restore(session, paths[number])
            for found, saved in zip(session.run(export), exported[number], strict=True):
                np.testing.assert_array_equal(found, saved)
        session.run(step)
        for found, saved in zip(session.run(export), exported[2], strict=True):
            np.testing.assert_array_equal(found, saved)


@pytest.mark.parametrize("way", ["list", "dict", "tables", "shards"])
def test_a_saver_that_is_told_what_to_save(tmp_path, in_files, way):
    """In eager mode and in a session, and what one has saved the other restores."""

    def made(run):
        variable = de.Variable(**options)
        run(variable.upsert(KEYS[:9], rows_of(KEYS[:9])))
        dense = tf1.get_variable(f"d{len(paths)}", initializer=2.0, use_resource=True)
        ways = {"list": [variable], "dict": {"a": variable, "d": dense}}
        return variable, tf1.train.Saver(ways.get(way, variable.tables))

    options = {"dim": 3, "name": "v", "devices": ["/CPU:0"] * (3 if way == "shards" else 1)}
    options["kv_creator"] = creator(in_files, save_path=str(tmp_path / "files"))
    paths = []
    variable, saver = made(lambda done: done)
    paths.append(saver.save(None, str(tmp_path / "eager")))
    names = {name for name, _ in tf.train.list_variables(paths[0])}
    assert f"{'a' if way == 'dict' else 'v'}-{'files' if in_files else 'values'}" in names
    with tf.Graph().as_default(), tf1.Session() as session:
        other, its_saver = made(session.run)
        session.run(tf1.global_variables_initializer())
        paths.append(its_saver.save(session, str(tmp_path / "graph")))
        for path in paths:
            session.run([other.clear(), other.upsert([1], rows_of([1]))])
            its_saver.restore(session, path)
            keys, rows = session.run(other.export())
            assert sorted(keys) == sorted(KEYS[:9])
            np.testing.assert_array_equal(rows, rows_of(keys))
    for path in paths:
        variable.upsert([1], rows_of([1]))
        saver.restore(None, path)
        assert held(variable) == expected(KEYS[:9])


def test_a_checkpoint_of_shards_has_their_table_once(tmp_path):
    variable = de.Variable(dim=3, devices=["/CPU:0"] * 3)
    variable.upsert(KEYS, rows_of(KEYS))
    path = tf.train.Checkpoint(shards=variable.tables).write(str(tmp_path / "c"))
    assert len([name for name, _ in tf.train.list_variables(path) if "values" in name]) == 1
    other = de.Variable(dim=3, devices=["/CPU:0"] * 3)
    tf.train.Checkpoint(shards=other.tables).read(path).assert_consumed()
    assert held(other) == expected(KEYS)


def test_a_saver_of_tf1_refuses_another_variable(tmp_path, in_files):
    kind = de.train.DEHvdSaver if in_files else tf1.train.Saver
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.Variable(dim=3, name="v", kv_creator=creator(in_files))
        session.run(variable.upsert(KEYS, rows_of(KEYS)))
        path = kind().save(session, str(tmp_path / "c"))
    for options, text in WRONG:
        with tf.Graph().as_default(), tf1.Session() as session:
            variable = de.Variable(
                **({"dim": 3, "name": "v"} | options), kv_creator=creator(in_files)
            )
            kept = rows_of([5], variable.dim, variable.value_dtype.as_numpy_dtype)
            session.run(variable.upsert([5], kept))
            with pytest.raises(tf.errors.OpError, match=text):
                kind().restore(session, path)
            assert session.run(variable.export())[0].tolist() == [5]


def test_padded_steps_and_removed_checkpoints(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.Variable(dim=3, name="v", kv_creator=creator(True))
        session.run(variable.upsert(KEYS, rows_of(KEYS)))
        step = tf1.train.get_or_create_global_step()
        session.run(tf1.global_variables_initializer())
        saver = de.train.DEHvdSaver(max_to_keep=2, pad_step_number=True)
        for _ in range(4):
            path = saver.save(session, str(tmp_path / "c"), global_step=step)
            session.run(tf1.assign_add(step, 1))
        assert path.endswith("c-00000003")
        folders = {name for name in os.listdir(tmp_path) if name.startswith("TFRA")}
        assert folders == {f"TFRADynamicEmbedding-0000000{number}" for number in (2, 3)}
        session.run(variable.clear())
        saver.restore(session, path)
        assert session.run(variable.size()) == len(KEYS)


# ---------------------------------------------------------------- files beside a checkpoint


def test_a_restore_writes_nothing(tmp_path):
    source, target = (filled(keys, kv_creator=creator(True)) for keys in (KEYS, [5]))
    checkpoint = de.train.Checkpoint(it=source)
    path = checkpoint.write(str(tmp_path / "c"))
    folder = tmp_path / "TFRADynamicEmbedding"
    before = {each: each.stat().st_mtime_ns for each in folder.iterdir()}
    de.train.Checkpoint(it=target).read(path).assert_consumed()
    assert {each: each.stat().st_mtime_ns for each in folder.iterdir()} == before
    assert held(target) == expected(KEYS)


def test_a_folder_of_the_savers_own(tmp_path, monkeypatch):
    options = {"save_path": tmp_path / "rows", "buffer_size": 7}
    source, target = (filled(keys, kv_creator=creator(True, **options)) for keys in (KEYS, [5]))
    for kind in (tf.train.Checkpoint, de.train.Checkpoint):
        path = kind(it=source).save(str(tmp_path / "c"))
        target.clear()
        kind(it=target).restore(path).assert_consumed()
        assert held(target) == expected(KEYS)
    assert len(os.listdir(tmp_path / "rows")) == 4
    monkeypatch.setenv("TFRA_SAVED_KV", str(tmp_path / "named"))
    tf.train.Checkpoint(it=source).save(str(tmp_path / "c"))
    assert len(os.listdir(tmp_path / "named")) == 4


def test_without_a_folder_nothing_is_saved_or_restored(tmp_path):
    source, target = (filled(keys, kv_creator=creator(True)) for keys in (KEYS, [5]))
    with pytest.raises(ValueError, match="cannot be saved.*Use de.train.Checkpoint.*save_path="):
        tf.train.Checkpoint(it=source).save(str(tmp_path / "c"))
    path = de.train.Checkpoint(it=source).save(str(tmp_path / "c"))
    with pytest.raises(ValueError, match="cannot be saved"):  # that folder was of that save
        tf.train.Checkpoint(it=source).save(str(tmp_path / "c"))
    with pytest.raises(ValueError, match="cannot be restored.*Use de.train.Checkpoint"):
        tf.train.Checkpoint(it=target).restore(path)
    late = de.train.Checkpoint()
    late.restore(path)
    with pytest.raises(ValueError, match="make the variable before it restores"):
        late.it = target
    assert held(target) == expected([5])
    with tf.Graph().as_default(), pytest.raises(NotImplementedError, match="DEHvdSaver"):
        de.train.Checkpoint().write(str(tmp_path / "e"))


def test_a_manager_removes_folders_with_their_checkpoints_and_no_files_of_others(tmp_path):
    variable = filled([], kv_creator=creator(True))
    checkpoint = de.train.Checkpoint(it=variable)
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)
    others = [
        tmp_path / "TFRADynamicEmbedding-1" / "notes.txt",
        tmp_path / "TFRADynamicEmbedding-2" / "w_mht_1of1_rank0_size1-keys",  # of TFRA itself
    ]
    for path in others:
        path.parent.mkdir()
        path.write_text("of another program")
    for number in range(6):
        variable.upsert([number], rows_of([number]))
        manager.save()
    assert [path.read_text() for path in others] == ["of another program"] * 2
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    kept = {f"TFRADynamicEmbedding-{step}" for step in (1, 2, 5, 6)}
    # TensorFlow may remove a checkpoint after the save: its folder then goes with the next one.
    assert kept <= folders <= kept | {"TFRADynamicEmbedding-4"}
    for path, number in zip(manager.checkpoints, (5, 6), strict=True):
        checkpoint.restore(path).assert_consumed()
        assert held(variable) == expected(range(number))


def test_a_checkpoint_may_be_an_address_of_this_machine(tmp_path):
    variable = filled([], kv_creator=creator(True))
    checkpoint = de.train.Checkpoint(it=variable)
    for number in range(1, 5):
        variable.upsert([number], rows_of([number]))
        path = checkpoint.save(f"file://{tmp_path}/c")
        folder = tmp_path / f"TFRADynamicEmbedding-{number}"
        assert folder.is_dir()
        variable.upsert([99], rows_of([99]))
        checkpoint.restore(path)
        assert held(variable) == expected(range(1, number + 1))
        if number == 2:
            for file in tmp_path.glob("c-1.*"):
                file.unlink()
    assert not (tmp_path / "TFRADynamicEmbedding-1").exists()


def saved_by(tmp_path, size, by_rank, kind, steps=4):
    """Has each of `size` processes train its keys and save; returns (rows, {state: rows})."""
    rows, all_states = {}, {}
    for rank in range(size):
        options = {"proc_size": size, "proc_rank": rank, "save_path": tmp_path}
        variable = de.Variable(dim=3, name="v", kv_creator=creator(True, kind, **options))
        optimizer = de.DynamicEmbeddingOptimizer(by_rank(rank))
        shadow = variable.get_trainable_by_name("t")
        for step in range(steps + rank):
            keys = KEYS[KEYS % size == rank][step :: 3 + rank]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cos(de.embedding_lookup(variable, keys, name="t") + 1))
            optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
        tf.train.Checkpoint(it=variable).write(str(tmp_path / f"c{rank}"))
        rows |= held(variable)
        for name, values in states(variable, optimizer).items():
            all_states.setdefault(name, {}).update(values)
    return rows, all_states


@pytest.mark.parametrize(("size", "others"), [(1, 2), (2, 2), (3, 2), (2, 1)])
def test_states_go_with_the_rows_to_other_processes(tmp_path, size, others):
    kind = de.HkvHashTableCreator if size == 2 else de.CuckooHashTableCreator
    rows, all_states = saved_by(tmp_path, size, lambda _: keras.optimizers.Adam(0.1), kind)
    assert sorted(all_states) == ["m", "v"]
    for rank in range(others):
        options = {"proc_size": others, "proc_rank": rank, "save_path": tmp_path}
        target = filled([5], kv_creator=creator(True, kind, **options))
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
        trained(target, optimizer, 0, 1)
        saved = min(rank, size - 1)
        tf.train.Checkpoint(it=target).read(str(tmp_path / f"c{saved}")).assert_consumed()
        mine = [key for key in rows if key % others == rank]
        assert held(target) == {key: rows[key] for key in mine}
        found = states(target, optimizer)
        assert found == {
            name: {key: values[key] for key in mine} for name, values in all_states.items()
        }


def test_files_of_two_jobs_in_one_folder_are_refused(tmp_path):
    for size in (1, 2):
        saved_by(tmp_path, size, lambda _: keras.optimizers.Adam(0.1), de.CuckooHashTableCreator)
    for options in ({}, {"proc_size": 2, "proc_rank": 1}):
        target = filled([5], kv_creator=creator(True, save_path=tmp_path, **options))
        with pytest.raises(ValueError, match="several groups.*size 1 with 1 shard.*size 2"):
            tf.train.Checkpoint(it=target).read(str(tmp_path / "c0"))
        assert held(target) == expected([5])


def by_rank(rank):
    return keras.optimizers.Adam(0.1) if rank else keras.optimizers.Adagrad(0.1)


def test_states_of_several_kinds_begin_anew(tmp_path, caplog):
    rows, _ = saved_by(tmp_path, 2, by_rank, de.CuckooHashTableCreator)
    target = filled([5], kv_creator=creator(True, save_path=tmp_path))
    tf.train.Checkpoint(it=target).read(str(tmp_path / "c0")).assert_consumed()
    assert held(target) == rows
    assert "optimizer states of 'v' begin anew" in caplog.text


def test_the_checkpoint_itself_has_no_rows_and_files_alone_are_rows(tmp_path, caplog):
    variable = filled(KEYS, kv_creator=creator(True))
    checkpoint = de.train.Checkpoint(it=variable)
    path = checkpoint.write(str(tmp_path / "c"))
    saved = [name for name, _ in tf.train.list_variables(path) if name.startswith("it")]
    assert saved == ["it/rows/.ATTRIBUTES/files"]
    folder = tmp_path / "TFRADynamicEmbedding"
    assert (folder / "v_rank0_size1-states.npz").exists()
    other = filled([5])
    other.load_from_file_system(folder)  # as programs of TFRA read them
    assert held(other) == expected(KEYS)
    for name in os.listdir(folder):
        if not name.endswith(("-keys", "-values")):
            (folder / name).unlink()
    variable.upsert([5], rows_of([5]))
    checkpoint.read(path).assert_consumed()
    assert held(variable) == expected(KEYS)
    assert "begin anew" in caplog.text


def of_another_save(folder):
    states_file = folder / "v_rank0_size1-states.npz"
    kept = states_file.read_bytes()
    variable = filled(KEYS[:9], kv_creator=creator(True))
    de.train.Checkpoint(it=variable).write(str(folder.parent / "c"))
    states_file.write_bytes(kept)


def cut(folder):
    states_file = folder / "v_rank0_size1-states.npz"
    states_file.write_bytes(states_file.read_bytes()[:-30])


def test_corrupt_files_change_nothing(tmp_path):
    for broken, text in (
        (of_another_save, "from two saves"),
        (cut, "states.npz' is corrupt"),
    ):
        variable = filled(KEYS, kv_creator=creator(True))
        path = de.train.Checkpoint(it=variable).write(str(tmp_path / broken.__name__ / "c"))
        broken(tmp_path / broken.__name__ / "TFRADynamicEmbedding")
        target = filled([5, 6], kv_creator=creator(True))
        with pytest.raises(ValueError, match=text):
            de.train.Checkpoint(it=target).read(path)
        assert held(target) == expected([5, 6])


def in_files_of(name="v", **saver):
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver(**saver))
    return de.Variable(dim=1, name=name, kv_creator=creator)


def test_two_variables_of_one_file_name_are_refused(tmp_path):
    for names in (("same", "same"), ("a/b", "a_b")):
        checkpoint = de.train.Checkpoint(variables=[in_files_of(name) for name in names])
        with pytest.raises(ValueError, match="needs a name of its own"):
            checkpoint.write(str(tmp_path / "c-1"))


@pytest.mark.parametrize("own_path", [False, True])
def test_rows_of_another_save_are_not_taken_for_a_checkpoints(tmp_path, own_path):
    variable = in_files_of(**({"save_path": str(tmp_path / "rows")} if own_path else {}))
    checkpoint = de.train.Checkpoint(variable=variable)
    paths = []
    for number, prefix in enumerate(("ckpt-1", "best-1")):
        variable.upsert([1], [[float(number)]])
        paths.append(checkpoint.write(str(tmp_path / prefix)))
    variable.upsert([1], [[9.0]])
    with pytest.raises((ValueError, tf.errors.OpError), match="of another save than this"):
        checkpoint.read(paths[0])
    assert variable.lookup([1]).numpy().tolist() == [[9.0]]
    checkpoint.read(paths[1])
    assert variable.lookup([1]).numpy().tolist() == [[1.0]]


def test_a_folder_stays_while_a_checkpoint_of_its_step_does(tmp_path):
    variable = in_files_of()
    first, second = (de.train.Checkpoint(variable=variable) for _ in range(2))
    managers = [
        tf.train.CheckpointManager(each, str(tmp_path), max_to_keep=1, checkpoint_name=name)
        for each, name in ((first, "ckpt"), (second, "best"))
    ]
    variable.upsert([1], [[1.0]])
    managers[0].save(checkpoint_number=1)
    best = managers[1].save(checkpoint_number=1)
    managers[0].save(checkpoint_number=2)
    managers[0].save(checkpoint_number=3)
    variable.clear()
    second.restore(best)
    assert variable.lookup([1]).numpy().tolist() == [[1.0]]


def test_a_checkpoint_in_the_background_is_refused(tmp_path):
    checkpoint = de.train.Checkpoint(variable=in_files_of())
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    with pytest.raises(NotImplementedError, match="before it returns"):
        checkpoint.save(str(tmp_path / "c"), options=options)


@pytest.mark.parametrize("kind", ["ours", "TensorFlow's", "sharded"])
def test_a_monitored_session_saves_files_beside_each_checkpoint(kind, tmp_path):
    tf1 = tf.compat.v1
    for last in (2, 4):
        with tf.Graph().as_default():
            variable = in_files_of("monitored")
            ids = tf.constant([1, 2], tf.int64)
            rows, trainable = de.embedding_lookup(variable, ids, return_trainable=True)
            step = tf1.train.get_or_create_global_step()
            optimizer = de.DynamicEmbeddingOptimizer(tf1.train.GradientDescentOptimizer(0.5))
            train = optimizer.minimize(tf.reduce_sum(rows), step, var_list=[trainable])
            saver = de.train.DEHvdSaver if kind == "ours" else tf1.train.Saver
            scaffold = tf1.train.Scaffold(saver=saver(sharded=kind == "sharded"))
            with tf1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path),
                scaffold=scaffold,
                save_checkpoint_steps=1,
                hooks=[tf1.train.StopAtStepHook(last_step=last)],
            ) as session:
                while not session.should_stop():
                    found, _ = session.run([rows, train])
    assert found.tolist() == [[-1.5]] * 2
    folders = sorted(each.name for each in tmp_path.glob("TFRA*"))
    assert folders == [f"TFRADynamicEmbedding-{step}" for step in range(5)]


def test_where_one_process_has_no_states_file_all_states_begin_anew():
    """Also where this process owns no key of that one: all processes do the same."""
    none, seen = np.empty(0, np.int64), np.empty(0, np.uint32)
    without = Content(none, np.empty((0, 2), np.float32), [], {}, none, {}, {})
    known = Content(
        *(np.array([5]), np.ones((1, 2), np.float32), [], {"stamps": np.ones(1, np.uint32)}),
        *(none, {"sightings": seen, "sighting_stamps": seen}, {"num_lookups": 1}),
    )
    for parts in ([without, known], [known, without]):
        whole = savers._join_parts(parts, "a table")
        assert whole.keys.tolist() == [5] and whole.columns == whole.pending == {}
