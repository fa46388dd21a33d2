"""Scenarios of eager training: shadow variables, tapes, and optimizers that have been wrapped."""

from tests.dynamic_embedding.scenario_values import contents, numbers

# Each step's ids: new ones come later, and a step without some of them lies between.
BATCHES = [[1, 2, 3], [2, 3, 4], [7, 1], [3, 7, 5, 2], [5, 1, 2, 3, 4]]
TRAINED = [1, 2, 3, 4, 5, 7]


def tf_keras_optimizers():
    """Returns functions that make optimizers of tf_keras, those that TFRA trains rightly.

    Every hyperparameter is given: versions of tf_keras may differ in what they take for granted.
    """
    import tf_keras

    new, legacy = tf_keras.optimizers, tf_keras.optimizers.legacy
    betas = {"beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-7}
    return {
        "adam": lambda: new.Adam(0.1, **betas),
        "adam_amsgrad": lambda: new.Adam(0.1, amsgrad=True, **betas),
        "adamw": lambda: new.AdamW(0.1, weight_decay=0.02, **betas),
        "adamax": lambda: new.Adamax(0.1, **betas),
        "nadam": lambda: new.Nadam(0.1, **betas),
        "lion": lambda: new.Lion(0.1, beta_1=0.9, beta_2=0.99),
        "rmsprop": lambda: new.RMSprop(0.1, rho=0.8, epsilon=1e-7),
        "rmsprop_centered": lambda: new.RMSprop(
            0.1, rho=0.8, momentum=0.9, epsilon=1e-5, centered=True
        ),
        "adadelta": lambda: new.Adadelta(1.0, rho=0.9, epsilon=1e-4),
        "sgd": lambda: new.SGD(0.1),
        "momentum": lambda: new.SGD(0.1, momentum=0.9),
        "nesterov": lambda: new.SGD(0.1, momentum=0.9, nesterov=True),
        "legacy_adam": lambda: legacy.Adam(0.1, **betas),
        "legacy_amsgrad": lambda: legacy.Adam(0.1, amsgrad=True, **betas),
        "legacy_adamax": lambda: legacy.Adamax(0.1, **betas),
        "legacy_nadam": lambda: legacy.Nadam(0.1, **betas),
        "legacy_rmsprop": lambda: legacy.RMSprop(0.1, rho=0.8, epsilon=1e-7),
        "legacy_adagrad": lambda: legacy.Adagrad(0.1, initial_accumulator_value=0.3, epsilon=1e-7),
        "legacy_adadelta": lambda: legacy.Adadelta(1.0, rho=0.9, epsilon=1e-4),
        "legacy_ftrl": lambda: legacy.Ftrl(
            0.1,
            initial_accumulator_value=0.3,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
        ),
        "legacy_sgd": lambda: legacy.SGD(0.1),
        "legacy_momentum": lambda: legacy.SGD(0.1, momentum=0.9, nesterov=True),
    }


def loss_of(tf, rows, ids):
    """A loss whose gradient differs for each id, each column and each value of a row."""
    targets = tf.cast(ids, tf.float32)[..., None] * tf.constant([0.3, -0.45])
    return tf.reduce_sum(tf.square(rows - targets))


def slot_rows(tf, variable, optimizer, keys):
    """Returns what an optimizer keeps beside the rows of keys, each slot's; TFRA's order of slots
    is that of their making, so these are sorted."""
    slots = variable.get_slot_variables(optimizer)
    return sorted(numbers(tf, slot.lookup(tf.constant(keys, tf.int64))) for slot in slots)


def train(de, tf, table, optimizer, batches, shadow=None):
    """Trains a table's rows.

    Args:
      table: its name is not another's.
      optimizer: wrapped.
      batches: ids of each step, lists of one axis or more. An id that is repeated is looked up
        once, which is how TFRA adds up its gradients.
      shadow: of the table, where the same is trained again; else one is made.

    Returns:
      The loss of each step and the table's size after it.
    """
    if shadow is None:
        shadow = de.shadow_ops.ShadowVariable(table, name=f"{table.name}-shadow")
    losses, sizes = [], []
    for batch in batches:
        ids = tf.constant(batch, tf.int64)
        is_flat = ids.shape.rank == 1 and len(set(batch)) == len(batch)
        with tf.GradientTape() as tape:
            if is_flat:
                rows = de.shadow_ops.embedding_lookup(shadow, ids)
            else:
                rows = de.shadow_ops.embedding_lookup_unique(shadow, ids, table.dim, True)
            loss = loss_of(tf, rows, ids)
        grads = tape.gradient(loss, [shadow])
        optimizer.apply_gradients(zip(grads, [shadow], strict=True))
        losses.append(float(loss))
        sizes.append(int(table.size()))
    return losses, sizes


def trained_by(name, de, tf):
    """Five steps with one optimizer: ids come, stay away and return."""
    table = de.get_variable(f"trained_by_{name}", dim=2, initializer=0.5)
    table.upsert(tf.constant([2, 100], tf.int64), tf.constant([[1.0, -1.0], [3.0, 4.0]]))
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()[name]())
    losses, sizes = train(de, tf, table, optimizer, BATCHES)
    answers = {"losses": losses, "sizes": sizes, "table": contents(tf, table)}
    # TFRA gives none of legacy ones; without momentum what SGD keeps means nothing.
    if name != "sgd" and not name.startswith("legacy"):
        answers["slots"] = slot_rows(tf, table, optimizer, TRAINED)
    return {**answers, "iterations": int(optimizer.iterations)}


