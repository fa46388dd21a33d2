"""What an optimizer does to gradients before its step, against the same one on dense variables.

The dense variable has all rows of the table, and its gradient is dense: zero for other keys.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

tf_keras = pytest.importorskip("tf_keras")
k3, new, legacy = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy

KEYS = [5, -7, 2**40, 11]
DIM = 3


MODULES = {"Keras 3": k3, "tf_keras": new, "legacy": legacy}
ALL = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
CLIPS = pytest.mark.parametrize(
    "clip",
    [{"clipvalue": 0.3}, {"clipnorm": 0.7}, {"clipnorm": 1e4}, {"global_clipnorm": 0.9}],
    ids=str,
)


def some(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def slices(rows, keys, num_rows=None):
    shape = None if num_rows is None else tf.constant([num_rows, DIM], tf.int64)
    return tf.IndexedSlices(tf.constant(rows), tf.constant(keys, tf.int64), shape)


class Model:
    """Two tables and a dense variable, and the same as dense variables alone."""

    def __init__(self, make):
        self.tables = [sok.DynamicVariable(DIM, initializer="uniform") for _ in range(2)]
        self.dense = tf.Variable(some([2, 5], 0))
        self.ours, self.theirs = sok.OptimizerWrapper(make()), make()
        copies = [tf.nn.embedding_lookup(table, KEYS) for table in self.tables]
        self.copies = [tf.Variable(each) for each in (*copies, self.dense)]

    def gradients(self, step):
        """Gradients of the tables, the last key of the first one twice; of their copies; dense."""
        one, two, dense = (some([n, DIM], 10 * step + n) for n in (5, 2, 3))
        dense = some([2, 5], step) * 3
        keys = [KEYS[0], KEYS[2], KEYS[3], KEYS[1], KEYS[3]]
        grads = [slices(one, keys), slices(two * 2, [KEYS[3], KEYS[0]])]
        summed = [np.stack([one[0], one[3], one[1], one[2] + one[4]])]
        summed += [np.stack([two[1] * 2, two[0] * 0, two[0] * 0, two[0] * 2])]
        return grads, tf.constant(dense), [*map(tf.constant, summed), tf.constant(dense)]

    def check(self, rtol=1e-5, looked_up=(range(4), range(4))):
        """Compares the rows of the keys with these numbers, and the dense variables."""
        for table, copy, keys in zip(self.tables, self.copies, looked_up, strict=False):
            rows = tf.nn.embedding_lookup(table, KEYS)
            np.testing.assert_allclose(
                tf.gather(rows, list(keys)), tf.gather(copy, list(keys)), rtol=rtol, atol=1e-6
            )
        np.testing.assert_allclose(self.dense, self.copies[-1], rtol=rtol, atol=1e-6)


def train(model, mode, steps=3):
    @mode
    def step(one, two, dense):
        pairs = zip([one, two], model.tables, strict=True)
        model.ours.apply_gradients([(dense, model.dense), *pairs])

    for number in range(steps):
        grads, dense, theirs = model.gradients(number)
        step(*grads, dense)
        model.theirs.apply_gradients(zip(theirs, model.copies, strict=True))


@pytest.mark.pairs
@ALL
@CLIPS
def test_clipping_is_that_of_dense_variables(module, clip, mode):
    model = Model(lambda: module.Adam(0.1, epsilon=0.1, **clip))
    train(model, mode)
    model.check()


def special():
    """(optimizer of a family, options): several limits, a limit of 0, and a scaled loss."""
    for module in MODULES.values():
        yield from ((module, {"clipvalue": 0.0}), (module, {"clipnorm": 0.0}))
        yield module, {"global_clipnorm": 1e4}
    # Legacy ones clip by value and then by a norm; of the new ones one limit counts.
    yield from ((legacy, {"clipvalue": 0.5, clip: 0.8}) for clip in ("clipnorm", "global_clipnorm"))
    yield new, {"clipnorm": 0.5, "clipvalue": 0.01}
    for clip in ({}, {"clipvalue": 0.01}, {"clipnorm": 0.02}, {"global_clipnorm": 0.02}):
        yield k3, {"loss_scale_factor": 64.0, **clip}  # unscaled, then clipped


def test_limits_that_go_together_or_are_0_are_those_of_dense_variables(mode):
    for module, options in special():
        model = Model(lambda module=module, options=options: module.SGD(0.5, **options))
        train(model, mode, steps=2)
        model.check()


@ALL
@pytest.mark.cases("bad")
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("place", ["table", "dense"])
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_what_is_not_finite_spoils_as_much(module, bad, place, clip):
    model = Model(lambda: module.SGD(1.0, **{clip: 0.5}))
    grads, dense, theirs = model.gradients(0)
    # 0 times NaN would spoil rows that nobody looked up. Keras 3 makes dense ones of slices.
    keys = [0, 1, 2, 3], [0, 3]
    for i, its_keys in enumerate(keys):
        theirs[i] = slices(tf.gather(theirs[i], its_keys), its_keys, len(KEYS))
    spoilt = np.zeros([2, DIM] if place == "table" else [2, 5], np.float32)
    spoilt[1, 2] = bad
    if place == "table":
        grads[1] = slices(grads[1].values + spoilt, grads[1].indices)
        theirs[1] = slices(theirs[1].values + spoilt[::-1], theirs[1].indices, len(KEYS))
    else:
        dense, theirs[2] = dense + spoilt, theirs[2] + spoilt
    pairs = [(dense, model.dense), *zip(grads, model.tables, strict=True)]
    model.ours.apply_gradients(pairs)
    model.theirs.apply_gradients(zip(theirs, model.copies, strict=True))
    model.check(looked_up=keys)
    if clip == "clipnorm" and np.isinf(bad):
        assert sum(np.isnan(copy).sum() for copy in model.copies) == 1


@ALL
def test_tables_that_come_twice_and_dense_slices_count_as_dense_variables_do(module, mode):
    """Of an index of dense slices that comes twice both values count, as the optimizer has it."""
    model = Model(lambda: module.SGD(1.0, global_clipnorm=0.9))
    grads, _, theirs = model.gradients(0)
    dense = tf.IndexedSlices(tf.constant(some([3, 5], 1)), tf.constant([0, 1, 0]), [2, 5])
    parts = [
        (tf.IndexedSlices(grads[0].values[part], grads[0].indices[part]), model.tables[0])
        for part in (slice(0, 2), slice(2, 5))
    ]
    pairs = [(dense, model.dense), *parts, (grads[1], model.tables[1])]
    mode(lambda: [model.ours.apply_gradients(pairs), None][1])()
    theirs[2] = dense
    model.theirs.apply_gradients(zip(theirs, model.copies, strict=True))
    model.check()


@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64])
def test_keys_of_other_types_are_summed_as_they_are(key_type, mode):
    table = sok.DynamicVariable(1, initializer="zeros", key_type=key_type)
    keys = [2**64 - 1, 3, 2**64 - 1] if key_type == tf.uint64 else [-1, 3, -1]
    ours = sok.OptimizerWrapper(k3.SGD(1.0, clipnorm=1.0))
    grad = tf.IndexedSlices(tf.constant([[1.0], [4.0], [2.0]]), tf.constant(keys, key_type))
    mode(lambda: [ours.apply_gradients([(grad, table)]), None][1])()
    rows = tf.nn.embedding_lookup(table, tf.constant(keys[:2], key_type))
    np.testing.assert_allclose(rows, [[-0.6], [-0.8]], rtol=1e-6)


def test_what_cannot_be_followed_is_refused():
    table = sok.DynamicVariable(DIM)
    pairs = [(slices(np.ones([1, DIM], np.float32), [1]), table)]
    both = legacy.SGD(1.0, clipnorm=1.0)
    both.global_clipnorm = 2.0
    with pytest.raises(NotImplementedError, match="both clipnorm=1.0 and global_clipnorm=2.0"):
        sok.OptimizerWrapper(both).apply_gradients(pairs)
    zero = sok.OptimizerWrapper(legacy.SGD(1.0, global_clipnorm=0.0))
    with pytest.raises(NotImplementedError, match="global_clipnorm=0.0 of SGD would make every"):
        zero.apply_gradients(pairs)
    text = k3.SGD(1.0)
    text.clipnorm = tf.constant(1.0)
    with pytest.raises(TypeError, match="`clipnorm` of SGD must be a number"):
        sok.OptimizerWrapper(text).apply_gradients(pairs)
    assert len(sok.export(table)[0]) == 0
