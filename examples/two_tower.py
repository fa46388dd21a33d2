"""Two-tower retrieval with Keras: users and items whose numbers nobody knows before.

    python examples/two_tower.py                                one process
    horovodrun -np 2 python examples/two_tower.py               two

Each user likes the items of one genre. A model learns it from pairs, through `fit`, and finds the
items of a user's genre among all. The last line is `RESULT {json}`.
"""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras as sk

GENRES, DIM = 4, 8


class TwoTower(keras.Model):
    """Rows of a user and of an item, whose product says whether they fit."""

    def __init__(self):
        super().__init__()
        self.user = sk.Embedding(sk.Table("user", DIM))
        self.item = sk.Embedding(sk.Table("item", DIM, key_type=str))
        self.scale = keras.layers.Dense(1)

    def call(self, pairs):
        both = self.user(pairs["user"]) * self.item(pairs["item"])
        return self.scale(tf.reduce_sum(both, 1, keepdims=True))


def pairs_of(rows, seed):
    """Returns pairs of a user's number and an item's name, and whether they are of one genre."""
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 200, (2, rows))
    pairs = {"user": users * 1_000_003, "item": np.char.add("item-", items.astype(str))}
    return pairs, (users % GENRES == items % GENRES).astype(np.float32)[:, None]


def main():
    """Trains, and says how well what was kept back is told apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    sok.init()
    keras.utils.set_random_seed(1)
    train, test = (
        sk.shard(tf.data.Dataset.from_tensor_slices(pairs_of(rows, seed)).batch(500))
        for rows, seed in ((options.rows, 0), (options.rows // 5, 1))
    )
    model = TwoTower()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=[keras.metrics.AUC(from_logits=True)])
    rank = sok.communication.rank()
    sizes = sk.TableMetrics()
    found = model.fit(
        train,
        validation_data=test,
        epochs=options.epochs,
        callbacks=[sk.AllRanks(), sizes],
        verbose=2 if rank == 0 else 0,
    ).history
    if rank == 0:
        keys = {f"{name}s": sizes.history[f"{name}/keys"][-1] for name in ("user", "item")}
        print("RESULT " + json.dumps({"auc": found["val_auc"][-1], **keys}), flush=True)


if __name__ == "__main__":
    main()
