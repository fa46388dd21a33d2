"""Every public call that reaches a table or other ranks, to be made eagerly or within a graph."""

import keras
import numpy as np
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite import kv_variable as kv
from sok_lite.bridge.collectives import agreed_sum

DIM = 5


class Calls:
    """The calls, on two tables of int32 keys that hold the keys 0 to 12 and one row of 1 each.

    Their keys, where a program may give them so, are int32 as well.
    """

    def __init__(self):
        self.hbm = self._table("hbm")
        self.hybrid = self._table("hybrid", max_capacity=1024, evict_strategy="kEpochLru")
        self.half = self._table("hbm", tf.bfloat16)
        self.static = sok.Variable(tf.ones([13, DIM]))
        self.optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.5))
        self.sgd = sok.SGD(0.5)
        self.clipping = sok.OptimizerWrapper(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5, global_clipnorm=1.0), 1.0)
        )
        settings = de.HkvHashTableConfig(
            evict_strategy=de.HkvEvictStrategy.EPOCHLRU, step_per_epoch=2
        )
        creator = de.HkvHashTableCreator(settings)
        self.bounded = de.Variable(tf.int32, dim=DIM, name="bounded", kv_creator=creator)
        self.by_text = de.Variable(tf.string, dim=DIM, name="by_text")
        # Names are of the process: these are no others that a program may have.
        with tf.compat.v1.variable_scope(f"public_calls_{id(self)}"):
            self.split = kv.get_kv_variable(
                "split",
                DIM,
                tf.int32,
                initializer=1.0,
                partitioner=tf.compat.v1.fixed_size_partitioner(2),
            )
            self.few = kv.get_kv_variable("few", DIM, tf.int32, enter_threshold=2)
        kv.insert_kv_embedding(self.split, tf.range(13), tf.ones([13, DIM]))
        self.dense = tf.Variable([1.0])
        self.clipping.optimizer.build([self.dense])
        # States, and variables of the optimizer: not to be made within a graph.
        self.apply_gradients()
        self.slot = self.optimizer.get_slot(self.hbm, self.optimizer.get_slot_names()[0])
        tensors = self.hybrid._serialize_to_tensors()
        self.saved = {name: tensor.numpy() for name, tensor in tensors.items()}
        tensors = self.by_text.rows._serialize_to_tensors()
        self.saved_by_text = {name: tensor.numpy() for name, tensor in tensors.items()}

    @staticmethod
    def _table(kind, dtype=tf.float32, **options):
        table = sok.DynamicVariable(
            DIM, "zeros", kind, f"{kind}_{dtype.name}", key_type=tf.int32, dtype=dtype, **options
        )
        keys = tf.range(13)
        sok.assign(table, keys, tf.ones([13, DIM], dtype))
        return table

    @staticmethod
    def ids():
        splits = tf.constant([0, 2, 2, 3, 6], tf.int64)
        return tf.RaggedTensor.from_row_splits(tf.constant([3, 1, 3, 12, 0, 1]), splits)

    # ---- in graphs as well

    def lookup_sparse(self):
        ids = self.ids()
        sparse = tf.sparse.reorder(ids.to_sparse())
        tables, all_ids = [self.hbm, self.hybrid, self.half], [ids, sparse, ids]
        return sok.lookup_sparse(tables, all_ids, combiners=["sum", "mean", "sqrtn"])

    def static_lookup(self):
        ids, weights = self.ids(), self.ids().with_values(tf.range(6.0))
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse([self.static, self.hbm], [ids, ids], [weights, None])
            total = tf.add_n([tf.reduce_sum(each**2) for each in out])
        gradient = tape.gradient(total, self.static)
        return *out, gradient.indices, gradient.values

    def penalty(self):
        """On the gradient by the rows that a lookup returns."""
        weights = tf.constant([1.0, 2.0, -1.0, 0.5, 3.0, 1.0])
        with tf.GradientTape() as outer:
            outer.watch(weights)
            given = self.ids().with_values(weights)
            rows = tf.cast(sok.lookup_sparse(self.half, self.ids(), given, "mean"), tf.float32)
            with tf.GradientTape() as inner:
                inner.watch(rows)
                total = tf.reduce_sum(rows**3)
            number = tf.reduce_sum(inner.gradient(total, rows) ** 2)
        by_weights, by_table = outer.gradient(number, [weights, self.half])
        return by_weights, by_table.values, by_table.indices, by_table.dense_shape

    def embedding_lookup(self):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.half, tf.constant([[3, 1], [3, 5]]))
            total = tf.reduce_sum(tf.cast(rows, tf.float32))
        gradient = tape.gradient(total, self.half)
        return rows, gradient.indices, gradient.values, gradient.dense_shape

    def sparse_read_and_evict(self):
        return sok.sparse_read_and_evict(self.hybrid, tf.constant([3, 1, 3]))

    def apply_gradients(self):
        keys = tf.constant([2, 3])
        pairs = [
            (tf.IndexedSlices(tf.ones([2, DIM]), keys, tf.constant([13, DIM])), table)
            for table in (self.hbm, self.half)
        ]
        self.optimizer.apply_gradients(pairs)

    def clipped_step(self):
        keys = tf.constant([2, 3, 2])
        gradient = tf.IndexedSlices(tf.ones([3, DIM]), keys, tf.constant([13, DIM]))
        self.clipping.apply_gradients([(gradient, self.hbm), (tf.constant([2.0]), self.dense)])

    def sgd_step(self):
        gradient = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([2]), tf.constant([13, DIM]))
        self.sgd.apply_gradients([(gradient, self.hybrid)])

    def writes(self):
        keys, rows = tf.constant([2, 40]), tf.fill([2, DIM], 2.0)
        sok.assign(self.hybrid, keys, rows, tf.constant([7, 8]))
        delta = tf.IndexedSlices(rows, keys)
        self.hbm.scatter_add(delta)
        self.hbm.scatter_sub(delta)
        self.hbm.scatter_update(delta)
        sok.assign(self.half, keys, tf.cast(rows, tf.bfloat16))
        sok.assign(self.slot, tf.constant([2, 3]), rows)

    def exports(self):
        return (
            *sok.export(self.half),
            *self.hbm.export_if(min_score=0),
            *sok.raw_ops.dummy_var_export_if(self.hbm.handle, 0),
            *self.slot.export(),
            *sok.export(self.half, cutoff=1e-20),
            tf.nn.embedding_lookup(self.slot, tf.constant([[2, 77]])),
            self.hbm.size,
        )

    def questions(self):
        keys = tf.constant([[3, 77]])
        return self.hybrid.contains(keys), self.hybrid.scores(keys), self.hybrid.num_zero_rows()

    def removals(self):
        self.hybrid.assign_scores(tf.constant([0, 1]), tf.constant([9, 9]))
        found = self.hybrid.erase(tf.constant([0, 99]))
        old = self.hybrid.expire(num_lookups=1_000_000)
        small = self.hybrid.erase_below(1e-3)
        self.hbm.reserve(2000)
        self.hybrid.clear()
        return found, old, small

    def checkpoints(self):
        saved = [t for t in self.hbm._serialize_to_tensors().values() if t.dtype != tf.string]
        given = {name: tf.constant(value) for name, value in self.saved.items()}
        self.hybrid._restore_from_tensors(given)
        return saved

    def by_tfras_names(self):
        ids = tf.constant([[3, 77]])
        rows, exists = self.bounded.lookup(ids, return_exists=True)
        self.bounded.accum(ids, rows, rows + 1.0, exists)
        self.bounded.upsert(ids, rows + 2.0)
        given = {
            name: tf.constant(value, tf.string if name == "texts" else None)
            for name, value in self.saved_by_text.items()
        }
        self.by_text.rows._restore_from_tensors(given)
        self.by_text.upsert(tf.constant(["b", "cc"]), tf.ones([2, DIM]))
        keys, values = self.by_text.export()
        return rows, exists, tf.strings.length(keys), values

    def by_tfplus_names(self):
        keys, ids = tf.constant([3, 1, 3, 77]), self.ids()
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.split, keys)
            combined = tf.nn.embedding_lookup_sparse(list(self.split), ids, None, combiner="sum")
            loss = tf.reduce_sum(rows) + tf.reduce_sum(combined) + tf.reduce_sum(self.split.value())
        slices = tape.gradient(loss, list(self.split))
        gradients = [part for each in slices for part in (each.indices, each.values)]
        self.few.sparse_read_with_counts(keys[:3], tf.constant([1, 2, 3]))
        self.few.increase_counting(keys[3:], tf.constant([2]))
        for scatter in (self.split.scatter_mul, self.split.scatter_update):
            scatter(tf.IndexedSlices(tf.fill([2, DIM], 3.0), keys[:2]))
        kv.insert_kv_embedding(self.split, keys[:1], tf.ones([1, DIM]))
        self.split.delete(keys[1:2])
        facts = self.split.total_count, self.split.total_freq, self.few.get_counting(keys)
        seen = self.few.get_timestamp(keys) > 0
        gone = self.few.delete_with_timestamp(10_000)
        self.few.assign(self.split)
        exported = self.few.export()
        stored = self.few.storage_size_count
        return (rows, combined, *gradients, *facts, seen, gone, *exported, stored)

    def collectives(self):
        x = tf.constant([[1, 2], [3, 4]])
        comm = sok.communication
        rows, splits = comm.alltoall(x, tf.constant([2]))
        # What a step with clipped norms does on several ranks; on one it sends nothing.
        total = agreed_sum(comm.communicator(), tf.constant([1.0, 2.0]), {"tables": 2}, "A step")
        results = comm.allreduce(x, "sum"), comm.allgather(x), comm.broadcast(x, 0)
        return rows, splits, *results, total

    # ---- outside of graphs only

    def statistics(self):
        return list(self.hybrid.statistics())[:3]

    def words(self):
        # As far as they do not tell the backends apart.
        return repr(self.hbm).split(" memory=")[0], len(self.hbm._repr_html_().split("<tr>"))

    def epoch(self):
        self.hybrid.epoch = 5
        return self.hybrid.epoch

    def chunks(self):
        pieces = [[t.numpy() for t in piece] for piece in self.hbm.export_chunks(32)]
        keys, rows, _ = (np.concatenate(part) for part in zip(*pieces, strict=True))
        return rows[np.argsort(keys)], np.sort(keys)

    def table(self):
        table = self._table("hbm", tf.float16)
        return table.export()


EAGER_ONLY = ["statistics", "words", "epoch", "chunks", "table"]
IN_GRAPHS = [each for each in vars(Calls) if each[0] != "_" and each not in ("ids", *EAGER_ONLY)]
