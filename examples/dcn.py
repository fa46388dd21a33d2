"""A deep and cross network with Keras: several ids a row, and categories that are texts.

    python examples/dcn.py --workdir /tmp/dcn

The features are a user's number, the texts of the city and the device, and the list of what the
user saw, ragged. It trains by `fit`, keeps the best model, loads it again, and writes one that is
served without sok_lite. It prints what came out in a sentence, and as `RESULT {json}`.
"""

import argparse
import json
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras as sk

CITIES = np.array(["Oslo", "São Paulo", "Perth", "Lima", "Kyoto"])
DEVICES = np.array(["phone", "tablet", "desktop"])


class Cross(keras.layers.Layer):
    """x0 * (w x + b) + x: products of features, one more with each layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.project = None

    def build(self, shapes):
        self.project = keras.layers.Dense(shapes[1][-1])
        self.project.build(shapes[1])

    def call(self, both):
        first, x = both
        return first * self.project(x) + x


def a_model(dim=8):
    """Returns the model, not compiled."""
    inputs = {
        "user": keras.Input([], dtype="int64", name="user"),
        "city": keras.Input([], dtype="string", name="city"),
        "device": keras.Input([], dtype="string", name="device"),
        "seen": keras.Input([None], dtype="int64", ragged=True, name="seen"),
        "shown": keras.Input([], dtype="int64", name="shown"),
    }
    item = sk.Table("item", dim)
    rows = sk.Embeddings(
        {
            "user": sk.Table("user", dim),
            "city": sk.Table("city", dim, key_type=str),
            "device": sk.Table("device", dim, key_type=str),
            "seen": (item, "mean"),
            "shown": item,
        }
    )(inputs)
    first = x = keras.layers.Concatenate()(list(rows.values()))
    for _ in range(2):
        x = Cross()([first, x])
    deep = keras.layers.Dense(16, "relu")(first)
    out = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([x, deep]))
    return keras.Model(inputs, out)


def rows_of(count, seed):
    """Returns features, and whether what is shown is of a kind that the user saw, or the city's."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, count)
    seen = tf.RaggedTensor.from_row_lengths(rng.integers(0, 60, lengths.sum()), lengths)
    city, shown = rng.integers(0, len(CITIES), count), rng.integers(0, 60, count)
    kinds = [set(row % 6) for row in np.split(seen.values.numpy(), np.cumsum(lengths)[:-1])]
    saw = np.array([kind % 6 in before for kind, before in zip(shown, kinds, strict=True)])
    features = {
        "user": rng.integers(0, 500, count) * 7919,
        "city": CITIES[city],
        "device": rng.choice(DEVICES, count),
        "seen": seen,
        "shown": shown,
    }
    return features, (saw | (shown % 5 == city)).astype(np.float32)[:, None]


def main():
    """Trains, loads the best, and exports it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workdir", type=Path, required=True)
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    train, test = (
        tf.data.Dataset.from_tensor_slices(rows_of(rows, seed)).batch(250)
        for rows, seed in ((options.rows, 0), (options.rows // 5, 1))
    )
    model = a_model()
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["AUC"])
    best = str(options.workdir / "best.keras")
    callbacks = [
        sk.TableMetrics(),
        keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
    ]
    model.fit(train, validation_data=test, epochs=options.epochs, callbacks=callbacks, verbose=2)
    loaded = keras.models.load_model(best, custom_objects={"Cross": Cross})
    auc = loaded.evaluate(test, verbose=0, return_dict=True)["AUC"]
    served = options.workdir / "served"
    sok.export_serving(loaded, served)
    features, _ = rows_of(100, 2)
    features = {
        name: tf.convert_to_tensor(each) for name, each in features.items() if name != "seen"
    }
    features["seen"] = rows_of(100, 2)[0]["seen"]
    found = tf.saved_model.load(str(served))(features)
    difference = float(np.abs(found - loaded(features)).max())
    print(
        f"AUC {auc:.4f} on {options.rows // 5:,} held-out rows, by the model of the best epoch. "
        f"Served without sok_lite its predictions differ by {difference:.1g} at most."
    )
    print("RESULT " + json.dumps({"auc": auc, "served_differs_by": difference}), flush=True)


if __name__ == "__main__":
    main()
