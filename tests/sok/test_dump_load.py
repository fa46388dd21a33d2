"""sok.dump and sok.load: training goes on where it stopped."""

import sys
import time
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.files import manifest
from sok_lite.engine.table import clock

pytestmark = pytest.mark.usefixtures("initialised")


def adam():
    return sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))


def train(variables, optimizer, steps):
    for step in range(steps):
        ids = tf.constant([step % 3, 5, 2**62])
        with tf.GradientTape() as tape:
            rows = [tf.nn.embedding_lookup(variable, ids) for variable in variables]
            loss = tf.add_n([tf.reduce_sum(some**2) for some in rows])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def variables(**options):
    return [
        sok.DynamicVariable(3, "ones", name="a/b"),
        sok.DynamicVariable(2, "13", "hybrid", name="a_b", init_capacity=64, **options),
    ]


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        for expected, got in zip(sok.export(one), sok.export(other), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: optimizer,
        lambda optimizer: [optimizer],
        lambda optimizer: optimizer.optimizer,  # as of SOK, where only the wrapper may be given
    ],
    ids=["wrapper", "list", "wrapped"],
)
def test_training_goes_on_where_it_stopped(tmp_path, wrap):
    straight, optimizer = variables(), adam()
    train(straight, optimizer, 3)
    sok.dump(tmp_path / "c", straight, wrap(optimizer))
    train(straight, optimizer, 4)
    other, new = variables(), adam()
    train(other, new, 1)
    sok.load(str(tmp_path / "c"), tuple(other), wrap(new))
    assert int(new.iterations) == 3
    train(other, new, 4)
    assert_same(straight, other)


def test_several_optimizers_go_on_where_they_stopped(tmp_path):
    def made():
        ours = variables()
        return ours, [adam(), sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.3))]

    def train_each(ours, optimizers, steps):
        for variable, optimizer, more in zip(ours, optimizers, (0, 2), strict=True):
            train([variable], optimizer, steps + more)

    (straight, optimizers), (other, new) = made(), made()
    train_each(straight, optimizers, 3)
    sok.dump(tmp_path, straight, optimizers)
    sok.load(tmp_path, other, tuple(new))
    assert [int(each.iterations) for each in new] == [3, 5]
    train_each(straight, optimizers, 2)
    train_each(other, new, 2)
    assert_same(straight, other)
    for given in (new[0], [*new, adam()]):
        fresh = variables()
        with pytest.raises(ValueError, match="counts of 2 optimizers. Received: .*in the order of"):
            sok.load(tmp_path, fresh, given)
        assert not any(len(each) for each in fresh)


def test_an_optimizer_without_a_rule_goes_on_from_what_it_keeps_beside_the_states(tmp_path):
    own = pytest.importorskip("tests.support.own_optimizers")
    straight, optimizer = variables(), sok.OptimizerWrapper(own.OfKeras3())
    train(straight, optimizer, 3)
    sok.dump(tmp_path, straight, optimizer)
    train(straight, optimizer, 2)
    other, new = variables(), sok.OptimizerWrapper(own.OfKeras3())
    sok.load(tmp_path, other, new)  # before its first step, and again after one
    train(other, new, 1)
    sok.load(tmp_path, other, new)
    train(other, new, 2)
    assert_same(straight, other)
    sok.dump(tmp_path / "none", other, sok.OptimizerWrapper(own.OfKeras3()))
    sok.load(tmp_path / "none", other, new)
    assert new._carried.values == {}


def test_what_cannot_be_read_of_optimizers_is_refused_before_anything_changes(tmp_path):
    one, optimizer = sok.DynamicVariable(2, "ones", name="v"), adam()
    tf.nn.embedding_lookup(one, [1])
    sok.dump(tmp_path, one, optimizer)
    found, other = manifest.read(tmp_path), sok.DynamicVariable(2, "ones", name="v")
    cases = [
        ({"iterations": counts}, optimizer, "its step counts are")
        for counts in ("7", 3, None, [], [None], [-1], [2**63], [1.5], {"0": 1})
    ]
    for carried in ("", "AAAA", "%", 3, None, "UEsDBA=="):
        corrupt = {"iterations": [0], "carried": carried}
        whole = {"iterations": [0], "other_optimizers": [corrupt]}
        for extra, given in ((corrupt, optimizer), (whole, [optimizer, adam()])):
            cases.append((extra, given, "keeps beside the states of rows cannot be read"))
    for extra, given, text in cases:
        manifest.publish(str(tmp_path), manifest.as_text(found._replace(extra=extra)))
        with pytest.raises(ValueError, match=text):
            sok.load(tmp_path, other, given)
        assert len(other) == 0


