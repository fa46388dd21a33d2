"""A graph of TF1 that trains KvVariables, and what a test wants to know of one."""

import contextlib

import numpy as np
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
DIM = 3
# Batches of keys: before the full save, before the first delta, before the second.
FIRST = [[1, 2, 3], [-4, 3, 2**63 - 1, -(2**63)], [50, 60]]
SECOND = [[2, 77], [77, 3, 3]]
THIRD = [[88, 2], [1]]


def adam():
    return tf1.train.AdamOptimizer(0.1)


def ftrl():
    return tf1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01)


def shrinking():
    """Sets every row to zeros that it trains, and keeps its states."""
    return tf1.train.FtrlOptimizer(0.1, l1_regularization_strength=1e6)


class Trained:
    """A KvVariable "kv" and a dense one, trained by one step operation. Without `parts` it is no
    PartitionedKvVariable; without an optimizer nothing is trained."""

    def __init__(self, parts=None, optimizer=adam, name="kv", dim=DIM, **arguments):
        self.graph = tf.Graph()
        with self.graph.as_default():
            if parts is not None:
                arguments["partitioner"] = tf1.fixed_size_partitioner(parts)
            key_dtype = arguments.get("key_dtype", tf.int64)
            arguments.setdefault("initializer", tf1.random_normal_initializer(seed=3))
            self.variable = get_kv_variable(name, dim, **arguments)
            self.keys = tf1.placeholder(key_dtype, [None])
            self.rows = tf.nn.embedding_lookup(self.variable, self.keys)
            dense = tf1.random_normal_initializer(seed=4)
            self.dense = tf1.get_variable("dense", [2], initializer=dense, use_resource=True)
            self.global_step = tf1.train.get_or_create_global_step()
            if optimizer is not None:
                rows = tf.cast(self.rows, tf.float32)
                loss = tf.reduce_sum(tf.sin(rows) * 2.0) + tf.reduce_sum(self.dense**2)
                self.step = optimizer().minimize(loss, global_step=self.global_step)
            self.initializer = tf1.global_variables_initializer()
            self.exported = self.variable.export(cutoff=None)
            self.of_keys = [
                self.variable.get_counting(self.keys),
                self.variable.get_timestamp(self.keys),
            ]

    @contextlib.contextmanager
    def session(self, initialized=True):
        with self.graph.as_default(), tf1.Session() as session:
            self.run = session.run
            if initialized:
                session.run(self.initializer)
            yield session

    def train(self, *batches):
        for batch in batches:
            self.run(self.step, {self.keys: batch})

    def look_up(self, keys):
        return self.run(self.rows, {self.keys: keys})

    def known(self, others=()):
        """Returns {key: (row, count)} of all keys with a row, and {key: count} of others."""
        keys, rows = self.run(self.exported)
        counts, _ = self.run(self.of_keys, {self.keys: keys})
        other_counts, _ = self.run(self.of_keys, {self.keys: np.asarray(others, np.int64)})
        known = {
            key: (tuple(row), count)
            for key, row, count in zip(keys.tolist(), rows.tolist(), counts, strict=True)
        }
        return known, dict(zip(others, other_counts.tolist(), strict=True))

    def times(self, keys):
        return self.run(self.of_keys, {self.keys: keys})[1]

    def states(self):
        """Returns {name of a state: rows of all keys} of the table."""
        table = self.variable.table
        keys = table.export_rows()[0]
        return {name: table.read_state(name, keys) for name in table.store.state_names}


def saved(path):
    """Returns {name: array} of a checkpoint's tensors, with each KvVariable's ending last."""
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def of(tensors, ending):
    """Returns the tensors of all partitions with an ending, one after the other."""
    names = sorted(name for name in tensors if name.endswith(f"-{ending}"))
    return np.concatenate([tensors[name] for name in names])


class Saved:
    """A variable that was saved in full, has changed, and was saved as a delta, twice; `known` is
    what it knew at each of the three."""

    def __init__(self, folder, parts=2, optimizer=adam, **arguments):
        self.graph = Trained(parts, optimizer, **arguments)
        graph = self.graph
        with graph.session() as session:
            with graph.graph.as_default():
                delete = graph.variable.delete(graph.keys)
            saver = tf1.train.Saver()
            graph.train(*FIRST)
            self.known = [graph.known([5, 6, 7])]
            self.full = saver.save(session, str(folder / "full"))
            graph.train(*SECOND)
            session.run(delete, {graph.keys: [50, -4]})
            self.known.append(graph.known([5, 6, 7]))
            self.delta = kv.save_delta(saver, session, str(folder / "delta"))
            graph.train(*THIRD)
            session.run(delete, {graph.keys: [77]})
            graph.train([50])
            self.known.append(graph.known([5, 6, 7]))
            self.later = kv.save_delta(saver, session, str(folder / "later"))
            graph.train(*FIRST)
            self.known.append(graph.known([5, 6, 7]))


DAY = 19_000
TFPLUS_TENSORS = ["keys", "values", "init_table", "blacklist", "freq_keys", "freq_values"]


def tfplus_part(keys, blacklist, counts, above=0, **more):
    """Returns the tensors of a partition as TFPlus writes them; a row tells its key."""
    dtype = np.uint32 if above else np.uint16
    rows = np.array([[key, key + 0.5, 1.0] for key in keys], np.float32).reshape(-1, DIM)
    arrays = (
        np.array(keys, np.int64),
        rows,
        np.ones((4, DIM), np.float32),
        np.array(blacklist, np.int64),
        np.array(list(counts), np.int64),
        np.array([count + above for count in counts.values()], dtype),
    )
    return dict(zip(TFPLUS_TENSORS, arrays, strict=True)) | more


def write_tfplus(path, parts, name="kv/part_{}:0", more=()):
    tensors = {
        f"{name.format(number)}-{ending}": array
        for number, part in enumerate(parts)
        for ending, array in part.items()
    } | dict(more)
    tf.raw_ops.SaveV2(
        prefix=str(path),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    return str(path)
