"""The systems that `lookup` and `many_tables` compare: ours, a dense tf.Variable, and TFRA.

TensorFlow is imported by the process that is one of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
FILL_PARTS = 20  # calls that fill a table, so that no single one is large


class System:
    """What all have.

    Attributes:
      name: of the system.
      grows: whether its tables give new keys a row.
      rank, num_ranks: of this process.
    """

    name = ""
    grows = True
    rank, num_ranks = 0, 1

    def __init__(self, dim: int, threads: int | None) -> None:
        """Takes the process for this system.

        Args:
          dim: elements of a row.
          threads: of TensorFlow; None: as it chooses.
        """
        import tensorflow as tf

        self.tf, self.dim, self.count = tf, dim, 0
        if threads:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)

    def new_table(self) -> Any:
        """Makes an empty table."""
        raise NotImplementedError

    def insert(self, table: Any, ids: Any) -> None:
        """Inserts keys (n,)."""
        raise NotImplementedError

    def filled_table(self, keys: np.ndarray) -> Any:
        """Makes a table that holds keys (n,), int64, and with several ranks this rank's part."""
        table = self.new_table()
        keys = keys[keys % self.num_ranks == self.rank]
        for part in np.array_split(keys, FILL_PARTS):
            self.insert(table, self.tf.constant(part))
        return table

    def ids(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns what this system looks up for the keys at some positions."""
        return keys[positions]

    def adam(self) -> Any:
        """Makes the optimizer of one table's training."""
        raise NotImplementedError

    def many_tables_optimizer(self) -> Any:
        """Makes the optimizer of the training of many tables."""
        return self.adam()

    def rows(self, table: Any, ids: Any, is_training: bool) -> Any:
        """Looks up ids (n,); returns (n, dim)."""
        raise NotImplementedError

    def partition(self, row_splits: np.ndarray) -> np.ndarray:
        """Returns how this system likes to be told which ids are of a row: by the row of each."""
        return np.repeat(np.arange(len(row_splits) - 1), np.diff(row_splits))

    def mean(self, table: Any, ids: Any, partition: Any, is_training: bool) -> Any:
        """Looks up ids (n,); returns the mean of each row of the partition, (batch, dim)."""
        raise NotImplementedError

    def rows_of_all(
        self, tables: Sequence, ids: Sequence, partitions: Sequence, is_training: bool
    ) -> list:
        """Does what `rows` does for several tables; the partitions say one id a row."""
        each = zip(tables, ids)  # noqa: B905 (TFRA's Python may be older)
        return [self.rows(table, some, is_training) for table, some in each]

    def means_of_all(
        self, tables: Sequence, ids: Sequence, partitions: Sequence, is_training: bool
    ) -> list:
        """Does what `mean` does for several tables."""
        each = zip(tables, ids, partitions)  # noqa: B905
        return [self.mean(*of_table, is_training) for of_table in each]

    def trained(self, table: Any) -> Any:
        """Returns what gradients are taken for and the optimizer is given."""
        return table

    def train(
        self, optimizer: Any, tables: Sequence, look_up: Callable[[], Sequence], weights: Any
    ) -> Any:
        """Does one step of training and returns the loss, the sum of all rows times weights.

        Args:
          optimizer: what takes the gradients.
          tables: what is trained.
          look_up: gives for each table rows (n, dim).
          weights: (n, dim) or (dim,).
        """
        trained = [self.trained(table) for table in tables]
        with self.tf.GradientTape() as tape:
            loss = self.tf.add_n([self.tf.reduce_sum(rows * weights) for rows in look_up()])
        grads = tape.gradient(loss, trained)
        optimizer.apply_gradients(zip(grads, trained))  # noqa: B905
        return loss


class Ours(System):
    """sok_lite.DynamicVariable and sok_lite.OptimizerWrapper(Keras 3 Adam)."""

    name = "sok_lite"

    def __init__(self, dim: int, threads: int | None) -> None:
        super().__init__(dim, threads)
        import sok_lite as sok

        self.sok = sok
        sok.init()
        self.rank, self.num_ranks = sok.communication.rank(), sok.communication.num_ranks()

    def new_table(self) -> Any:
        self.count += 1
        return self.sok.DynamicVariable(
            dimension=self.dim, initializer="random", name=f"bench_{self.count}"
        )

    def insert(self, table: Any, ids: Any) -> None:
        self.sok.assign(table, ids, self.tf.zeros([ids.shape[0], self.dim]))

    def adam(self) -> Any:
        return self.sok.OptimizerWrapper(self.tf.keras.optimizers.Adam(LEARNING_RATE))

    def rows(self, table: Any, ids: Any, is_training: bool) -> Any:
        return self.tf.nn.embedding_lookup(table, ids)

    def partition(self, row_splits: np.ndarray) -> np.ndarray:
        return row_splits

    def rows_of_all(
        self, tables: Sequence, ids: Sequence, partitions: Sequence, is_training: bool
    ) -> list:
        return self.sok.lookup_sparse(list(tables), list(ids), combiners="sum")

    def means_of_all(
        self, tables: Sequence, ids: Sequence, partitions: Sequence, is_training: bool
    ) -> list:
        ragged = [
            self.tf.RaggedTensor.from_row_splits(*each, validate=False)
            for each in zip(ids, partitions, strict=True)
        ]
        return self.sok.lookup_sparse(list(tables), ragged, combiners="mean")


class Dense(System):
    """A dense tf.Variable that already has every row: no keys, so no hash table to pay for."""

    name = "dense"
    grows = False

    def filled_table(self, keys: np.ndarray) -> Any:
        rows = np.random.default_rng(2).random((len(keys), self.dim), np.float32)
        return self.tf.Variable(rows)

    def ids(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return positions

    def adam(self) -> Any:
        # Keras 3 updates every row of a dense variable; TF 1's Adam has the sparse kernel.
        return self.tf.compat.v1.train.AdamOptimizer(LEARNING_RATE)

    def many_tables_optimizer(self) -> Any:
        # SGD, and of those the one with least to do: it subtracts the gradients where they belong.
        return self.tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE)

    def rows(self, table: Any, ids: Any, is_training: bool) -> Any:
        return self.tf.gather(table, ids)

    def mean(self, table: Any, ids: Any, partition: Any, is_training: bool) -> Any:
        return self.tf.sparse.segment_mean(table, ids, partition, sparse_gradient=is_training)


class Tfra(System):
    """TFRA's Variable, shadow lookup with unique, DynamicEmbeddingOptimizer(tf_keras Adam)."""

    name = "tfra"

    def __init__(self, dim: int, threads: int | None) -> None:
        super().__init__(dim, threads)
        import tensorflow_recommenders_addons.dynamic_embedding as de

        self.de = de
        self.shadows: dict[str, Any] = {}

    def new_table(self) -> Any:
        self.count += 1
        return self.de.get_variable(
            f"bench_{self.count}", dim=self.dim, initializer=0.0, init_size=0
        )

    def insert(self, table: Any, ids: Any) -> None:
        table.upsert(ids, self.tf.zeros([ids.shape[0], self.dim]))

    def filled_table(self, keys: np.ndarray) -> Any:
        table = super().filled_table(keys)
        name = f"shadow_{self.count}"
        self.shadows[table.name] = self.de.shadow_ops.ShadowVariable(table, name=name)
        return table

    def adam(self) -> Any:
        return self.de.DynamicEmbeddingOptimizer(self.tf.keras.optimizers.Adam(LEARNING_RATE))

    def rows(self, table: Any, ids: Any, is_training: bool) -> Any:
        if not is_training:
            return table.lookup(ids)
        return self.de.shadow_ops.embedding_lookup_unique(
            self.trained(table), ids, self.dim, with_unique=True
        )

    def mean(self, table: Any, ids: Any, partition: Any, is_training: bool) -> Any:
        # The steps of TFRA's embedding_lookup_sparse, which would make shadows of its own.
        unique, where = self.tf.unique(ids)
        if is_training:
            rows = self.de.shadow_ops.embedding_lookup(self.trained(table), unique)
        else:
            rows = table.lookup(unique)
        return self.tf.sparse.segment_mean(rows, where, partition)

    def trained(self, table: Any) -> Any:
        return self.shadows[table.name]


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Ours, Dense, Tfra)}
