"""Scenarios of the Keras layers, called eagerly, with a trained step in a tape."""

from tests.dynamic_embedding.scenario_values import contents, numbers
from tests.dynamic_embedding.scenarios_of_training import tf_keras_optimizers


def trained_layer(tf, de, layer, ids):
    """Returns what a layer gives for ids before and after a step of SGD, and its table."""
    import tf_keras

    optimizer = de.DynamicEmbeddingOptimizer(tf_keras.optimizers.SGD(0.1))
    with tf.GradientTape() as tape:
        before = layer(ids)
        weights = tf.reshape(tf.range(tf.size(before), dtype=tf.float32), tf.shape(before))
        loss = tf.reduce_sum(before * weights)
    variables = layer.trainable_weights
    grads = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    return {
        "before": numbers(tf, before),
        "after": numbers(tf, layer(ids)),
        "table": contents(tf, layer.params),
        "trainable": len(variables),
    }


def embedding_layer(de, tf):
    """One row an id, of ids of one axis and of three, repeated ones among them."""
    import tf_keras

    constant = tf_keras.initializers.Constant(0.5)
    answers = {}
    for name, ids in (("one", [3, 4, 3]), ("three", [[[1, 2], [2, 1]], [[5, 1], [6, 6]]])):
        layer = de.keras.layers.Embedding(2, initializer=constant, name=f"embedding_layer_{name}")
        answers[name] = trained_layer(tf, de, layer, tf.constant(ids, tf.int64))
    return answers


def squashed_layer(de, tf):
    """Rows are reduced over the middle axes, by each combiner."""
    import tf_keras

    constant = tf_keras.initializers.Constant(0.5)
    answers = {}
    for combiner in ("sum", "mean"):
        layer = de.keras.layers.SquashedEmbedding(
            2, combiner=combiner, initializer=constant, name=f"squashed_layer_{combiner}"
        )
        ids = tf.constant([[1, 2, 1], [3, 4, 5]], tf.int64)
        answers[combiner] = trained_layer(tf, de, layer, ids)
    layer = de.keras.layers.SquashedEmbedding(2, initializer=constant, name="squashed_layer_one")
    answers["one axis"] = numbers(tf, layer(tf.constant([1, 2, 3], tf.int64)))
    return answers


def field_wise_layer(de, tf):
    """Rows of each sample are combined within their slots; a slot without ids has zeros."""
    import tf_keras

    constant = tf_keras.initializers.Constant(0.5)
    answers = {}
    for combiner in ("sum", "mean"):
        layer = de.keras.layers.FieldWiseEmbedding(
            2,
            3,
            slot_map_fn=lambda ids: tf.math.floormod(ids, 3),
            combiner=combiner,
            initializer=constant,
            name=f"field_wise_layer_{combiner}",
        )
        ids = tf.constant([[0, 3, 1, 5], [2, 8, 5, 5]], tf.int64)
        answers[combiner] = trained_layer(tf, de, layer, ids)
    return answers


def layer_in_steps(de, tf):
    """A layer and a dense layer's weights, several steps of Adam in a tf.function."""
    import tf_keras

    layer = de.keras.layers.Embedding(
        2, initializer=tf_keras.initializers.Constant(0.5), name="layer_in_steps"
    )
    weights = tf.Variable([[1.0], [-1.0]])
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())
    layer(tf.constant([1], tf.int64))

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int64)])
    def step(ids):
        with tf.GradientTape() as tape:
            rows = tf.reduce_sum(layer(ids), axis=1)
            loss = tf.reduce_sum(tf.square(rows @ weights - 1.0))
        variables = [*layer.trainable_weights, weights]
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    batches = [[[1, 2], [2, 3]], [[4, 4], [1, 5], [2, 9]], [[1, 9], [3, 3]]]
    losses = [float(step(tf.constant(batch, tf.int64))) for batch in batches]
    return {
        "losses": losses,
        "table": contents(tf, layer.params),
        "weights": numbers(tf, weights),
    }
