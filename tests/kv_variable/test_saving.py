"""KvVariables in the checkpoints of `tf.compat.v1.train.Saver`: written, read, gone on from."""

import gc
import json
import time
import uuid
import weakref

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from tests.support.saved_graphs import (
    DAY,
    DIM,
    Trained,
    adam,
    of,
    saved,
    shrinking,
    tf1,
    tfplus_part,
    write_tfplus,
)

LEAST, MOST = -(2**63), 2**63 - 1
BEFORE = [[1, 2, 3, 3], [-5, 3, LEAST], [MOST, 0, -5]]
AFTER = [[2, 3, 77], [LEAST, MOST, -5, -5]]


def make(path, parts=None, batches=BEFORE, **arguments):
    """Trains a new variable and saves it; returns (path, what it knew)."""
    graph = Trained(parts, **arguments)
    with graph.session() as session:
        graph.train(*batches)
        path = tf1.train.Saver().save(session, str(path))
        return path, graph.known()[0]


# ---- there and back ------------------------------------------------------------------------------


def test_the_counts_are_those_of_a_dict(tmp_path):
    path, known = make(tmp_path / "model", 2)
    counts = {}
    for batch in BEFORE:
        for key in batch:
            counts[key] = counts.get(key, 0) + 1
    assert {key: count for key, (_, count) in known.items()} == counts
    tensors = saved(path)
    keys = of(tensors, "freq_keys").tolist()
    assert dict(zip(keys, of(tensors, "freq_values").tolist(), strict=True)) == counts
    rows = dict(zip(of(tensors, "keys").tolist(), of(tensors, "values").tolist(), strict=True))
    assert rows == {key: list(row) for key, (row, _) in known.items()}


def test_the_names_are_those_of_tfplus_and_some_more(tmp_path):
    path, _ = make(tmp_path / "model", 2)
    ours = {name: array for name, array in saved(path).items() if name.startswith("kv")}
    tfplus = ["keys", "values", "init_table", "blacklist", "freq_keys", "freq_values"]
    more = ["freq_times", "states", "state_columns", "need_full_import", "delete_keys", "facts"]
    expected = {f"kv/part_{i}:0-{name}" for i in range(2) for name in tfplus + more}
    assert set(ours) == expected
    even = ours["kv/part_0:0-keys"]
    assert even.dtype == np.int64 and not (even % 2).any()
    assert ours["kv/part_1:0-freq_values"].dtype == np.int64
    assert ours["kv/part_1:0-init_table"].shape == (0, DIM)
    path, _ = make(tmp_path / "other")
    assert "kv:0-keys" in saved(path)


@pytest.mark.parametrize("how", ["list", "dict", "partitioned", "sharded"])
def test_every_way_to_say_what_is_saved(tmp_path, how):
    def saver(graph):
        if how == "list":
            return tf1.train.Saver([*graph.variable, graph.dense])
        if how == "dict":
            return tf1.train.Saver({v.op.name: v for v in [*graph.variable, graph.dense]})
        if how == "partitioned":
            return tf1.train.Saver({"kv": graph.variable, "dense": graph.dense})
        return tf1.train.Saver(sharded=True)

    graph = Trained(3)
    with graph.session() as session:
        graph.train(*BEFORE)
        known = graph.known()
        path = saver(graph).save(session, str(tmp_path / "model"))
    again = Trained(3)
    with again.session(initialized=False) as session:
        saver(again).restore(session, path)
        assert again.known() == known


def test_another_name_in_a_dict_is_refused():
    graph = Trained(2)
    first, second = graph.variable
    with graph.graph.as_default():
        for names in ({"other": graph.variable}, {"other": [first, second]}, {"kv/part_1": first}):
            with pytest.raises(ValueError, match="by its own name.*'(other|kv/part_1)'.*Saveable"):
                tf1.train.Saver(names)


def test_a_saver_calls_python_once_to_save_a_table_and_twice_to_restore_it():
    graph = Trained(3)
    with graph.graph.as_default():
        tf1.train.Saver()
    calls = [each for each in graph.graph.get_operations() if each.type == "EagerPyFunc"]
    assert len([call for call in calls if call.name.startswith("save/")]) == 3


