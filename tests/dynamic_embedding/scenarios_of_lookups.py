"""Scenarios of the lookup functions and of the helpers of math and data_flow."""

from tests.dynamic_embedding.scenario_values import numbers


def make_table(de, tf, name, **options):
    """A table with rows (key, 10 * key) for the keys -2 to 5."""
    options = {"dim": 2, "initializer": 0.25, **options}
    table = de.Variable(name=name, **options)
    keys = tf.range(-2, 6, dtype=tf.int64)
    rows = tf.cast(keys, table.value_dtype)[:, None] * tf.constant([[1, 10]], table.value_dtype)
    table.upsert(keys, rows)
    return table


def sparse(tf, rows, shape=None, dtype=None):
    """Returns a SparseTensor of lists of ids or weights, one a row."""
    indices = [[row, column] for row, ids in enumerate(rows) for column in range(len(ids))]
    values = tf.constant([each for ids in rows for each in ids], dtype or tf.int64)
    shape = shape or [len(rows), max(map(len, rows))]
    return tf.SparseTensor(tf.constant(indices, tf.int64, [len(indices), 2]), values, shape)


def lookup_of_ids(de, tf):
    """embedding_lookup of ids of one axis and of two, the variable given alone and in a list."""
    table = make_table(de, tf, "lookup_of_ids")
    one = tf.constant([5, -2, 99], tf.int64)
    two = tf.constant([[1, 2], [3, 77]], tf.int64)
    rows, trainable = de.embedding_lookup(table, one, name="ids_kept", return_trainable=True)
    return {
        "one axis": numbers(tf, de.embedding_lookup(table, one, name="ids_of_one_axis")),
        "two axes": numbers(tf, de.embedding_lookup([table], two, name="ids_of_two_axes")),
        "with trainable": numbers(tf, rows),
        "found by name": table.get_trainable_by_name("ids_kept") is trainable,
        "size": int(table.size()),
    }


def lookup_of_unique_ids(de, tf):
    """embedding_lookup_unique of repeated ids."""
    table = make_table(de, tf, "lookup_of_unique_ids")
    one = tf.constant([3, 3, 99, -1, 3], tf.int64)
    two = tf.constant([[1, 1, 2], [2, 99, 1]], tf.int64)
    return {
        "one axis": numbers(tf, de.embedding_lookup_unique(table, one, name="unique_of_one")),
        "two axes": numbers(tf, de.embedding_lookup_unique(table, two, name="unique_of_two")),
    }


def lookup_clips(de, tf):
    """max_norm clips what is read, and reading alone leaves the table as it is."""
    table = make_table(de, tf, "lookup_clips")
    ids = tf.constant([1, 0, 5, 99], tf.int64)
    clipped = de.embedding_lookup(table, ids, name="clipped", max_norm=2.0)
    return {"clipped": numbers(tf, clipped), "table": numbers(tf, table.lookup(ids))}


def sparse_lookups(de, tf):
    """embedding_lookup_sparse with each combiner, with weights and without."""
    table = make_table(de, tf, "sparse_lookups")
    lists = [[1, 2, 2], [5], [-1, 99]]
    ids = sparse(tf, lists)
    weights = sparse(tf, [[1.0, 0.5, 2.0], [0.25], [3.0, 1.0]], dtype=tf.float32)
    answers = {}
    for combiner in ("mean", "sqrtn", "sum"):
        for kind, given in (("plain", None), ("weighted", weights)):
            name = f"sparse_{combiner}_{kind}"
            found = de.embedding_lookup_sparse(table, ids, given, combiner=combiner, name=name)
            answers[f"{combiner}, {kind}"] = numbers(tf, found)
    for combiner in ("mean", "sqrtn", "sum"):
        name = f"sparse_clipped_{combiner}"
        clipped = de.embedding_lookup_sparse(
            table, ids, weights, combiner=combiner, name=name, max_norm=4.0
        )
        answers[f"{combiner}, clipped"] = numbers(tf, clipped)
    return {**answers, "defaults": numbers(tf, de.embedding_lookup_sparse(table, ids, None))}


def sparse_lookup_of_half_rows(de, tf):
    """Rows of 16 bits are combined as float32, which is what comes back."""
    answers = {}
    for dtype in (tf.float16, tf.bfloat16):
        table = make_table(de, tf, f"half_rows_{dtype.name}", value_dtype=dtype)
        found = de.embedding_lookup_sparse(
            table, sparse(tf, [[1, 2], [3]]), None, combiner="sum", name=f"half_{dtype.name}"
        )
        answers[dtype.name] = {"dtype": found.dtype.name, "rows": numbers(tf, found)}
    return answers


def safe_lookups(de, tf):
    """safe_embedding_lookup_sparse: empty rows, weights that do not count, a default id."""
    table = make_table(de, tf, "safe_lookups")
    ids = sparse(tf, [[], [1, -2], [], [99, 4], []], shape=[5, 2])
    weights = sparse(tf, [[], [2.0, 1.0], [], [-1.0, 0.0], []], shape=[5, 2], dtype=tf.float32)
    answers = {}
    for combiner in ("mean", "sqrtn", "sum"):
        for kind, given in (("plain", None), ("weighted", weights)):
            for default_id in (None, 3):
                name = f"safe_{combiner}_{kind}_{default_id}"
                found = de.safe_embedding_lookup_sparse(
                    table, ids, given, combiner=combiner, default_id=default_id, name=name
                )
                answers[f"{combiner}, {kind}, {default_id}"] = numbers(tf, found)
    clipped = de.safe_embedding_lookup_sparse(
        table, ids, combiner="sum", default_id=5, max_norm=4.0, name="safe_clipped"
    )
    return {**answers, "max_norm": numbers(tf, clipped)}


