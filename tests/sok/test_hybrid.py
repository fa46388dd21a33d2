"""The hybrid table as a variable: options, eviction, admission, what is evicted, what is shown."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.table import HkvTable, hkv_options

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("initialised")

SMALL = {"init_capacity": 16, "max_capacity": 64, "on_refused": "ignore"}


def hybrid(dimension=2, **options):
    return sok.DynamicVariable(dimension, var_type="hybrid", **(SMALL | options))


def keys_of(table):
    return sok.export(table)[0].numpy().tolist()


def column(keys):
    """As many rows of length 1, each key by itself."""
    return tf.RaggedTensor.from_row_lengths(keys, tf.ones_like(keys))


# ---------------------------------------------------------------- options


def test_all_options_of_sok_mean_something(tmp_path):
    options = {
        "init_capacity": 1024,
        "max_capacity": 4096,
        "max_hbm_for_vectors": 4,
        "max_bucket_size": 128,
        "max_load_factor": 0.5,
        "block_size": 128,
        "device_id": -1,
        "io_by_cpu": False,
        "evict_strategy": "kLfu",
        "filter_ratio": 0.25,
        "enter_threshold": 2,
        "on_refused": "error",
        "far_path": str(tmp_path),
    }
    table = sok.DynamicVariable(2, var_type="hybrid", seed=3, **options)
    assert isinstance(table.table, HkvTable)
    assert table.backend_type == "hybrid"
    assert table.config_dict == {"seed": 3} | options
    assert {name: getattr(table.table.options, name) for name in options} == options
    assert table.table.capacity == 1024


def test_capacities_are_rounded_up_to_powers_of_two(monkeypatch):
    """The engine's tests have each option and each capacity; here is what the variable says."""
    monkeypatch.setattr(hkv_options, "_rounded", set())
    with pytest.warns(UserWarning) as warned:
        table = sok.DynamicVariable(2, var_type="hybrid", init_capacity=1162, max_capacity=3000)
    assert [w.filename for w in warned] == [__file__]
    assert str(warned[0].message).startswith(
        "init_capacity=1162 is rounded up to 2048, max_capacity=3000 is rounded up to 4096:"
    )
    options = table.table.options
    assert (options.init_capacity, options.max_capacity) == (2048, 4096)
    assert table.config_dict == {"init_capacity": 1162, "max_capacity": 3000}


@pytest.mark.cases("option")
@pytest.mark.parametrize(
    "option", [{"enter_threshold": 2}, {"on_refused": "warn"}, {"far_path": "/tmp"}], ids=str
)
def test_what_only_hybrid_has_is_refused_for_hbm(option):
    with pytest.raises(ValueError, match="is an option of var_type='hybrid'.*Use var_type"):
        sok.DynamicVariable(2, **option)


def test_first_rows_are_normal_unless_asked_otherwise():
    table = sok.DynamicVariable(64, var_type="hybrid", name="normal")
    rows = tf.nn.embedding_lookup(table, np.arange(1000)).numpy()
    # 64,000 draws: the standard error of the mean is 0.004.
    assert abs(rows.mean()) < 0.02 and abs(rows.std() - 1) < 0.02


# ---------------------------------------------------------------- eviction


@pytest.mark.parametrize("var_type", ["hybrid", "hbm"])
@pytest.mark.parametrize("n", [0, 33])
def test_sparse_read_and_evict_reports_all_that_goes(mode, var_type, n):
    options = SMALL if var_type == "hybrid" else {}
    table = sok.DynamicVariable(2, "5", var_type=var_type, **options)

    @mode
    def read(keys):
        with tf.GradientTape() as tape:
            rows, *evicted = sok.sparse_read_and_evict(table, keys, name="read")
            loss = tf.reduce_sum(rows * 2.0) + tf.reduce_sum(evicted[1])
        return rows, *evicted, tape.gradient(loss, table)  # the embedding alone has one

    held = {}
    rng = np.random.default_rng(n)
    for number in range(12):
        keys = rng.choice(1000, n, replace=False)
        rows, evicted_keys, evicted_rows, gradient = read(tf.constant(keys.reshape(1, n)))
        assert rows.shape == (1, n, 2)
        assert (evicted_keys.dtype, evicted_rows.shape[1]) == (tf.int64, 2)
        np.testing.assert_array_equal(gradient.indices, keys)
        np.testing.assert_array_equal(gradient.values, np.full((n, 2), 2.0))
        for key, row in zip(evicted_keys.numpy().tolist(), evicted_rows.numpy(), strict=True):
            np.testing.assert_array_equal(row, held.pop(key))
        for key, row in zip(keys.tolist(), rows.numpy()[0], strict=True):
            np.testing.assert_array_equal(row, held.get(key, [5.0, 5.0]))
        assigned = np.intersect1d(keys, keys_of(table))
        sok.assign(table, assigned, np.full((len(assigned), 2), number, np.float32))
        held |= {key: [float(number)] * 2 for key in assigned.tolist()}
        assert set(keys_of(table)) == set(held)
    if var_type == "hbm":
        assert len(evicted_keys) == 0
    elif n > 30:
        assert table.statistics().evicted_total > 100


