"""Times `model.fit` with tables beside the same with keras.layers.Embedding.

One line `RESULT {json}` for each: --features features of one id a row, drawn from --keys keys, rows
of --dim, and an MLP on them, by Adam. The tables are in one `Embeddings` layer, and then in a layer
each. Times are of epochs after the first, medians, in turns.

Example:
  python -m scripts.bench keras --features 26 --batch 1024
"""

import argparse
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sok_lite.keras as sk
from scripts.bench.common.measuring import num_threads, result
from sok_lite.backend import get_backend

_ONE_LAYER, _LAYERS, _OF_KERAS = "tables", "a layer for each table", "keras.layers.Embedding"


def model_of(kind: str, args: argparse.Namespace) -> Any:
    """Returns a compiled model."""
    names = [f"feature_{i}" for i in range(args.features)]
    inputs = {name: keras.Input([], dtype="int64", name=name) for name in names}
    if kind == _ONE_LAYER:
        rows = sk.Embeddings({name: sk.Table(name, args.dim) for name in names})(inputs)
    elif kind == _LAYERS:
        rows = {name: sk.Embedding(sk.Table(name, args.dim))(ids) for name, ids in inputs.items()}
    else:
        rows = {
            name: keras.layers.Embedding(args.keys, args.dim)(ids) for name, ids in inputs.items()
        }
    x = keras.layers.Concatenate()([rows[name] for name in names])
    for width in (64, 32):
        x = keras.layers.Dense(width, "relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))
    model.compile("adam", "binary_crossentropy")
    return model


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--keys", type=int, default=20_000, help="of each feature")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    count = args.steps * args.batch
    features = {f"feature_{i}": rng.integers(0, args.keys, count) for i in range(args.features)}
    labels = rng.integers(0, 2, (count, 1)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(args.batch).cache()
    models = {kind: model_of(kind, args) for kind in (_ONE_LAYER, _LAYERS, _OF_KERAS)}
    times: dict[str, list[float]] = {kind: [] for kind in models}
    for _ in range(args.rounds + 1):
        for kind, model in models.items():
            start = time.perf_counter()
            model.fit(data, verbose=0)
            times[kind].append((time.perf_counter() - start) / args.steps)
    for kind, each in times.items():
        result(
            benchmark="keras fit",
            layer=kind,
            features=args.features,
            batch=args.batch,
            dim=args.dim,
            keys=args.keys,
            threads=num_threads(get_backend("cpu")),
            ms_a_step=float(np.median(each[1:])) * 1000,
            fastest_ms=min(each[1:]) * 1000,
        )
