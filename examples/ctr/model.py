"""A DLRM-style click model: dynamic tables for the 26 categories, dense layers for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sok_lite as sok
from ctr.criteo import NUM_CATEGORIES, NUM_NUMBERS
from ctr.ranks import Ranks


class Dlrm(keras.Model):
    """Bottom MLP on the numbers, dot products of all pairs of vectors, top MLP on those.

    The embeddings come from outside: these are the dense weights only.
    """

    def __init__(self, dim: int) -> None:
        """Builds the model.

        Args:
          dim: length of an embedding, and so of the bottom MLP's output.
        """
        super().__init__()
        num_vectors = NUM_CATEGORIES + 1
        rows, columns = np.tril_indices(num_vectors, k=-1)
        self._pairs = (rows * num_vectors + columns).astype(np.int32)
        self.bottom = keras.Sequential(
            [
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(dim),
            ]
        )
        self.top = keras.Sequential(
            [
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )

    def call(self, numbers: tf.Tensor, embeddings: list[tf.Tensor]) -> tf.Tensor:
        """Computes the logits.

        Args:
          numbers: (batch, 13) float32 as in the file; NaN where missing.
          embeddings: 26 times (batch, dim) float32.

        Returns:
          (batch,) float32.
        """
        is_missing = tf.math.is_nan(numbers)
        # the numbers are skewed counts; some are -1
        size = tf.math.log1p(tf.maximum(tf.where(is_missing, 0.0, numbers), 0.0))
        bottom = self.bottom(tf.concat([size, tf.cast(is_missing, tf.float32)], axis=1))
        vectors = tf.stack([bottom, *embeddings], axis=1)
        products = tf.matmul(vectors, vectors, transpose_b=True)
        flat = tf.reshape(products, [-1, products.shape[1] * products.shape[2]])
        pairs = tf.gather(flat, self._pairs, axis=1)
        return tf.squeeze(self.top(tf.concat([bottom, pairs], axis=1)), axis=1)


class ClickModel:
    """26 dynamic tables, the dense model over them, and one training step."""

    def __init__(self, dim: int, seed: int, ranks: Ranks, gradient_dtype: str = "float32") -> None:
        """Makes empty tables, and dense weights as on rank 0. Every rank must call it.

        Args:
          dim: length of an embedding.
          seed: of the initial values of embeddings and of dense weights.
          ranks: who trains together.
          gradient_dtype: in which gradients travel between them, or "bfloat16".
        """
        keras.utils.set_random_seed(seed)
        self.ranks = ranks
        self.tables = [
            sok.DynamicVariable(
                dimension=dim,
                var_type="hbm",
                initializer="random",
                name=f"C{i + 1}",
                seed=seed,
                gradient_dtype=gradient_dtype,
            )
            for i in range(NUM_CATEGORIES)
        ]
        self.dense = Dlrm(dim)
        self.dense(tf.zeros([1, NUM_NUMBERS]), [tf.zeros([1, dim])] * NUM_CATEGORIES)
        ranks.broadcast([v.value for v in self.dense.weights])
        self.optimizer: Any = None  # `train_step` needs one

    def logits(self, numbers: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """Computes (batch,) logits; a key never seen before gets an embedding."""
        # each field holds one key a row, so row i of every field is keys[i : i + 1]
        row_splits = tf.range(tf.shape(keys, tf.int64)[0] + 1)
        ids = [
            tf.RaggedTensor.from_row_splits(column, row_splits, validate=False)
            for column in tf.unstack(keys, axis=1)
        ]
        embeddings = sok.lookup_sparse(self.tables, ids, combiners=["sum"] * len(ids))
        return self.dense(numbers, embeddings)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([None, NUM_NUMBERS], tf.float32),
            tf.TensorSpec([None, NUM_CATEGORIES], tf.int64),
            tf.TensorSpec([], tf.float32),
        ]
    )
    def train_step(
        self, labels: tf.Tensor, numbers: tf.Tensor, keys: tf.Tensor, num_rows: tf.Tensor
    ) -> tf.Tensor:
        """Updates tables and dense weights from one global batch. Every rank must call it.

        Args:
          labels, numbers, keys: this rank's rows of the batch; there may be none.
          num_rows: rows of the whole batch, all ranks together.

        Returns:
          The mean loss of the whole batch.
        """
        with tf.GradientTape() as tape:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, self.logits(numbers, keys))
            # over the rows of all ranks: gradients are then to be summed over ranks
            loss = tf.reduce_sum(losses) / num_rows
        weights = self.dense.trainable_weights
        grads = tape.gradient(loss, [*self.tables, *(v.value for v in weights)])
        # a table's gradients go to the ranks that own the keys, and are summed there: they must
        # not go through Horovod as well
        table_grads, dense_grads = grads[: len(self.tables)], grads[len(self.tables) :]
        loss, *dense_grads = self.ranks.sum([loss, *dense_grads])
        self.optimizer.apply_gradients(
            zip([*table_grads, *dense_grads], [*self.tables, *weights], strict=True)
        )
        return loss

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, NUM_NUMBERS], tf.float32),
            tf.TensorSpec([None, NUM_CATEGORIES], tf.int64),
        ]
    )
    def predict(self, numbers: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """Computes (batch,) logits outside of training. Every rank must call it."""
        return self.logits(numbers, keys)

    def save(self, directory: Path) -> int:
        """Writes this rank's part of every table, and on rank 0 the dense weights.

        Every rank must call it; when it returns, all parts are written.

        Returns:
          The number of keys in all tables of all ranks.
        """
        arrays = {}
        for table in self.tables:
            keys, values = sok.export(table)
            arrays[f"{table_name(table)}.keys"] = keys.numpy()
            arrays[f"{table_name(table)}.values"] = values.numpy()
        np.savez(directory / f"part_{self.ranks.rank}_of_{self.ranks.size}.npz", **arrays)
        if self.ranks.rank == 0:
            np.savez(directory / "dense.npz", *self.dense.get_weights())
        num_keys = sum(len(a) for name, a in arrays.items() if name.endswith(".keys"))
        return int(self.ranks.gather(np.array([num_keys])).sum())

    def load(self, directory: Path, num_parts: int) -> None:
        """Takes over the parts that `num_parts` ranks saved; this process is the only rank."""
        for part in range(num_parts):
            with np.load(directory / f"part_{part}_of_{num_parts}.npz") as arrays:
                for table in self.tables:
                    name = table_name(table)
                    sok.assign(table, arrays[f"{name}.keys"], arrays[f"{name}.values"])
        with np.load(directory / "dense.npz") as arrays:
            self.dense.set_weights([arrays[name] for name in arrays.files])


def table_name(table: sok.DynamicVariable) -> str:
    """Returns the name the table was made with; TensorFlow adds `:0`."""
    return table.name.split(":")[0]