def safe_lookup_of_three_axes(de, tf):
    """Ids of three axes: the last one is combined, and the others come back."""
    table = make_table(de, tf, "safe_lookup_of_three_axes")
    indices = tf.constant([[0, 0, 0], [0, 0, 1], [0, 2, 0], [1, 1, 1]], tf.int64)
    ids = tf.SparseTensor(indices, tf.constant([1, 2, 3, 4], tf.int64), [2, 3, 2])
    found = de.safe_embedding_lookup_sparse(table, ids, combiner="sum", name="safe_of_three")
    return {"shape": found.shape.as_list(), "rows": numbers(tf, found)}


def ragged_lookups(de, tf):
    """The sparse lookups' twins for ragged ids, with ragged weights and without."""
    ragged = de.ragged_embedding_ops
    table = make_table(de, tf, "ragged_lookups")
    ids = tf.ragged.constant([[1, 2, 2], [5], [-1, 99]], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, 0.5, 2.0], [0.25], [3.0, 1.0]])
    gaps = tf.ragged.constant([[], [1, -2], []], dtype=tf.int64)
    answers = {}
    for combiner in ("mean", "sqrtn", "sum"):
        for kind, given in (("plain", None), ("weighted", weights)):
            found = ragged.embedding_lookup_sparse(
                table, ids, given, combiner=combiner, name=f"ragged_{combiner}_{kind}"
            )
            answers[f"{combiner}, {kind}"] = numbers(tf, found)
        found = ragged.safe_embedding_lookup_sparse(
            table, gaps, combiner=combiner, name=f"ragged_safe_{combiner}"
        )
        answers[f"{combiner}, safe"] = numbers(tf, found)
    return answers


def shadow_lookups(de, tf):
    """The lookups of shadow_ops, with ids of two axes and ragged ones."""
    table = make_table(de, tf, "shadow_lookups")
    shadow = de.shadow_ops.ShadowVariable(table, name="shadow_lookups-shadow")
    ids = tf.constant([[1, 2], [99, 1]], tf.int64)
    ragged = tf.ragged.constant([[4, 4], [], [-1]], dtype=tf.int64)
    found = de.shadow_ops.embedding_lookup_unique(shadow, ragged, 2, True)
    return {
        "plain": numbers(tf, de.shadow_ops.embedding_lookup(shadow, ids)),
        "unique": numbers(tf, de.shadow_ops.embedding_lookup_unique(shadow, ids, 2, True)),
        "not unique": numbers(tf, de.shadow_ops.embedding_lookup_unique(shadow, ids, 2, False)),
        "ragged": [numbers(tf, found.flat_values), numbers(tf, found.row_splits)],
        "size": int(table.size()),
    }


def math_helpers(de, tf):
    """sparse_segment_sum, sparse_fill_empty_rows and sparse_reshape."""
    data = tf.reshape(tf.range(8, dtype=tf.float32), [4, 2])
    picked, segments = tf.constant([0, 3, 1, 1]), tf.constant([0, 0, 2, 2])
    sums = [
        de.math.sparse_segment_sum(data, picked, segments),
        de.math.sparse_segment_sum(data, picked, segments, num_segments=5),
    ]
    ids = sparse(tf, [[1], [], [2, 3], []], shape=[4, 2])
    filled, was_empty = de.math.sparse_fill_empty_rows(ids, 7)
    shaped = de.math.sparse_reshape(ids, [2, -1])
    return {
        "sums": [numbers(tf, each) for each in sums],
        "filled": [numbers(tf, filled.indices), numbers(tf, filled.values)],
        "was empty": numbers(tf, was_empty),
        "reshaped": [numbers(tf, shaped.indices), numbers(tf, shaped.dense_shape)],
    }


def data_flow_helpers(de, tf):
    """dynamic_partition and dynamic_stitch, there and back."""
    data = tf.reshape(tf.range(10, dtype=tf.float32), [5, 2])
    partitions = tf.constant([1, 0, 3, 1, 0])
    parts = de.data_flow.dynamic_partition(data, partitions, 4)
    where = de.data_flow.dynamic_partition(tf.range(5), partitions, 4)
    back = de.data_flow.dynamic_stitch(where, parts)
    return {"parts": [numbers(tf, part) for part in parts], "back": numbers(tf, back)}


def model_modes(de, tf):
    """The mode is of the process; lookups read the same rows in both."""
    table = make_table(de, tf, "model_modes")
    ids = tf.constant([[1, 2], [99, 1]], tf.int64)
    modes = [de.get_model_mode()]
    de.enable_inference_mode()
    try:
        modes.append(de.get_model_mode())
        rows = de.embedding_lookup(table, ids, name="in_inference")
    finally:
        de.enable_train_mode()
    return {"modes": [*modes, de.get_model_mode()], "rows": numbers(tf, rows)}


def trainables_apart(de, tf):
    """trainable_wrapper_filter tells shadow variables from others."""
    table = make_table(de, tf, "trainables_apart")
    shadow = de.shadow_ops.ShadowVariable(table, name="trainables_apart-shadow")
    dense = [tf.Variable(1.0), tf.Variable(2.0)]
    others, shadows = de.trainable_wrapper_filter([dense[0], shadow, dense[1]])
    return {
        "others": [each is given for each, given in zip(others, dense, strict=True)],
        "shadows": [each is shadow for each in shadows],
    }
