"""Scenarios of calls that are refused: what kind of error each raises.

An answer is whether the error is of the type that TFRA has for it, or that its documents have.
"""


def raises(expected, call):
    """Returns whether a call raises an error of a type; an error of another type goes on."""
    try:
        call()
    except expected:
        return True
    return False


def variables_refused(de, tf):
    """Arguments of Variable and of its policy."""

    def make(name, **options):
        return lambda: de.Variable(name=f"variables_refused_{name}", **options)

    return {
        "pair of types": raises(TypeError, make("pair", key_dtype=tf.float32)),
        "values of complex": raises(TypeError, make("complex", value_dtype=tf.complex64)),
        "policy of another class": raises(TypeError, make("class", restrict_policy=dict)),
        "policy that is no class": raises(TypeError, make("object", restrict_policy=3)),
        "saver of another class": raises(RuntimeError, lambda: de.KVCreator(saver=object())),
    }


def table_calls_refused(de, tf):
    """Keys and values of other types and shapes."""
    table = de.Variable(dim=2, name="table_calls_refused")
    key = tf.constant([1], tf.int64)
    short, row = tf.constant([1], tf.int32), tf.ones([1, 2])
    flag = tf.constant([True])
    bad_value = tf.errors.InvalidArgumentError
    answers = {
        "lookup": raises(ValueError, lambda: table.lookup(short)),
        "upsert, keys": raises(ValueError, lambda: table.upsert(short, row)),
        "upsert, values": raises(ValueError, lambda: table.upsert(key, tf.ones([1, 2], tf.int32))),
        "upsert, shape": raises(bad_value, lambda: table.upsert(key, tf.ones([1, 3]))),
        "accum": raises(ValueError, lambda: table.accum(short, row, row, flag)),
        "remove": raises(TypeError, lambda: table.remove(short)),
        "size": raises(IndexError, lambda: table.size(7)),
        "trainable": raises(TypeError, lambda: table.get_trainable_by_name(3)),
        "slots": raises(TypeError, lambda: table.get_slot_variables("adam")),
        "scores": raises(TypeError, lambda: table.export_keys_and_scores(8)),
    }
    return {**answers, "size afterwards": int(table.size())}


def lookups_refused(de, tf):
    """Arguments of the lookup functions."""
    table = de.Variable(dim=2, name="lookups_refused")
    ids = tf.constant([1], tf.int64)
    sparse = tf.SparseTensor([[0, 0]], ids, [1, 1])
    short = tf.constant([1], tf.int32)
    look_up, look_up_sparse = de.embedding_lookup, de.embedding_lookup_sparse
    shadow = de.shadow_ops.ShadowVariable(table, name="lookups_refused-shadow")
    return {
        "several": raises(ValueError, lambda: look_up([table, table], ids, name="several")),
        "no variable": raises(TypeError, lambda: look_up(tf.Variable([[1.0]]), ids, name="none")),
        "ids": raises(TypeError, lambda: look_up(table, short, name="ids")),
        "combiner": raises(
            ValueError, lambda: look_up_sparse(table, sparse, None, combiner="max", name="max")
        ),
        "dense ids": raises(TypeError, lambda: look_up_sparse(table, ids, None, name="dense")),
        "dense weights": raises(TypeError, lambda: look_up_sparse(table, sparse, ids, name="w")),
        "shadow of no variable": raises(TypeError, lambda: de.shadow_ops.ShadowVariable(ids)),
        "shadow's ids": raises(ValueError, lambda: de.shadow_ops.embedding_lookup(shadow, short)),
    }


def restrictions_refused(de, tf):
    """Arguments of restrict."""
    answers = {}
    for policy in (de.FrequencyRestrictPolicy, de.TimestampRestrictPolicy):
        name = policy.__name__
        table = de.Variable(dim=1, name=f"restrictions_refused_{name}", restrict_policy=policy)
        restrict = table.restrict
        answers[name] = [
            raises(TypeError, lambda restrict=restrict: restrict(1.5)),
            raises(TypeError, lambda restrict=restrict: restrict(1, trigger="many")),
        ]
    return answers


def optimizers_refused(de, tf):
    """What is no optimizer, and a shadow in a graph."""
    table = de.Variable(dim=1, name="optimizers_refused")

    def shadow_in_a_graph():
        with tf.Graph().as_default():
            de.shadow_ops.ShadowVariable(table, name="optimizers_refused-shadow")

    return {
        "no optimizer": raises(Exception, lambda: de.DynamicEmbeddingOptimizer(3)),
        "shadow in a graph": raises(NotImplementedError, shadow_in_a_graph),
    }
