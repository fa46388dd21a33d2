"""Training through `model.fit`, against the same model with a dense layer of all rows."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de

DIM, NUM_KEYS, FIELDS = 3, 40, 5
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(NUM_KEYS, DIM)).astype(np.float32)
KERNEL = RNG.normal(size=(DIM, 1)).astype(np.float32)
X = RNG.integers(0, NUM_KEYS, (70, FIELDS))  # 8 batches of 8 and one of 6
X[X == 13] = 12  # a key that is in no batch
Y = RNG.normal(size=(70, 1)).astype(np.float32)
SEEN = np.unique(X)


def mean(keras):
    """A layer that has the mean over ids, of tensors (batch, ids, dim)."""
    return keras.layers.GlobalAveragePooling1D()


def head(keras):
    return keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(KERNEL))


def functional(keras, embedding):
    ids = keras.Input([FIELDS], dtype="int64")
    return keras.Model(ids, head(keras)(mean(keras)(embedding(ids))))


def sequential_without_input(keras, embedding):
    return keras.Sequential([embedding, mean(keras), head(keras)])


def with_table(keras, build=functional, **arguments):
    """A model and its layer, whose table is its own: as of another session."""
    tf.compat.v1.reset_default_graph()
    layer = de.keras.layers_for(keras).Embedding(DIM, initializer=0.0, name="table", **arguments)
    layer.params.upsert(np.arange(NUM_KEYS), ROWS)
    return build(keras, layer), layer


def dense_layer(keras):
    """A layer with all rows, whose gradient is dense: Keras 3 squares each part of a sparse one."""

    class Dense(keras.layers.Layer):
        def build(self, shape):
            initializer = keras.initializers.Constant(ROWS)
            self.rows = self.add_weight(shape=ROWS.shape, initializer=initializer, name="rows")

        def call(self, ids):
            return tf.matmul(tf.one_hot(ids, NUM_KEYS), tf.convert_to_tensor(self.rows))

        def compute_output_shape(self, shape):
            return (*shape, DIM)

    return Dense()


def with_dense(keras, build=functional):
    layer = dense_layer(keras)
    return build(keras, layer), layer


OPTIMIZERS = {
    "Adagrad": lambda keras: keras.optimizers.Adagrad(0.1),
    "legacy Adagrad": lambda keras: keras.optimizers.legacy.Adagrad(0.1),
    "TF1 Adagrad": lambda keras: tf.compat.v1.train.AdagradOptimizer(0.1),
}
CASES = [
    *(("Adagrad", build, {}) for build in (functional, sequential_without_input)),
    *((optimizer, functional, {}) for optimizer in OPTIMIZERS if optimizer != "Adagrad"),
    ("Adagrad", functional, {"run_eagerly": True}),
    ("Adagrad", functional, {"steps_per_execution": 4}),
]


def compiled(keras, model, optimizer="Adagrad", **options):
    """Returns a model that is compiled, with tables before it has weights too."""
    made = OPTIMIZERS[optimizer](keras)
    if any(hasattr(layer, "shadow") for layer in [*model.layers, getattr(model, "embedding", 0)]):
        made = de.DynamicEmbeddingOptimizer(made)
    model.compile(made, "mse", **options)
    return model


def fit(model):
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]


def check_rows(layer, dense):
    rows = dense.get_weights()[0]
    np.testing.assert_allclose(layer.params.lookup(np.arange(NUM_KEYS)), rows, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "build", "options"),
    CASES,
    ids=[f"{name} {build.__name__} {''.join(options)}" for name, build, options in CASES],
)
def test_fit_trains_rows_as_those_of_a_dense_layer(keras, optimizer, build, options):
    if optimizer != "Adagrad" and keras.__name__ == "keras":
        pytest.skip("Keras 3 takes its own optimizers alone")
    dense_build = functional if build is sequential_without_input else build
    (ours, layer), (theirs, dense) = with_table(keras, build), with_dense(keras, dense_build)
    if build is sequential_without_input:
        text = "'table-shadow:0' untrained.*DynamicEmbedding"
        with pytest.raises(NotImplementedError, match=text):
            ours.compile(keras.optimizers.Adagrad(0.1), "mse")
    for model in (ours, theirs):
        compiled(keras, model, optimizer, **options)
    np.testing.assert_allclose(fit(ours), fit(theirs), rtol=1e-4)
    check_rows(layer, dense)


def test_a_frozen_layer_takes_any_optimizer_before_there_are_weights(keras):
    model, layer = with_table(keras, sequential_without_input, trainable=False)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model)
    np.testing.assert_array_equal(layer.params.lookup(np.arange(NUM_KEYS)), ROWS)


def test_only_training_inserts_keys(keras):
    layer = de.keras.layers_for(keras).Embedding(DIM, initializer=0.5)
    model = compiled(keras, functional(keras, layer))
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert int(layer.params.size()) == 0
    fit(model)
    np.testing.assert_array_equal(np.sort(layer.params.export()[0]), SEEN)
    model.evaluate(X + NUM_KEYS, Y, verbose=0)
    assert int(layer.params.size()) == len(SEEN)


def test_a_table_of_another_face_beside_is_refused_still(keras):
    table = sok.DynamicVariable(DIM, "ones", name="other")

    class Other(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = table

        def call(self, ids):
            return tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)

        def compute_output_shape(self, shape):
            return (shape[0], DIM)

    made = de.keras.layers_for(keras)
    ids = keras.Input([FIELDS], dtype="int64")
    squashed = made.SquashedEmbedding(DIM)
    both = keras.layers.Add()([squashed(ids), Other()(ids)])
    with pytest.raises(NotImplementedError, match="'other:0' untrained"):
        compiled(keras, keras.Model(ids, head(keras)(both)))


def test_a_variable_that_no_layer_holds_is_refused_in_a_lookup(keras):
    params = de.Variable(dim=DIM, name="held_by_nobody")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, ids):
            rows = de.embedding_lookup(params, tf.cast(ids, tf.int64), name="here")
            return self.head(tf.reduce_mean(rows, 1))

    model = Model()
    model.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(NotImplementedError, match="here:0' untrained"):
        fit(model)