def trains_repeated_ids(de, tf):
    """embedding_lookup_unique: gradients of an id that comes twice add up."""
    table = de.get_variable("trains_repeated_ids", dim=2, initializer=0.5)
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())
    batches = [[[1, 1], [2, 1]], [3, 3, 2], [[1, 2], [4, 4]]]
    losses, sizes = train(de, tf, table, optimizer, batches)
    return {"losses": losses, "sizes": sizes, "table": contents(tf, table)}


def trains_in_a_function(de, tf):
    """A whole step in a tf.function, for batches of several sizes, beside a dense variable."""
    table = de.get_variable("trains_in_a_function", dim=2, initializer=0.5)
    shadow = de.shadow_ops.ShadowVariable(table, name="trains_in_a_function-shadow")
    scale = tf.Variable([1.0, 2.0])
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        with tf.GradientTape() as tape:
            rows = de.shadow_ops.embedding_lookup_unique(shadow, ids, 2, True)
            loss = loss_of(tf, rows * scale, ids)
        variables = [shadow, scale]
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    losses = [float(step(tf.constant(batch, tf.int64))) for batch in [*BATCHES, [9, 9, 9]]]
    return {
        "losses": losses,
        "table": contents(tf, table),
        "scale": numbers(tf, scale),
        "iterations": int(optimizer.iterations),
    }


def trains_two_tables(de, tf):
    """Two tables of different widths under one optimizer."""
    first = de.get_variable("trains_two_tables_first", dim=2, initializer=0.5)
    second = de.get_variable("trains_two_tables_second", dim=3, initializer=-0.5)
    shadows = [
        de.shadow_ops.ShadowVariable(each, name=f"{each.name}-shadow") for each in (first, second)
    ]
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["momentum"]())
    for batch in BATCHES:
        ids = tf.constant(batch, tf.int64)
        with tf.GradientTape() as tape:
            rows = de.shadow_ops.embedding_lookup(shadows[0], ids)
            others = de.shadow_ops.embedding_lookup(shadows[1], ids + 10)
            loss = loss_of(tf, rows, ids) + tf.reduce_sum(others * rows[:, :1])
        grads = tape.gradient(loss, shadows)
        optimizer.apply_gradients(zip(grads, shadows, strict=True))
    return {"first": contents(tf, first), "second": contents(tf, second)}


def trains_sharded_rows(de, tf):
    """A table of three shards whose slots have shards as well."""
    table = de.get_variable("trains_sharded_rows", dim=2, initializer=0.5, devices=["/CPU:0"] * 3)
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())
    train(de, tf, table, optimizer, BATCHES)
    return {
        "table": contents(tf, table),
        "sizes": [int(table.size(index)) for index in range(3)],
        "slots": slot_rows(tf, table, optimizer, TRAINED),
    }


def trains_with_deltas(de, tf):
    """bp_v2 of the variable, of the optimizer and of both: rows move by deltas."""
    answers = {}
    for of_table, of_optimizer in ((True, False), (False, True), (True, True)):
        name = f"trains_with_deltas_{of_table}_{of_optimizer}"
        table = de.get_variable(name, dim=2, initializer=0.5, bp_v2=of_table)
        adam = tf_keras_optimizers()["adam"]()
        train(de, tf, table, de.DynamicEmbeddingOptimizer(adam, bp_v2=of_optimizer), BATCHES)
        answers[f"{of_table}, {of_optimizer}"] = contents(tf, table)
    return answers