def test_one_variable_of_another_kind_merges(tmp_path):
    one = sok.DynamicVariable(2, name="v")
    sok.assign(one, [1, 2], [[1.0, 1], [2, 2]])
    sok.dump(tmp_path, one)
    other = sok.DynamicVariable(2, "ones", "hybrid", name="v", dtype=tf.bfloat16, init_capacity=64)
    sok.assign(other, [2, 3], tf.constant([[7.0, 7], [3, 3]], tf.bfloat16))
    with pytest.raises(ValueError, match="cast=True"):
        sok.load(tmp_path, other)
    sok.load(tmp_path, other, mode="merge", cast=True)
    keys, rows = sok.export(other)
    np.testing.assert_array_equal(keys, [1, 2, 3])
    np.testing.assert_array_equal(tf.cast(rows, tf.float32)[:, 0], [1, 2, 3])


def test_what_cannot_be_dumped_is_refused(tmp_path):
    one, plain = sok.DynamicVariable(2, name="v"), tf.keras.optimizers.Adam
    static = sok.Variable(np.ones([2, 2], "f4"), name="s")
    cases = [
        (([one, wrong],), TypeError, rf"hold such\. Received: {type(wrong).__name__}\. Save other")
        for wrong in (tf.Variable([1.0]), 3, tf.Module())
    ]
    cases += [
        (([],), ValueError, "at least one"),
        ((one, "adam"), TypeError, r"must be a Keras 3, .* Received: builtins\.str"),
        ((one, plain()), TypeError, r"needs the sok\.OptimizerWrapper that trains dynamic"),
        (
            (one, [adam(), plain()]),
            TypeError,
            "around it. Leave out an optimizer that trains dense",
        ),
        (
            ([one, static], [adam(), adam()]),
            *(ValueError, r"one optimizer with static.* Received: 2, with 's:0'"),
        ),
    ]
    for call in (sok.dump, sok.load):
        for arguments, error, text in cases:
            with pytest.raises(error, match=text):
                call(tmp_path, *arguments)
        with pytest.raises(RuntimeError, match="eager mode"):
            tf.function(lambda call=call: call(tmp_path, one))()
    sok.dump(tmp_path, one)
    with pytest.raises(ValueError, match="no step count"):
        sok.load(tmp_path, one, adam())
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        sok.load(tmp_path / "none", one)


def test_the_ranks_must_be_connected(tmp_path, two_launched):
    with pytest.raises(RuntimeError, match="init"):
        sok.dump(tmp_path, sok.DynamicVariable(2))


def test_a_bar_shows_the_bytes(tmp_path, capsys):
    one = sok.DynamicVariable(2, name="v")
    sok.assign(one, range(100), tf.ones([100, 2]))
    for call, word in ((sok.dump, "Dump to"), (sok.load, "Load from")):
        call(tmp_path / "c", one)  # no terminal here
        call(tmp_path / "c", one, progress=False)
        assert capsys.readouterr().err == ""
        call(tmp_path / "c", one, progress=True)
        shown = capsys.readouterr().err
        assert f"{word} {tmp_path / 'c'}: 100%" in shown and "kB/s" in shown.replace("MB/s", "kB/s")
        with pytest.raises(TypeError, match="`progress` must be"):
            call(tmp_path / "c", one, progress=1)


def test_a_terminal_has_a_bar_and_tqdm_may_be_missing(tmp_path, capsys, monkeypatch):
    one = sok.DynamicVariable(2, name="v")
    sok.assign(one, [1], tf.ones([1, 2]))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    sok.dump(tmp_path, one)
    assert "100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    sok.dump(tmp_path, one)
    assert capsys.readouterr().err == ""
    with pytest.raises(ImportError, match=r"sok_lite\[progress\]"):
        sok.load(tmp_path, one, progress=True)


# -------------------------------------------------------------------- what has changed


