"""`HkvHashTable`: whom each strategy evicts, epochs, scores, tiers, and training in little room."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from sok_lite.bridge import table_ops
from tests.dynamic_embedding.test_training import one_step, sgd, step_on
from tests.support.reference import ScoredTable

STRATEGIES = de.HkvEvictStrategy
ROOM = 16  # one bucket: the lowest score of all goes


def hkv(**options):
    return de.HkvHashTableCreator(de.HkvHashTableConfig(**options))


def scores_of(variable, split_size=7):
    keys, scores = variable.export_keys_and_scores(split_size)
    assert scores.dtype == tf.int64
    return dict(zip(keys.numpy().tolist(), scores.numpy().tolist(), strict=True))


def own_score(key):
    return key * key % 101


def test_the_lowest_score_is_evicted():
    names = ["kLru", "kLfu", "kEpochLru", "kEpochLfu", "kCustomized"]
    by_epoch = STRATEGIES.EPOCHLRU, STRATEGIES.EPOCHLFU
    for strategy, epoch in [
        *itertools.product(STRATEGIES, [0]),
        *itertools.product(by_epoch, (1, 4)),
    ]:
        is_own = strategy == STRATEGIES.CUSTOMIZED
        options = {"evict_strategy": strategy, "step_per_epoch": epoch, "gen_scores_fn": own_score}
        variable = de.Variable(dim=1, name="v", kv_creator=hkv(max_capacity=ROOM, **options))
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adagrad(0.1))
        oracle = ScoredTable(1, lambda _: [0.0], names[strategy])
        rng = np.random.default_rng(strategy)
        for step in range(1, 41):
            # Some keys come often; at first there is room for all.
            pool = 12 if step <= 10 else 40
            keys = np.unique(rng.zipf(1.3, size=rng.integers(1, 5)) % pool)
            variable.lookup(rng.integers(0, pool, 9))  # no sighting
            exists, zeros = variable.lookup(keys, return_exists=True)[1], np.zeros((len(keys), 1))
            call = rng.integers(3)
            if call == 0:
                variable.accum(keys, zeros, zeros + 1, exists)
            elif call == 1 and not is_own:  # which refuses the lowest: see the next test
                variable.upsert(keys, zeros)
            else:
                step_on(optimizer, variable.get_trainable_by_name("t"), [*keys, *keys])
            keys, old, oracle.now = set(keys.tolist()), dict(oracle.scores), step
            for key in keys:
                given = own_score(key) if is_own else None
                oracle.scores[key] = oracle.score_after(key, given)
            found = scores_of(variable)
            gone = oracle.scores.keys() - found.keys()
            assert not gone & keys and len(gone) == max(0, len(oracle.scores) - ROOM)
            stayed = [old[key] for key in old.keys() - gone - keys]
            assert max((old[key] for key in gone), default=0) <= min(stayed, default=2**63)
            assert found == {key: oracle.scores[key] for key in found}
            oracle.scores = found
            if strategy in by_epoch and epoch and step % epoch == 0:
                oracle.epoch += 1
        assert int(variable.size()) == ROOM


@pytest.mark.filterwarnings("ignore:.* had no room for")
def test_scores_of_ones_own_decide_whatever_the_order():
    options = {"evict_strategy": STRATEGIES.CUSTOMIZED, "gen_scores_fn": lambda keys: 1000 - keys}
    variable = de.Variable(dim=1, kv_creator=hkv(max_capacity=ROOM, **options))
    for key in np.random.default_rng(0).permutation(40):
        variable.upsert([key], [[float(key)]])
    # The score falls with the key: a key below the lowest score that is held does not get in.
    assert sorted(scores_of(variable)) == list(range(ROOM))


def test_a_step_of_an_optimizers_own_is_a_sighting():
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, learning_rate * gradient)

    variable = de.Variable(dim=1, kv_creator=hkv())
    optimizer = de.DynamicEmbeddingOptimizer(Own(0.1))
    for ids in ([1, 2], [3, 3], [1, 1]):
        step_on(optimizer, variable.get_trainable_by_name("t"), ids)
    scores = scores_of(variable)
    assert scores[2] < scores[3] < scores[1]
    np.testing.assert_allclose(
        variable.lookup([2, 3, 1, 4])[:, 0], [-0.1, -0.2, -0.3, 0], rtol=1e-6
    )


@pytest.mark.filterwarnings("ignore:.* had no room for")
def test_capacities():
    """The most keys are the next power of two; unless it is asked for none is evicted."""
    assert de.Variable(kv_creator=de.HkvHashTableCreator()).rows.table.max_capacity == 2**31
    for asked, room in ((0, 4), (1, 4), (16, 16), (17, 32), (100, 128)):
        variable = de.Variable(dim=2, kv_creator=hkv(init_capacity=10**6, max_capacity=asked))
        for first in range(0, 400, 50):
            variable.upsert(np.arange(first, first + 50), np.ones((50, 2)))
            assert int(variable.size()) <= room
        assert variable.rows.table.max_capacity == room and int(variable.size()) > room / 2
    made = de.Variable(init_size=100_000, kv_creator=hkv(init_capacity=1000))
    assert 1000 <= made.rows.table.capacity < 10_000
    of_size = de.Variable(init_size=100_000, kv_creator=hkv())
    assert of_size.rows.table.capacity >= 100_000


def test_rows_beyond_the_memory_of_the_gpu_lie_in_the_hosts():
    values = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
    for num_bytes in (0, 400 * 32, 1 << 30):
        variable = de.Variable(dim=8, kv_creator=hkv(max_hbm_for_values=num_bytes))
        variable.upsert(np.arange(1000), values)
        np.testing.assert_array_equal(variable.lookup(np.arange(1000)), values)
        facts = table_ops.statistics(variable.rows)
        is_far = num_bytes < 1000 * 32
        assert (facts.far_bytes > 0) == is_far and (facts.near_bytes > 0) == (num_bytes > 0)


def test_exports_with_scores(here):
    variable = de.Variable(dim=2, kv_creator=hkv(evict_strategy=STRATEGIES.LFU))
    upsert = here.step(variable.upsert, [3, 1, 2], [[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]])
    upsert()
    upsert()
    keys, values, scores = here.run(lambda: variable.tables[0].export_with_scores(2))
    assert keys.tolist() == [1, 2, 3] and values.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert scores.tolist() == [2, 2, 2]
    keys, scores = here.run(lambda: variable.export_keys_and_scores(10**6))
    assert (keys.tolist(), scores.tolist()) == ([1, 2, 3], [2, 2, 2])
    texts = de.Variable(tf.string, dim=1, kv_creator=hkv())
    here.run(texts.upsert, np.array([b"a", b"b"], object), [[1.0], [2.0]])
    keys, scores = here.run(lambda: texts.export_keys_and_scores(1))
    assert (sorted(keys.tolist()), scores.tolist()) == ([b"a", b"b"], [1, 1])


def test_every_run_of_a_graph_is_a_step_of_the_epoch(here):
    options = {"evict_strategy": STRATEGIES.EPOCHLRU, "step_per_epoch": 4}
    variable = de.Variable(dim=1, kv_creator=hkv(**options))
    steps = [
        one_step(here, variable, sgd(here), [1, 2]),
        here.step(variable.upsert, [3], [[1.0]]),
        here.step(variable.accum, [4], [[0.0]], [[1.0]], [False]),
    ]
    for step in steps * 2:
        step()
    assert variable.rows.table.epoch == 1


def test_arguments_that_do_not_fit():
    for options, text in (
        ({"evict_strategy": STRATEGIES.CUSTOMIZED}, "needs `gen_scores_fn`"),
        ({"evict_strategy": 5}, "5 is not a valid HkvEvictStrategy"),
        ({"max_capacity": -1}, "capacity must be an integer from 0 on. Received: -1"),
        ({"init_capacity": 1.5}, "capacity must be an integer from 0 on. Received: 1.5"),
        ({"max_hbm_for_values": -1}, "max_hbm_for_vectors"),
        ({"step_per_epoch": -1}, "step_per_epoch=-1"),
        ({"step_per_epoch": 1.5}, "step_per_epoch=1.5"),
    ):
        with pytest.raises(ValueError, match=text):
            de.Variable(kv_creator=hkv(**options))
    variable = de.Variable(kv_creator=hkv())
    for call in (variable.export_keys_and_scores, variable.tables[0].export_with_scores):
        for wrong in (0, -1, 2.5, True, "3"):
            with pytest.raises(ValueError, match="`split_size` must be an integer above 0"):
                call(wrong)
    with pytest.raises(TypeError, match="keeps no scores.*Received: a CuckooHashTableCreator"):
        de.Variable().export_keys_and_scores(10)


def test_every_setting_has_the_documented_place():
    config = de.HkvHashTableConfig(1, 2, 3, STRATEGIES.LFU, 5, own_score, 7)
    assert list(vars(config).items()) == [
        ("init_capacity", 1),
        ("max_capacity", 2),
        ("max_hbm_for_values", 3),
        ("evict_strategy", STRATEGIES.LFU),
        ("step_per_epoch", 5),
        ("gen_scores_fn", own_score),
        ("reserved_key_start_bit", 7),
    ]
    # Bits of a key are reserved for nothing.
    variable = de.Variable(dim=1, kv_creator=hkv(reserved_key_start_bit=7))
    keys = [0, -1, -(2**63), 2**63 - 1]
    variable.upsert(keys, [[1.0], [2.0], [3.0], [4.0]])
    assert variable.lookup(keys).numpy().tolist() == [[1], [2], [3], [4]]


def test_what_creators_say_of_themselves():
    config, saver = de.HkvHashTableConfig(max_capacity=64), de.FileSystemSaver()
    creator = de.HkvHashTableCreator(config, saver)
    assert creator.get_config() == {"config": config, "saver": saver}
    assert isinstance(de.Variable(kv_creator=de.HkvHashTableCreator(config)).rows, de.HkvHashTable)
    with pytest.raises(RuntimeError, match="must be a DynamicEmbeddingSaver"):
        de.CuckooHashTableCreator(saver=3)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eager mode"):
        creator.get_config()
    with pytest.raises(NotImplementedError, match=r"defines create\(\)"):
        de.KVCreator().create()
    assert [each.value for each in STRATEGIES] == [0, 1, 2, 3, 4]
    config = de.CuckooHashTableConfig()
    creator = de.CuckooHashTableCreator(config)
    assert creator.get_config() == {"config": config, "saver": None}
    table = creator.create(tf.int32, tf.float64, [1.0, 2.0], "own", False, 100, config, "/CPU:0")
    assert isinstance(table, de.CuckooHashTable) and table.name == "own:0"
    assert table.lookup([5]).numpy().tolist() == [[1.0, 2.0]]
    with pytest.raises(TypeError):
        de.CuckooHashTableConfig(3)