def test_sparse_read_and_evict_in_a_session_and_within_inference_mode():
    with tf.Graph().as_default(), v1.Session() as session:
        table = hybrid(initializer="1", max_capacity=16)
        keys = v1.placeholder(tf.int64, [None])
        outputs = sok.sparse_read_and_evict(table, keys)
        session.run(v1.global_variables_initializer())
        held = set()
        for first in range(0, 40, 8):
            rows, evicted, _ = session.run(outputs, {keys: np.arange(first, first + 8)})
            held = (held | set(range(first, first + 8))) - set(evicted.tolist())
            np.testing.assert_array_equal(rows, np.ones((8, 2)))
            assert len(held) == table.table.size <= 16
        with sok.inference_mode(missing="zeros"):
            rows, evicted, _ = session.run(outputs, {keys: [100, 101]})
        assert (rows.sum(), evicted.size, table.table.size) == (0.0, 0, len(held))
    with pytest.raises(TypeError, match="takes a sok.DynamicVariable. Received: ResourceVariable"):
        sok.sparse_read_and_evict(tf.Variable([[1.0]]), [0])


# ---------------------------------------------------------------- admission


def share_of_new_keys(mode, ratio, weights):
    table = hybrid(1, initializer="2", filter_ratio=ratio, max_capacity=4096, init_capacity=4096)
    sok.assign(table, [-1], [[7.0]])
    ids = tf.RaggedTensor.from_row_splits(
        tf.concat([[-1], tf.range(1000, dtype=tf.int64), [-1]], 0), tf.constant([0, 501, 1002])
    )
    weights = ids.with_flat_values(tf.fill([1002], 2.0)) if weights else None

    def look_up(ids):
        return sok.lookup_sparse(
            table, ids, weights, combiners="mean", use_low_frequency_filter=True
        )

    out = mode(look_up)(ids).numpy()[:, 0]
    held = [key for key in keys_of(table) if key >= 0]
    # Absent keys give zeros and still count in the mean.
    first = 7.0 + 2.0 * sum(key < 500 for key in held)
    second = 7.0 + 2.0 * sum(key >= 500 for key in held)
    np.testing.assert_allclose(out, [first / 501, second / 501], rtol=1e-5)
    assert table.statistics().not_admitted_total == 1000 - len(held)
    return len(held) / 1000


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weighted"])
def test_the_filter_lets_a_share_of_new_keys_in(mode, weights):
    assert share_of_new_keys(mode, 0.0, weights) == 0.0
    assert share_of_new_keys(mode, 1.0, weights) == 1.0
    # 1,000 draws: the standard deviation is 0.014.
    assert abs(share_of_new_keys(mode, 0.3, weights) - 0.3) < 0.07


def test_the_filter_in_inference_mode_inserts_nothing(mode):
    table = hybrid(initializer="2", filter_ratio=1.0)
    look_up = mode(
        lambda keys: sok.lookup_sparse(table, column(keys), use_low_frequency_filter=True)
    )
    with sok.inference_mode():  # as in training, for a key that was not drawn
        np.testing.assert_array_equal(look_up(tf.constant([5], tf.int64)), [[0.0, 0.0]])
    with sok.inference_mode(missing="initial"):
        np.testing.assert_array_equal(look_up(tf.constant([5], tf.int64)), [[2.0, 2.0]])
    assert keys_of(table) == []
    look_up(tf.constant([5], tf.int64))
    assert keys_of(table) == [5]
    # Without the argument nothing is drawn, and "hbm" has none.
    other, kept = hybrid(initializer="2", filter_ratio=0.0), sok.DynamicVariable(2, name="kept")
    ids = column(tf.constant([1, 2], tf.int64))
    with pytest.raises(NotImplementedError, match="'kept.*' is 'hbm', which keeps every key"):
        sok.lookup_sparse([other, kept], [ids, ids], use_low_frequency_filter=True)
    assert other.table.size == kept.table.size == 0
    out = mode(lambda: sok.lookup_sparse(other, ids))()
    np.testing.assert_array_equal(out, np.full((2, 2), 2.0))
    assert keys_of(other) == [1, 2]


# ---------------------------------------------------------------- what it shows


def test_it_shows_how_full_it_is_what_it_lost_and_where_its_memory_is():
    # 16 near rows of 8 bytes.
    table = hybrid(max_hbm_for_vectors=128 / 2**30, name="shown")
    for first in range(0, 200, 8):
        tf.nn.embedding_lookup(table, np.arange(first, first + 8))
    counts = table.statistics()
    text = repr(table)
    assert f"keys={counts.size} fill={counts.load_factor:.0%} of 64 slots" in text
    assert f"evicted={counts.evicted_total} " in text and counts.evicted_total > 100
    assert f" near, 384 B far on {table.table.backend.name}" in text, text
    html = table._repr_html_()
    assert f"{counts.evicted_total} keys (kLru)" in html
    assert "<th>far memory of rows and states</th><td>384 B</td>" in html
    assert "(at most 64)" in repr(hybrid())