def test_increments_come_back_with_step_counts(tmp_path):
    straight, optimizer = variables(), adam()
    for steps in (3, 0, 2):
        train(straight, optimizer, steps)
        sok.dump(tmp_path, straight, optimizer, incremental=True)
    assert len(list(tmp_path.glob("data-*"))) == 3
    other, new = variables(), adam()
    sok.load(tmp_path, other, new)
    assert int(new.iterations) == 5
    for model, its in ((straight, optimizer), (other, new)):
        train(model, its, 4)
    sok.dump(tmp_path, other, new, incremental=True)  # the new process goes on
    assert len(list(tmp_path.glob("data-*"))) == 4
    again = variables()
    sok.load(tmp_path, again)
    assert_same(straight, other)
    assert_same(straight, again)


def look_up(table, keys, time, monkeypatch):
    """Looks keys up as of a time, in seconds."""
    with monkeypatch.context() as patch:
        patch.setattr(clock.time, "time", lambda: time)
        table.table.lookup(np.array(keys))  # by Python's clock, not by that of native code


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_what_changed_since_a_time(monkeypatch, dtype):
    first, second = (
        sok.DynamicVariable(2, "ones", kind, name=kind, dtype=dtype, key_type=key_type)
        for kind, key_type in (("hbm", tf.int32), ("hybrid", tf.int64))
    )
    noon = datetime(2024, 2, 29, 12, tzinfo=timezone.utc)
    for seconds, keys in ((0, [9, 7, 5]), (60, [3, 7]), (120, [-1])):
        for table in (first, second):
            look_up(table, keys, noon.timestamp() + seconds, monkeypatch)
    first.scatter_update(tf.IndexedSlices(tf.constant([[4.0, 4]], dtype), tf.constant([9])))
    first.erase([3])
    since = noon + timedelta(seconds=30)
    keys_list, values_list = sok.incremental_model_dump([first, second], since)
    assert [keys.tolist() for keys in keys_list] == [[-1, 7, 9], [-1, 3, 7]]
    assert [keys.dtype for keys in keys_list] == [np.int32, np.int64]
    assert [rows.dtype for rows in values_list] == [dtype.as_numpy_dtype] * 2
    assert values_list[0].tolist() == [[1, 1], [1, 1], [4, 4]]
    later, local = noon + timedelta(seconds=90), (noon + timedelta(days=1)).astimezone()
    keys_list, values_list = sok.incremental_model_dump((first, second), [later, local])
    assert [keys.tolist() for keys in keys_list] == [[-1, 9], []]
    assert values_list[1].shape == (0, 2)
    keys_list, _ = sok.incremental_model_dump(first, [local.replace(tzinfo=None)])
    assert keys_list[0].tolist() == []
    everything = datetime.fromtimestamp(0)
    assert sok.incremental_model_dump(second, everything)[0][0].tolist() == [-1, 3, 5, 7, 9]


def test_what_was_removed_since_a_time(monkeypatch):
    first, second = tables = [
        sok.DynamicVariable(2, "ones", name="first", key_type=tf.int32),
        sok.DynamicVariable(2, "ones", "hybrid", name="second", init_capacity=16, max_capacity=16),
    ]
    noon = datetime(2024, 2, 29, 12, tzinfo=timezone.utc)
    look_up(first, [9, 7, 5], noon.timestamp(), monkeypatch)
    with pytest.raises(ValueError, match="'first' does not note which keys are removed.*log_remov"):
        sok.incremental_model_dump(first, noon, removed=True)
    sok.log_removals(tables)
    with pytest.raises(ValueError, match="has the removals since lookup 1"):
        sok.incremental_model_dump(first, datetime.fromtimestamp(0), removed=True)
    look_up(second, list(range(8)), noon.timestamp(), monkeypatch)
    first.erase([9])  # between two lookups, before the time: it may be told
    look_up(first, [1, 5], noon.timestamp() + 60, monkeypatch)
    first.erase([5, 7])
    look_up(first, [7], noon.timestamp() + 120, monkeypatch)  # and is back
    for number in range(1, 20):
        look_up(second, list(range(8 * number, 8 * number + 8)), noon.timestamp() + 60, monkeypatch)
    since = noon + timedelta(seconds=30)
    keys, rows, removed = sok.incremental_model_dump(tables, since, removed=True)
    assert set(removed[0].tolist()) - {9} == {5} and removed[0].dtype == np.int32
    assert keys[0].tolist() == [1, 7] and rows[0].shape == (2, 2)
    left = set(sok.export(second)[0].numpy().tolist())
    assert set(removed[1].tolist()) == set(range(160)) - left and len(left) == 16
    again = sok.incremental_model_dump(tables, since, removed=True)
    assert [each.tolist() for each in again[2]] == [each.tolist() for each in removed]
    later = noon + timedelta(seconds=90)
    assert sok.incremental_model_dump(first, later, removed=True)[2][0].tolist() == [5]
    with pytest.raises(ValueError, match="has the removals since lookup"):
        sok.incremental_model_dump(first, noon, removed=True)


