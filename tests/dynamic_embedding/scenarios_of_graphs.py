"""Scenarios of TensorFlow 1 graphs and sessions."""

from contextlib import contextmanager

from tests.dynamic_embedding.scenario_values import in_order, text
from tests.dynamic_embedding.scenarios_of_training import BATCHES, TRAINED, loss_of


def v1_optimizers(tf):
    """Returns functions that make optimizers of tf.compat.v1.train, with every hyperparameter."""
    v1 = tf.compat.v1.train
    return {
        "adam": lambda: v1.AdamOptimizer(0.1, 0.9, 0.99, 1e-7),
        "adagrad": lambda: v1.AdagradOptimizer(0.1, 0.3),
        "ftrl": lambda: v1.FtrlOptimizer(
            0.1,
            initial_accumulator_value=0.3,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
        ),
        "rmsprop": lambda: v1.RMSPropOptimizer(0.1, 0.8, 0.9, 1e-7),
        "sgd": lambda: v1.GradientDescentOptimizer(0.1),
        "momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
        "nesterov": lambda: v1.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        "adadelta": lambda: v1.AdadeltaOptimizer(1.0, 0.9, 1e-4),
    }


V1_OPTIMIZERS = "adam adagrad ftrl rmsprop sgd momentum nesterov adadelta".split()


@contextmanager
def session_of(tf):
    """A session of the graph as it is, with its variables initialised."""
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.local_variables_initializer())
        yield session


def fetched(values):
    """Returns what a session gave as lists."""
    return text(values.tolist())


def exported(session, tensors):
    """Returns all that an export's tensors hold, sorted."""
    return in_order(*map(fetched, session.run(tensors)))


