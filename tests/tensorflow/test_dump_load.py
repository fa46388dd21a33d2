"""sok.dump and sok.load: training goes on where it stopped."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

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


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: [optimizer]])
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
    for one, same in zip(straight, other, strict=True):
        for expected, got in zip(sok.export(one), sok.export(same), strict=True):
            np.testing.assert_array_equal(got, expected)


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
    one = sok.DynamicVariable(2, name="v")
    for call in (sok.dump, sok.load):
        with pytest.raises(TypeError, match=r"and sok\.Variable\. Received: .*Variable"):
            call(tmp_path, [one, tf.Variable([1.0])])
        with pytest.raises(ValueError, match="at least one"):
            call(tmp_path, [])
        with pytest.raises(TypeError, match="OptimizerWrapper"):
            call(tmp_path, one, tf.keras.optimizers.Adam())
        with pytest.raises(ValueError, match=r"one optimizer\. Received: 2"):
            call(tmp_path, one, [adam(), adam()])
        with pytest.raises(RuntimeError, match="eager mode"):
            tf.function(lambda call=call: call(tmp_path, one))()
    sok.dump(tmp_path, one)
    with pytest.raises(ValueError, match="no step count"):
        sok.load(tmp_path, one, adam())
    with pytest.raises(FileNotFoundError, match="no dump"):
        sok.load(tmp_path / "none", one)


def test_the_ranks_must_be_connected(tmp_path, uninitialised):
    with pytest.raises(RuntimeError, match="init"):
        sok.dump(tmp_path, sok.DynamicVariable(2))


def test_a_variable_in_static_mode_is_refused(tmp_path):
    one = sok.DynamicVariable(2, name="v")
    one.to_static(tf.constant([1, 2]))
    with pytest.raises(ValueError, match="to_dynamic"):
        sok.dump(tmp_path, one)


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
    for one, same in zip(straight[:2], other[:2], strict=True):
        for expected, got in zip(sok.export(one), sok.export(same), strict=True):
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(straight[2].numpy(), other[2].numpy())
    with pytest.raises(ValueError, match="no bar"):
        sok.dump(tmp_path, other, background=True, progress=True)