def test_the_first_and_the_last_time_are_those_of_all_keys_and_none(monkeypatch):
    table = sok.DynamicVariable(2, "ones")
    tf.nn.embedding_lookup(table, [3, 5])
    for zone in ("UTC+9", "UTC", "UTC-9"):  # of POSIX: + is west
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            for at, keys in ((datetime.min, [3, 5]), (datetime.max, [])):
                assert sok.incremental_model_dump(table, at)[0][0].tolist() == keys
    time.tzset()


@pytest.mark.parametrize("with_session", [True, False])
def test_what_changed_since_a_time_in_a_session_of_tf1(monkeypatch, with_session):
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        tables = [sok.DynamicVariable(2, "ones", kind, name=kind) for kind in ("hbm", "hybrid")]
        keys = v1.placeholder(tf.int64, [None])
        read = [tf.nn.embedding_lookup(table, keys) for table in tables]
        add = tables[0].scatter_add(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([7])))
        session.run(v1.global_variables_initializer())
        for time, some in ((1000.0, [7, 5]), (1060.0, [-1, 7])):
            with monkeypatch.context() as patch:
                patch.setattr(clock.time, "time", lambda time=time: time)
                session.run(read, {keys: some})
        session.run(add)
        num_operations = len(graph.get_operations())
        since = datetime.fromtimestamp(1030.0)
        given = {"sess": session} if with_session else {}
        keys_list, values_list = sok.incremental_model_dump(tables, since, **given)
        assert len(graph.get_operations()) == num_operations
    assert [some.tolist() for some in keys_list] == [[-1, 7], [-1, 7]]
    assert [rows.tolist() for rows in values_list] == [[[1, 1], [2, 2]], [[1, 1], [1, 1]]]


def test_wrong_arguments_of_an_incremental_dump():
    one, now = sok.DynamicVariable(2), datetime.now()
    static, plain = sok.Variable(np.ones((2, 2), np.float32)), tf.Variable([[1.0]])
    dump = sok.incremental_model_dump
    for call, error, text in (
        (lambda: dump([one], 3), TypeError, "must be a datetime.*Received: 3"),
        (lambda: dump(one, [now, now]), ValueError, "one for each of 1 variables. Received: 2"),
        (lambda: dump([plain], now), TypeError, "takes sok.DynamicVariable"),
        (lambda: dump([static], now), TypeError, "DynamicVariable. Received: a static variable"),
        (lambda: dump(one, now, sess=object()), TypeError, "must be a session of TF1, or None"),
        (tf.function(lambda: dump(one, now)), RuntimeError, "outside of the tf.function"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_training_goes_on_while_a_dump_is_written(tmp_path):
    straight, optimizer = variables(), adam()
    straight.append(sok.Variable(tf.ones([6, 2]), name="static"))

    def step(tables, wrapper):
        with tf.GradientTape() as tape:
            ids = tf.ragged.constant([[1, 5]], dtype=tf.int64)
            out = sok.lookup_sparse(tables, [ids] * 3, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(each**2) for each in out])
        gradients = tape.gradient(loss, tables)
        wrapper.apply_gradients(zip(gradients, tables, strict=True))

    step(straight, optimizer)
    begun = sok.dump(tmp_path, straight, optimizer, background=True)
    for _ in range(3):
        step(straight, optimizer)
    begun.wait()
    assert begun.done
    other, new = [*variables(), sok.Variable(tf.zeros([6, 2]), name="static")], adam()
    new.optimizer.build([other[2]])
    sok.load(tmp_path, other, new)
    assert int(new.iterations) == 1
    for _ in range(3):
        step(other, new)
    assert_same(straight[:2], other[:2])
    np.testing.assert_array_equal(straight[2].numpy(), other[2].numpy())
    with pytest.raises(ValueError, match="no bar"):
        sok.dump(tmp_path, other, background=True, progress=True)