@pytest.mark.parametrize(
    "kind",
    [
        *({"value_dtype": tf.float16}, {"value_dtype": tf.bfloat16}, {"key_dtype": tf.int32}),
        *({"dim": 1}, {"dim": 33}, {}),
    ],
    ids=str,
)
def test_other_kinds_of_keys_and_rows(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    few = [[], [[5]], [[0, 3, 6]], [[LEAST, MOST]]]
    for batches in few if not kind else [[[1, -2, 3], [2**31 - 1, -(2**31)]]]:
        # An address is for TensorFlow, and no folder of that name.
        path, known = make(f"ram://{uuid.uuid4().hex}/model", 2, batches, **kind)
        again = Trained(3, **kind)
        with again.session() as session:
            again.train([1, 2, 3])
            tf1.train.Saver().restore(session, path)
            assert again.known()[0] == known
            keys = {key for batch in batches for key in batch}
            assert session.run(again.variable.total_count) == len(keys)
            again.train([1])
    assert list(tmp_path.iterdir()) == []


def test_two_variables_and_another_graph_with_the_same_names(tmp_path):
    def both(first=0):
        with tf.Graph().as_default() as graph:
            variables = [kv.get_kv_variable(name, DIM) for name in ("a", "b")]
            keys = [tf.constant([first + i, 7], tf.int64) for i in (1, 2)]
            pairs = zip(variables, keys, strict=True)
            rows = [tf.nn.embedding_lookup(variable, some) for variable, some in pairs]
            exported = [variable.export() for variable in variables]
            session = tf1.Session(graph=graph)
            session.run(tf1.global_variables_initializer())
            return session, tf1.train.Saver(), rows, exported, variables

    (session, saver, rows, exported, *_kept), (other, _, other_rows, *_others) = both(), both(50)
    other.run([other_rows, other_rows])
    session.run(rows)
    path, expected = saver.save(session, str(tmp_path / "model")), session.run(exported)
    assert [keys.tolist() for keys, _ in expected] == [[1, 7], [2, 7]]
    again, saver, _, exported, *_more = both()
    saver.restore(again, path)
    for found, its in zip(again.run(exported), expected, strict=True):
        np.testing.assert_array_equal(found[0], its[0])
        np.testing.assert_array_equal(found[1], its[1])


# ---- sessions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [None, 2])
def test_a_session_must_initialize_or_restore(tmp_path, parts):
    path, _ = make(tmp_path / "model", parts)
    graph = Trained(parts)
    with graph.session(initialized=False) as session:
        saver, missing = tf1.train.Saver(), tf1.report_uninitialized_variables()
        for some in (saver, tf1.train.Saver([graph.variable])):
            with pytest.raises(tf.errors.FailedPreconditionError):
                some.save(session, str(tmp_path / "other"))
        with pytest.raises(tf.errors.FailedPreconditionError):
            graph.train([1])
        assert {part.op.name.encode() for part in graph.variable.parts} <= {*session.run(missing)}
        saver.restore(session, path)
        assert not session.run(missing).size
        graph.train([1])


@pytest.mark.parametrize("parts", [None, 3])
def test_a_monitored_session_goes_on_where_the_last_one_was(tmp_path, parts):
    def trained(folder, batches):
        graph = Trained(parts)
        with (
            graph.graph.as_default(),
            tf1.train.MonitoredTrainingSession(
                checkpoint_dir=folder, save_checkpoint_steps=1, log_step_count_steps=None
            ) as session,
        ):
            graph.run = session.run
            graph.train(*batches)
            return graph.known(), session.run([graph.dense, graph.global_step])

    folder = str(tmp_path / "interrupted")
    trained(folder, BEFORE)
    known, (dense, step) = trained(folder, AFTER)
    expected, (expected_dense, expected_step) = trained(str(tmp_path / "whole"), BEFORE + AFTER)
    assert known == expected
    np.testing.assert_array_equal(dense, expected_dense)
    assert step == expected_step == len(BEFORE + AFTER)


def test_a_saver_keeps_no_graph_alive(tmp_path):
    graph = Trained(2)
    with graph.session() as session:
        graph.train(*BEFORE)
        path = tf1.train.Saver().save(session, str(tmp_path / "model"))
        tf1.train.Saver().restore(session, path)
    table = weakref.ref(graph.variable.table)
    del graph, session
    gc.collect()
    assert table() is None


def test_a_saver_of_eager_mode(tmp_path):
    def variable(name):
        return kv.get_kv_variable(
            name, DIM, partitioner=tf1.fixed_size_partitioner(2), initializer="uniform"
        )

    ours = variable("eager")
    rows = tf.nn.embedding_lookup(ours, tf.constant([4, -7, 9], tf.int64))
    path = tf1.train.Saver([*ours]).save(None, str(tmp_path / "model"))
    tf.nn.embedding_lookup(ours, tf.constant([4, 5], tf.int64))
    tf1.train.Saver([*ours]).restore(None, path)
    keys, values = ours.export()
    np.testing.assert_array_equal(keys, [-7, 4, 9])
    np.testing.assert_array_equal(values, tf.gather(rows, [1, 0, 2]))
    np.testing.assert_array_equal(ours.get_counting([4, -7, 5]), [1, 1, 0])


# ---- what TFPlus does wrong ----------------------------------------------------------------------


def test_defect_3_a_row_is_clipped_by_what_it_is_when_it_is_saved(tmp_path):
    graph = Trained(None, initializer=tf1.zeros_initializer())
    with graph.session() as session:
        graph.look_up([1, 2])
        saver = tf1.train.Saver()
        assert not of(saved(saver.save(session, str(tmp_path / "zeros"))), "keys").size
        graph.train([2])  # and not looked up again
        path = saver.save(session, str(tmp_path / "model"))
        known = graph.known()[0]
    assert of(saved(path), "keys").tolist() == [2]
    assert set(of(saved(path), "freq_keys")) == {1, 2}
    again = Trained(None, initializer=tf1.ones_initializer())
    with again.session(initialized=False) as session:
        tf1.train.Saver().restore(session, path)
        assert again.known()[0] == known and known[1][0] == (0.0,) * DIM


# ---- modes ---------------------------------------------------------------------------------------


@pytest.fixture
def predicting():
    kv.set_tfplus_saver_mode(0)
    yield
    kv.set_tfplus_saver_mode(1)


def check_predict_mode(path, known):
    tensors = saved(path)
    assert not of(tensors, "freq_keys").size and not of(tensors, "states").size
    assert not of(tensors, "blacklist").size
    rows = dict(zip(of(tensors, "keys").tolist(), of(tensors, "values").tolist(), strict=True))
    assert rows == {key: list(row) for key, (row, _) in known.items() if any(row)}
    again = Trained(2)
    with again.session() as session:
        tf1.train.Saver([again.variable]).restore(session, path)
        restored = again.known()[0]
    assert {key: row for key, (row, _) in restored.items()} == {
        key: row for key, (row, _) in known.items() if any(row)
    }


@pytest.mark.parametrize("optimizer", [shrinking, adam])
def test_predict_mode_saves_keys_and_rows_alone(tmp_path, predicting, optimizer):
    """The mode is that of when the saver is made, or of one saver alone."""
    graph = Trained(3, optimizer)
    with graph.session() as session:
        graph.train(*BEFORE)
        savers = [tf1.train.Saver()]
        kv.set_tfplus_saver_mode(1)
        savers.append(tf1.train.Saver([kv.KvVariableSaveable(graph.variable, mode=0)]))
        known = graph.known()[0]
        assert any(any(row) for row, _ in known.values()) == (optimizer is adam)
        for saver in savers:
            check_predict_mode(saver.save(session, str(tmp_path / "model")), known)
        path = tf1.train.Saver().save(session, str(tmp_path / "other"))
    assert of(saved(path), "freq_keys").size
    for mode in (2, -1, "1"):
        with pytest.raises(ValueError, match="Expected tfplus saver mode to be 0 or 1."):
            kv.set_tfplus_saver_mode(mode)


def test_a_variable_saved_by_another_name(tmp_path):
    path, known = make(tmp_path / "model", 3)
    again = Trained(2, name="other")
    with again.session() as session:
        saver = tf1.train.Saver([kv.KvVariableSaveable(again.variable, name="kv")])
        saver.restore(session, path)
        assert again.known()[0] == known
        path = saver.save(session, str(tmp_path / "model"))
    assert "kv/part_1:0-keys" in saved(path)


@pytest.mark.parametrize("parts", [None, 2])
def test_a_checkpoint_is_no_initial_value_and_the_error_names_the_saver(tmp_path, parts):
    def made():
        partitioner = None if parts is None else tf1.fixed_size_partitioner(parts)
        with tf1.variable_scope("scope"):
            dense = tf1.get_variable("dense", [3])
            return dense, kv.get_kv_variable("kv", DIM, partitioner=partitioner)

    with tf.Graph().as_default(), tf1.Session() as session:
        rows, _made = tf1.get_variable("rows", [5, DIM], use_resource=True), made()
        session.run(tf1.global_variables_initializer())
        path = tf1.train.Saver().save(session, str(tmp_path / "whole"))
        dense = tf1.train.Saver({"scope/kv": rows}).save(session, str(tmp_path / "dense"))
    with tf.Graph().as_default():
        dense_one, table = made()
        initial = dense_one.initializer
        way_out = r"Saver\(\[KvVariableSaveable\(v, 'scope/kv'\)\]\)\.restore"
        with pytest.raises(RuntimeError, match=way_out):
            tf1.train.init_from_checkpoint(dense, {"scope/kv": table})
        for scope in ("scope/", "/"):
            with pytest.raises(NotImplementedError, match=r"'scope/kv' empty.*KvVariableSaveable"):
                tf1.train.init_from_checkpoint(path, {scope: scope})
        assert dense_one.initializer is initial
        tf1.train.init_from_checkpoint(path, {"scope/dense": dense_one})
        assert dense_one.initializer is not initial


# ---- files of TFPlus -----------------------------------------------------------------------------


@pytest.mark.parametrize("day", [0, DAY])
@pytest.mark.parametrize("parts", [None, 2, 3])
def test_files_of_tfplus(tmp_path, parts, day):
    tensors = [
        tfplus_part([4, 2], [8], {2: 5, 8: 7, 4: 65535}, day << 16),
        tfplus_part([], [], {}, day << 16),
        tfplus_part([-3], [], {-3: 1}, day << 16),
    ]
    dense = {"dense": np.array([1.0, 2.0], np.float32), "global_step": np.int64(9)}
    path = write_tfplus(tmp_path / "tfplus", tensors, more=dense)
    again, started = Trained(parts, None), time.time()
    with again.session(initialized=False) as session:
        tf1.train.Saver().restore(session, path)
        assert again.known()[0] == {
            -3: ((-3.0, -2.5, 1.0), 1),
            2: ((2.0, 2.5, 1.0), 5),
            4: ((4.0, 4.5, 1.0), 65535),
            8: ((0.0, 0.0, 0.0), 7),
        }
        assert session.run(again.global_step) == 9
        for seen in again.times([2, 8]):
            assert seen == day * 86400 if day else seen >= int(started)


# ---- what cannot be restored ---------------------------------------------------------------------


def test_a_variable_of_another_form_is_refused(tmp_path):
    path, _ = make(tmp_path / "model", 2)
    for arguments, error, match in (
        ({"dim": DIM + 1}, "InvalidArgument", rf"{DIM + 1}, 'int64', 'float32'.*{DIM}, 'int64',"),
        ({"value_dtype": tf.float16}, "InvalidArgument", "'float16'.*'float32'"),
        ({"key_dtype": tf.int32}, "InvalidArgument", "'int32'.*'int64'"),
        ({"name": "missing_one"}, "NotFound", "missing_one"),
    ):
        graph = Trained(2, **arguments)
        with graph.session() as session:
            graph.train([100, 200])
            known, dense = graph.known(), session.run(graph.dense)
            with pytest.raises(getattr(tf.errors, f"{error}Error"), match=f"(?s){match}"):
                tf1.train.Saver().restore(session, path)
            assert graph.known() == known
            np.testing.assert_array_equal(session.run(graph.dense), dense)


def with_facts(tensors, part, change):
    facts = json.loads(bytes(tensors[f"part_{part}:0-facts"].item()))
    return {f"part_{part}:0-facts": np.array(json.dumps(facts | change(facts)))}


# What is changed of the tensors, by their names without "kv/"; None: left out.
CORRUPT = {
    "not all partitions of 'kv'.*Save all partitions together": lambda t: {
        name: None for name in t if name.startswith("part_1:0")
    },
    "has version 2": lambda t: with_facts(t, 0, lambda facts: {"version": 2}),
    "corrupt: no facts": lambda t: {"part_0:0-facts": np.array("{")},
    "corrupt: optimizer states of": lambda t: {"part_0:0-states": t["part_0:0-states"][:-1]},
    "corrupt: its states have": lambda t: {"part_0:0-states": t["part_0:0-states"][:, :-1]},
    "corrupt: its tensors differ in length": lambda t: {
        "part_0:0-freq_values": t["part_0:0-freq_values"][:-1]
    },
    "corrupt: its keys repeat": lambda t: {"part_1:0-keys": t["part_1:0-keys"][[0, 0, 0]]},
    "corrupt: its parts have .* keys in common": lambda t: {
        f"part_1:0-{name}": t[f"part_0:0-{name}"]
        for name in ("keys", "values", "states", "blacklist")
    },
    "corrupt: no float32 tensor kv/part_1:0-states": lambda t: {"part_1:0-states": None},
    "corrupt: partitions of several saves": lambda t: with_facts(
        t, 1, lambda facts: {"save": facts["save"] + 1}
    ),
}


def test_corrupt_checkpoints_are_refused(tmp_path):
    path, _ = make(tmp_path / "model", 2, [[1, 2, 3, 4, 5, 6]])
    whole = {name.removeprefix("kv/"): np.asarray(each) for name, each in saved(path).items()}
    for i, change in enumerate(CORRUPT.values()):
        tensors = whole | change(whole)
        tensors = {name: each for name, each in tensors.items() if each is not None}
        tf.raw_ops.SaveV2(
            prefix=f"{path}-{i}",
            tensor_names=[f"kv/{name}" if ":0-" in name else name for name in tensors],
            shape_and_slices=[""] * len(tensors),
            tensors=[tf.constant(array) for array in tensors.values()],
        )
    graph = Trained(2)
    with graph.session() as session:
        graph.train([100, 200])
        known, saver = graph.known(), tf1.train.Saver()
        for i, text in enumerate(CORRUPT):
            with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){text}"):
                saver.restore(session, f"{path}-{i}")
            assert graph.known() == known