def graph_verbs(de, tf):
    """Every verb of a Variable as operations of a graph, each run when it is asked for."""
    with tf.Graph().as_default():
        table = de.get_variable("graph_verbs", dim=2, initializer=0.25, devices=["/CPU:0"] * 2)
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        rows = tf.compat.v1.placeholder(tf.float32, [None, 2])
        found, exists = table.lookup(keys, return_exists=True)
        added = table.accum(keys, tf.zeros_like(rows), rows, exists)
        upsert, remove, clear = table.upsert(keys, rows), table.remove(keys), table.clear()
        size, export = table.size(), table.export()
        with session_of(tf) as session:
            given = {keys: [1, 2, 5], rows: [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}
            sizes = [int(session.run(size))]
            session.run(upsert, given)
            sizes.append(int(session.run(size)))
            answers = {"found": [fetched(e) for e in session.run([found, exists], {keys: [5, 9]})]}
            session.run(added, {keys: [1, 9], rows: [[10.0, 10.0], [7.0, 7.0]]})
            answers["added"] = exported(session, export)
            session.run(remove, {keys: [2, 77]})
            sizes.append(int(session.run(size)))
            answers["removed"] = exported(session, export)
            session.run(clear)
            sizes.append(int(session.run(size)))
    return {**answers, "sizes": sizes}


def graph_lookups(de, tf):
    """The lookup functions in a graph."""
    with tf.Graph().as_default():
        table = de.get_variable("graph_lookups", dim=2, initializer=0.25)
        filled = table.upsert(
            tf.constant([1, 2, 3], tf.int64), tf.constant([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        )
        ids = tf.constant([[3, 1], [1, 9]], tf.int64)
        sparse = tf.SparseTensor([[0, 0], [0, 1], [2, 0]], tf.constant([1, 2, 9], tf.int64), [3, 2])
        lookups = {
            "plain": de.embedding_lookup(table, ids, name="plain"),
            "unique": de.embedding_lookup_unique(table, ids, name="unique"),
            "clipped": de.embedding_lookup(table, ids, name="clipped", max_norm=2.0),
            "sparse": de.embedding_lookup_sparse(table, sparse, None, combiner="mean", name="s"),
            "safe": de.safe_embedding_lookup_sparse(table, sparse, combiner="sum", name="safe"),
        }
        with session_of(tf) as session:
            session.run(filled)
            answers = {name: fetched(rows) for name, rows in session.run(lookups).items()}
            return {**answers, "size": int(session.run(table.size()))}


def trained_by_v1(name, de, tf):
    """Five steps with an optimizer of tf.compat.v1.train, in a graph."""
    with tf.Graph().as_default():
        table = de.get_variable(f"trained_by_v1_{name}", dim=2, initializer=0.5)
        filled = table.upsert(
            tf.constant([2, 100], tf.int64), tf.constant([[1.0, -1.0], [3.0, 4.0]])
        )
        ids = tf.compat.v1.placeholder(tf.int64, [None])
        rows, trainable = de.embedding_lookup(table, ids, name="ids", return_trainable=True)
        loss = loss_of(tf, rows, ids)
        optimizer = de.DynamicEmbeddingOptimizer(v1_optimizers(tf)[name]())
        grads = optimizer.compute_gradients(loss, var_list=[trainable])
        train = optimizer.apply_gradients(grads)
        export, size = table.export(), table.size()
        with session_of(tf) as session:
            session.run(filled)
            losses, sizes = [], []
            for batch in BATCHES:
                losses.append(float(session.run([loss, train], {ids: batch})[0]))
                sizes.append(int(session.run(size)))
            slots = table.get_slot_variables(optimizer)
            rows = session.run([slot.lookup(tf.constant(TRAINED, tf.int64)) for slot in slots])
            return {
                "losses": losses,
                "sizes": sizes,
                "table": exported(session, export),
                "slots": sorted(map(fetched, rows)),
            }


def graph_trains_sparse_ids(de, tf):
    """Weighted means of sparse ids, with a dense variable, trained by minimize."""
    with tf.Graph().as_default():
        table = de.get_variable("graph_trains_sparse_ids", dim=2, initializer=0.5)
        dense = tf.compat.v1.get_variable("scale", initializer=tf.constant([1.0, 2.0]))
        indices = [[0, 0], [0, 1], [1, 0], [2, 1]]
        ids = tf.SparseTensor(indices, tf.constant([1, 2, 2, 3], tf.int64), [3, 2])
        weights = tf.SparseTensor(indices, tf.constant([1.0, 3.0, 0.5, 2.0]), [3, 2])
        rows, trainable = de.embedding_lookup_sparse(
            table, ids, weights, combiner="mean", name="ids", return_trainable=True
        )
        loss = tf.reduce_sum(tf.square(rows * dense - 3.0))
        optimizer = de.DynamicEmbeddingOptimizer(v1_optimizers(tf)["adam"]())
        train = optimizer.minimize(loss, var_list=[trainable, dense])
        export = table.export()
        with session_of(tf) as session:
            losses = [float(session.run([loss, train])[0]) for _ in range(4)]
            return {
                "losses": losses,
                "table": exported(session, export),
                "scale": fetched(session.run(dense)),
            }


def graph_restricts(de, tf):
    """A policy's status and restriction in a graph, with slots of the optimizer."""
    with tf.Graph().as_default():
        table = de.get_variable(
            "graph_restricts",
            dim=2,
            initializer=0.5,
            restrict_policy=de.FrequencyRestrictPolicy,
        )
        ids = tf.compat.v1.placeholder(tf.int64, [None])
        rows, trainable = de.embedding_lookup(table, ids, name="ids", return_trainable=True)
        optimizer = de.DynamicEmbeddingOptimizer(v1_optimizers(tf)["adam"]())
        train = optimizer.minimize(loss_of(tf, rows, ids), var_list=[trainable])
        restrict = table.restrict(2, trigger=3)
        export, size = table.export(), table.size()
        status = table.restrict_policy.status.export()
        with session_of(tf) as session:
            for batch in ([1, 2, 3], [2, 3], [3]):
                session.run(train, {ids: batch})
            session.run(restrict)
            sizes = [int(session.run(size))]
            session.run(train, {ids: [4]})
            session.run(restrict)
            sizes.append(int(session.run(size)))
            slots = table.get_slot_variables(optimizer)
            return {
                "sizes": sizes,
                "keys": exported(session, export)["keys"],
                "status": exported(session, status),
                "sizes of slots": [int(session.run(slot.size())) for slot in slots],
            }


def graph_has_slots_before_a_step(de, tf):
    """The slots of an optimizer are there when its operation is, before that has run."""
    with tf.Graph().as_default():
        table = de.get_variable("graph_has_slots_before_a_step", dim=2, initializer=0.5)
        ids = tf.constant([1, 2], tf.int64)
        rows, trainable = de.embedding_lookup(table, ids, name="ids", return_trainable=True)
        optimizer = de.DynamicEmbeddingOptimizer(v1_optimizers(tf)["adam"]())
        train = optimizer.minimize(loss_of(tf, rows, ids), var_list=[trainable])
        sizes = [slot.size() for slot in table.get_slot_variables(optimizer)]
        with session_of(tf) as session:
            before = [int(size) for size in session.run(sizes)]
            session.run(train)
            return {"before": before, "after": [int(size) for size in session.run(sizes)]}


def graph_reuses_by_scope(de, tf):
    """A name is given once, but where the scope says that it is meant to come again."""
    with tf.Graph().as_default():
        made = de.get_variable("graph_reuses_by_scope", dim=2)
        with tf.compat.v1.variable_scope("", reuse=True):
            again = de.get_variable("graph_reuses_by_scope", dim=2)
        with tf.compat.v1.variable_scope("", reuse=tf.compat.v1.AUTO_REUSE):
            once_more = de.get_variable("graph_reuses_by_scope", dim=2)
        try:
            de.get_variable("graph_reuses_by_scope", dim=2)
            is_refused = False
        except ValueError:
            is_refused = True
    return {"same": [again is made, once_more is made], "is refused": is_refused}
