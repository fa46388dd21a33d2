"""`TableMetrics`: what logs, TensorBoard and the log are told, against the tables themselves."""

import logging

import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture
def fitted(keras, sk):
    """Trains 3 epochs of 4 steps with 10 keys each, of which 5 are new in each step."""

    def fit(callback, **compiled):
        table = sk.Table("item", 2)
        ids = keras.Input([], dtype="int64")
        model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
        model.compile("sgd", "mse", **compiled)
        x = np.concatenate([np.arange(step * 5, step * 5 + 10) for step in range(4)])
        y = np.zeros([40, 1])
        model.fit(x, y, 10, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
        return table

    return fit


def scalars(folder):
    """{tag: {step: value}} of all files of events."""
    found = {}
    for path in folder.iterdir():
        for record in tf.data.TFRecordDataset([str(path)]):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, {})[event.step] = number
    return found


def test_tensorboard_gets_the_numbers_of_every_few_steps(sk, fitted, tmp_path):
    fitted(sk.TableMetrics(every=3, log_dir=tmp_path))
    found = scalars(tmp_path)
    # Step 5 is the first of the second epoch, in which every key is found.
    assert found["sok/item/keys"] == {3: 20, 6: 25, 9: 25, 12: 25}
    assert found["sok/item/new_keys_per_step"] == pytest.approx({3: 20 / 3, 6: 5 / 3, 9: 0, 12: 0})
    assert found["sok/item/evicted_per_step"] == {3: 0, 6: 0, 9: 0, 12: 0}
    assert found["sok/item/hit_rate"] == pytest.approx({3: 1 / 3, 6: 25 / 30, 9: 1, 12: 1})
    seconds = found["sok/seconds_per_step"]
    assert set(seconds) == {3, 6, 9, 12} and all(0 < each < 60 for each in seconds.values())
    names = ("keys", "hit_rate", "new_keys_per_step", "evicted_per_step")
    of_steps = {tag for tag in found if tag.startswith("sok/")}
    assert of_steps == {"sok/seconds_per_step", *(f"sok/item/{name}" for name in names)}


def test_logs_have_totals_and_each_table_is_told_by_itself(keras, sk, tmp_path):
    tables = [sk.Table("item", 2), sk.Table("user", 3, var_type="hybrid", max_capacity=128)]
    ids = keras.Input([], dtype="int64")
    rows = keras.layers.Concatenate()([table(ids) for table in tables])
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile("sgd", "mse")
    counts = sk.TableMetrics(log_dir=tmp_path)
    calls = {"batch_size": 10, "initial_epoch": 2, "epochs": 4, "verbose": 0, "callbacks": [counts]}
    logs = model.fit(np.arange(400), np.zeros([400, 1]), **calls).history
    numbers = [table.statistics() for table in tables]
    last = {f"{t.name}/keys": n.size for t, n in zip(tables, numbers, strict=True)}
    last |= {f"{t.name}/evicted": n.evicted_total for t, n in zip(tables, numbers, strict=True)}
    for t, n in zip(tables, numbers, strict=True):
        last[f"{t.name}/bytes"] = n.index_bytes + n.near_bytes + n.far_bytes
    assert last["item/keys"] == 400 and last["user/evicted"] > 400
    assert {name: counts.history[name][-1] for name in last} == last
    new = [counts.history[f"{table.name}/new_keys"] for table in tables]
    assert new[0] == [400, 0] and sum(new[1]) == numbers[1].inserted_total
    for fact in ("keys", "new_keys", "evicted", "bytes"):
        of_each = [counts.history[f"{table.name}/{fact}"] for table in tables]
        assert logs[f"tables/{fact}"] == np.sum(of_each, axis=0).tolist()
    assert len(logs) == 5 and len(counts.history) == 8  # with the loss
    assert scalars(tmp_path) == {
        f"epoch_sok/{name}": dict(zip([2, 3], values, strict=True))
        for name, values in counts.history.items()
    }
    model.fit(np.arange(10), np.zeros([10, 1]), verbose=0, callbacks=[counts])
    assert counts.history["item/new_keys"] == [0]  # of this call alone


def test_several_steps_at_once_are_told_once(sk, fitted, tmp_path):
    fitted(sk.TableMetrics(every=3, log_dir=tmp_path), steps_per_execution=4)
    assert set(scalars(tmp_path)["sok/item/keys"]) == {4, 8, 12}


def test_the_log_is_told_where_there_is_no_folder(sk, fitted, caplog):
    with caplog.at_level(logging.INFO, "sok_lite"):
        fitted(sk.TableMetrics(every=6))
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == [
        "step 6: item/keys 25",
        "step 12: item/keys 25",
    ]


def test_once_an_epoch_no_step_is_looked_at_and_every_is_a_number_of_steps(keras, sk):
    callback, plain = sk.TableMetrics(), keras.callbacks.Callback()
    assert callback.on_train_batch_end.__func__ is plain.on_train_batch_end.__func__
    with pytest.raises(ValueError, match="`every` must be at least 1. Received: every=0"):
        sk.TableMetrics(every=0)
    with pytest.raises((TypeError, ValueError), match="`every` must be a number of steps"):
        sk.TableMetrics(every=1.5)
