"""`restrict`: which keys stay, and that key, state and status go together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from tests.dynamic_embedding.test_training import one_step, step_on
from tests.support.helpers import run_threads

tf1 = tf.compat.v1


def adam(here):
    made = tf1.train.AdamOptimizer(0.1) if here.is_graph else keras.optimizers.Adam(0.1)
    return de.DynamicEmbeddingOptimizer(made)


def keys_of(here, variable):
    return sorted(here.run(variable.export)[0].tolist())


def test_the_most_frequent_keys_stay():
    """Those of texts, and of the variable alone; integers are recorded."""
    options = {"dim": 2, "restrict_policy": de.FrequencyRestrictPolicy, "devices": ["/CPU:0"] * 2}
    variable, other = (de.Variable(tf.string, name=name, **options) for name in "ab")
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    for batch in ("1234", "123", "112", "15"):
        for each in (variable, other):
            step_on(optimizer, each.get_trainable_by_name("t"), list(batch))
    status = variable.restrict_policy.status
    assert status.name == "a/frequency" and status.value_dtype == tf.int32
    keys, counts = (each.numpy() for each in status.export())
    counted = dict(zip(keys.tolist(), counts[:, 0].tolist(), strict=True))
    assert counted == {b"1": 4, b"2": 3, b"3": 2, b"4": 1, b"5": 1}
    variable.restrict(3)
    for each in (variable, status, *variable.get_slot_variables(optimizer)):
        assert sorted(each.export()[0].numpy().tolist()) == [b"1", b"2", b"3"]
    for each in (other, other.restrict_policy.status, *other.get_slot_variables(optimizer)):
        assert int(each.size()) == 5


def test_the_keys_that_were_trained_last_stay(monkeypatch):
    variable = de.Variable(dim=1, restrict_policy=de.TimestampRestrictPolicy)
    policy = variable.restrict_policy
    for time, keys in ((100, [1, 2, 3]), (200, [4, 2]), (300, [5])):
        monkeypatch.setattr(tf, "timestamp", lambda time=time: tf.constant(float(time), tf.float64))
        ids = tf.constant(keys, tf.int64)
        variable.upsert(ids, tf.ones([len(keys), 1]))
        policy.apply_update(ids)
    assert policy.status.name.endswith("/timestamp")
    assert policy.status.lookup([1, 2, 4, 5]).numpy().tolist() == [[100], [200], [200], [300]]
    variable.restrict(3, trigger=5)
    assert int(variable.size()) == 5  # not more than the trigger
    variable.restrict(3, trigger=4)
    assert sorted(variable.export()[0].numpy().tolist()) == [2, 4, 5]


@pytest.mark.parametrize("policy", [de.FrequencyRestrictPolicy, de.TimestampRestrictPolicy])
def test_in_every_mode(here, policy):
    variable = de.Variable(dim=2, restrict_policy=policy)
    one_step(here, variable, adam(here), [1, 2, 3, 4, 5])()
    here.run(variable.upsert, [77], [[1.0, 1.0]])  # without a status
    assert keys_of(here, variable.restrict_policy.status) == [1, 2, 3, 4, 5]
    here.run(lambda: variable.restrict(2))
    # Of equal ones the first stay; what was never trained is not looked at.
    assert keys_of(here, variable) == [1, 2, 77]
    assert keys_of(here, variable.restrict_policy.status) == [1, 2]
    here.run(lambda: variable.restrict(0))
    assert keys_of(here, variable) == [77]


@pytest.mark.parametrize("gone_by", ["remove", "clear", "eviction"])
def test_keys_that_are_gone_take_no_place(gone_by):
    variable = de.Variable(dim=1, restrict_policy=de.FrequencyRestrictPolicy)
    policy = variable.restrict_policy

    def train(keys, times):
        variable.upsert(keys, np.ones((len(keys), 1)))
        for _ in range(times):
            policy.apply_update(tf.constant(keys, tf.int64))

    train([1, 2, 3], 5)
    train([4, 5, 6], 1)
    if gone_by == "eviction":
        variable.rows.remove([1, 2, 3])  # as a full table does, which tells nobody
    elif gone_by == "remove":
        variable.remove([1, 2, 3])
        assert policy.status.export()[0].numpy().tolist() == [4, 5, 6]
    else:
        variable.clear()
        assert int(policy.status.size()) == 0
        train([4, 5, 6], 1)
    variable.restrict(2)
    for each in (variable, policy.status):
        assert each.export()[0].numpy().tolist() == [4, 5]


def test_keys_whose_status_was_evicted_are_removed_first(here):
    config = de.HkvHashTableConfig(init_capacity=128, max_capacity=128)
    policy = de.FrequencyRestrictPolicy
    creator = de.HkvHashTableCreator(config)
    variable = de.Variable(dim=2, name="v", restrict_policy=policy, kv_creator=creator)
    status = variable.restrict_policy.status
    keys = np.arange(100)
    here.run(lambda: variable.upsert(keys, np.ones((100, 2), np.float32)))
    here.run(lambda: variable.restrict_policy.apply_update(tf.constant(keys)))
    here.run(lambda: status.remove(keys[10:90]))  # as by an eviction
    here.run(lambda: variable.restrict(15))
    kept = keys_of(here, variable)
    assert len(kept) == 15 and set(kept) <= {*range(10), *range(90, 100)}
    here.run(lambda: variable.restrict(0))
    assert here.run(variable.size) == here.run(status.size) == 0


def test_no_sighting_is_lost_between_threads():
    variable = de.Variable(dim=1, restrict_policy=de.FrequencyRestrictPolicy)
    policy = variable.restrict_policy

    def sight(number):
        for key in range(30):
            policy.apply_update(tf.constant([key, key], tf.int64))

    run_threads(sight, 6)
    assert policy.status.export()[1].numpy().tolist() == [[6]] * 30


def test_numbers_that_do_not_fit(caplog):
    for policy in (de.FrequencyRestrictPolicy, de.TimestampRestrictPolicy):
        restrict = de.Variable(dim=1, restrict_policy=policy).restrict
        for wrong in (1.5, "3", True):
            with pytest.raises(TypeError, match="`num_reserved` must be an integer"):
                restrict(wrong)
        with pytest.raises(TypeError, match="`trigger` must be an integer"):
            restrict(1, trigger=2.5)
        with pytest.raises(ValueError, match="`num_reserved` must not be negative"):
            restrict(-1)
        with pytest.raises(TypeError, match="unexpected arguments.*'other'"):
            restrict(1, other=2)
    de.Variable(dim=1).restrict(1)
    assert "no restrict_policy" in caplog.text


def test_a_policy_of_a_programs_own():
    class Low(de.RestrictPolicy):
        def apply_update(self, ids):
            return self.status.upsert(ids, -tf.cast(ids, tf.int32)[:, None])

    variable = de.Variable(dim=1, restrict_policy=Low)
    keys = np.array([5, 9, 2, 7])
    variable.upsert(keys, np.ones((4, 1)))
    variable.restrict_policy.apply_update(tf.constant(keys))
    variable.restrict(2)
    assert variable.export()[0].numpy().tolist() == [2, 5]
    with pytest.raises(TypeError, match=r"de\.Variable"):
        de.RestrictPolicy(3)