def trains_text_keys(de, tf):
    """Rows of keys of text are trained as any."""
    table = de.get_variable("trains_text_keys", key_dtype=tf.string, dim=2, initializer=0.5)
    shadow = de.shadow_ops.ShadowVariable(table, name="trains_text_keys-shadow")
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())
    for batch in BATCHES:
        ids = tf.constant([f"key {number}" for number in batch])
        with tf.GradientTape() as tape:
            rows = de.shadow_ops.embedding_lookup(shadow, ids)
            loss = loss_of(tf, rows, tf.constant(batch))
        grads = tape.gradient(loss, [shadow])
        optimizer.apply_gradients(zip(grads, [shadow], strict=True))
    return contents(tf, table)


def inserts_with_no_learning_rate(de, tf):
    """A step inserts its keys even where it moves nothing; a lookup alone inserts none."""
    table = de.get_variable("inserts_with_no_learning_rate", dim=2, initializer=0.5)
    shadow = de.shadow_ops.ShadowVariable(table, name="inserts_with_no_learning_rate-shadow")
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["sgd"]())
    optimizer.learning_rate = 0.0
    ids = tf.constant([4, 5], tf.int64)
    with tf.GradientTape() as tape:
        loss = loss_of(tf, de.shadow_ops.embedding_lookup(shadow, ids), ids)
    before = int(table.size())
    grads = tape.gradient(loss, [shadow])
    optimizer.apply_gradients(zip(grads, [shadow], strict=True))
    return {"before": before, "after": contents(tf, table)}


def example_of_the_document(de, tf):
    """The example of `get_trainable_by_name`, with the name that the method has."""
    params = de.get_variable("example_of_the_document", dim=4, initializer=0.5)
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())
    ids = tf.constant([[1, 2], [3, 4], [9, 8]], tf.int64)

    @tf.function
    def loss_fn(ids):
        emb = de.embedding_lookup(params, ids, name="user_embedding")
        emb = tf.math.reduce_sum(emb, axis=1)
        return tf.reduce_mean(emb)

    losses = [float(loss_fn(ids))]
    for _ in range(10):
        optimizer.minimize(
            lambda: loss_fn(ids), var_list=[params.get_trainable_by_name("user_embedding")]
        )
        losses.append(float(loss_fn(ids)))
    return {"losses": losses, "table": contents(tf, params)}


def minimizes_a_sparse_lookup(de, tf):
    """minimize with a var_list that is a function, of sparse ids with an empty row."""
    table = de.get_variable("minimizes_a_sparse_lookup", dim=2, initializer=0.5)
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["legacy_adam"]())
    ids = tf.SparseTensor([[0, 0], [0, 1], [2, 0], [2, 1]], tf.range(1, 5, dtype=tf.int64), [3, 2])

    trainables = []

    def loss_fn():
        rows, trainable = de.embedding_lookup_sparse(
            table,
            ids,
            None,
            combiner="mean",
            name="minimizes_a_sparse_lookup_ids",
            return_trainable=True,
        )
        trainables[:] = [trainable]
        return tf.reduce_sum(tf.square(rows - 2.0))

    for _ in range(3):
        optimizer.minimize(loss_fn, var_list=lambda: trainables)
    return contents(tf, table)


def trains_other_types(de, tf):
    """Rows of 64 and of 16 bits, with numbers that both hold exactly."""
    import tf_keras

    answers = {}
    for name in ("float64", "float16", "bfloat16"):
        dtype = getattr(tf, name)
        table = de.get_variable(
            f"trains_other_types_{name}", value_dtype=dtype, dim=2, initializer=0.5
        )
        shadow = de.shadow_ops.ShadowVariable(table, name=f"{table.name}-shadow")
        optimizer = de.DynamicEmbeddingOptimizer(tf_keras.optimizers.SGD(0.5))
        for batch in ([1, 2], [2, 3]):
            ids = tf.constant(batch, tf.int64)
            with tf.GradientTape() as tape:
                rows = de.shadow_ops.embedding_lookup(shadow, ids)
                loss = tf.reduce_sum(rows * tf.constant([[1, 2], [0.5, -4]], dtype))
            grads = tape.gradient(loss, [shadow])
            optimizer.apply_gradients(zip(grads, [shadow], strict=True))
        answers[name] = {"same type": rows.dtype == dtype, **contents(tf, table)}
    return answers
