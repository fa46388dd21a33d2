"""Two-tower retrieval with Keras: which items a user will like, out of all of them.

    python examples/two_tower.py                                one process
    horovodrun -np 2 python examples/two_tower.py               two

One tower makes a vector of a user's number, the other one of an item's name. They are trained by
`fit` on what users have chosen, with the other items of a batch as negatives. Then every item is
scored for every user by one matrix product: the job prints recall@10 on choices that were held out,
and the neighbors of a few items. The last line is `RESULT {json}`.

The data is made here, so the best possible recall is known: each user prefers one of eight genres,
and some items are popular.
"""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras as sk

GENRES = ("blues", "disco", "folk", "jazz", "metal", "opera", "reggae", "techno")
USERS, ITEMS, DIM, TOP = 1000, 400, 16, 10
LOYALTY = 0.9  # share of a user's choices that are of the preferred genre


class Tower(keras.layers.Layer):
    """A vector of DIM for each id: its row in a table, through two dense layers."""

    def __init__(self, table):
        super().__init__()
        self.row = sk.Embedding(table)
        self.hidden = keras.layers.Dense(32, "relu")
        self.vector = keras.layers.Dense(DIM)

    def call(self, ids):
        return self.vector(self.hidden(self.row(ids)))


class TwoTower(keras.Model):
    """The score of every item of a batch for every user of it, (batch, batch)."""

    def __init__(self):
        super().__init__()
        self.user = Tower(sk.Table("user", DIM))
        self.item = Tower(sk.Table("item", DIM, key_type=str, keep_texts=True))

    def call(self, pairs):
        scores = tf.matmul(self.user(pairs["user"]), self.item(pairs["item"]), transpose_b=True)
        # A popular item is in more batches, as a negative of everybody: without this correction it
        # would be scored too low.
        return scores - pairs["log_frequency"]


def user_ids(users):
    """Returns the ids of users: any 64-bit numbers will do."""
    return users * 1_000_003


def item_names(items):
    """Returns the names of items, such as "jazz-17"."""
    return np.char.add(np.array(GENRES)[items % len(GENRES)], np.char.mod("-%d", items))


def probabilities():
    """Returns how likely each user is to choose each item, (USERS, ITEMS)."""
    popularity = 1 / np.sqrt(1 + np.arange(ITEMS) // len(GENRES))
    is_preferred = np.arange(USERS)[:, None] % len(GENRES) == np.arange(ITEMS) % len(GENRES)
    preferred = is_preferred * popularity
    preferred /= preferred.sum(1, keepdims=True)
    return LOYALTY * preferred + (1 - LOYALTY) * popularity / popularity.sum()


def draw_pairs(rows, seed):
    """Returns distinct pairs of user and item: (n, 2) to train on, (m, 2) held out."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, USERS, rows)
    bounds = np.cumsum(probabilities(), 1)
    items = (bounds[users] < rng.random(rows)[:, None]).sum(1).clip(max=ITEMS - 1)
    pairs = rng.permutation(np.unique(np.stack([users, items], 1), axis=0))
    held_out = len(pairs) // 10
    return pairs[held_out:], pairs[:held_out]


def batches_of(pairs, size):
    """Returns batches of features, each with the places of the right items among its own."""
    users, items = pairs.T
    frequency = np.bincount(items, minlength=ITEMS) / len(items)
    features = {
        "user": user_ids(users),
        "item": item_names(items),
        "log_frequency": np.log(frequency[items]).astype(np.float32),
    }
    rows = tf.data.Dataset.from_tensor_slices(features).shuffle(len(pairs), seed=0)
    return sk.shard(rows.batch(size)).map(
        lambda batch: (batch, tf.range(tf.shape(batch["user"])[0]))
    )


def recall(scores, train, held_out):
    """Returns which share of the held-out pairs is among the TOP items of their users.

    Args:
      scores: of all items for all users, (USERS, ITEMS).
      train: (n, 2) pairs, which are not recommended again.
      held_out: (m, 2) pairs.
    """
    scores = np.array(scores, np.float64)
    scores[tuple(train.T)] = -np.inf
    top = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
    users, items = held_out.T
    return float((top[users] == items[:, None]).any(1).mean())


def neighbors(vectors, item, count=4):
    """Returns the items whose vectors have the largest cosine with that of an item."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-(unit @ unit[item]), kind="stable")
    return order[order != item][:count]


def main():
    """Trains, and compares the recommendations with what was held out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="choices to draw (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="(%(default)s)")
    options = parser.parse_args()
    sok.init()
    keras.utils.set_random_seed(1)
    train, held_out = draw_pairs(options.rows, seed=0)
    model = TwoTower()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    rank = sok.communication.rank()
    sizes = sk.TableMetrics()
    model.fit(
        batches_of(train, 500),
        epochs=options.epochs,
        callbacks=[sk.AllRanks(), sizes],
        verbose=2 if rank == 0 else 0,
    )
    # Every rank looks all of them up: their rows are on all ranks.
    names = item_names(np.arange(ITEMS))
    users = model.user(tf.constant(user_ids(np.arange(USERS)))).numpy()
    items = model.item(tf.constant(names)).numpy()
    if rank != 0:
        return
    popularity = np.bincount(train[:, 1], minlength=ITEMS)
    facts = {
        f"recall_at_{TOP}": recall(users @ items.T, train, held_out),
        "most_popular": recall(np.tile(popularity, (USERS, 1)), train, held_out),
        "best_possible": recall(probabilities(), train, held_out),
    }
    found, most_popular, best = facts.values()
    print(
        f"Recall@{TOP} on {len(held_out):,} held-out choices: {found:.3f}. The most popular items "
        f"reach {most_popular:.3f}, the true preferences {best:.3f}."
    )
    nearest = {names[item]: names[neighbors(items, item)].tolist() for item in (3, 15, 100)}
    for name, others in nearest.items():
        print(f"Nearest to {name}: {', '.join(others)}.")
    facts["neighbors"] = nearest
    facts |= {f"{name}s": int(sizes.history[f"{name}/keys"][-1]) for name in ("user", "item")}
    print("RESULT " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
