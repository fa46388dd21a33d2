"""The tables, optimizers and training step of a soak, by the public names of sok_lite alone.

TensorFlow's part is arithmetic that rounds alike everywhere: a gradient is a slope of the plan plus
1/32 of the looked up row, one product by a power of two and one sum. So the rows, which feed back
into their gradients, depend on sok_lite and not on a library of matrices or on TensorFlow's
threads. The static table alone is trained by Keras, with a rate and a momentum that are powers of
two: its products are exact, so a fused multiply-add rounds as two operations do. TensorFlow reads
and combines its rows too, each sum in the order of its items.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import sok_lite as sok
from tests.fuzz import soak_plan as plan

_FEATURES = (*plan.FEATURES, plan.FILTERED)
_NEAR_ROWS = 300  # of a table of which some rows are far


def _near(dim: int) -> float:
    """Returns the gigabytes of so many rows."""
    return _NEAR_ROWS * dim * 4 / 2**30


class Model:
    """All that is trained, on one rank."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rank = sok.communication.rank()
        made = self._make_tables()
        self.tables = {name: made[name] for name in plan.DIMS}
        self._make_optimizers()
        tables = [self.tables[feature.table] for feature in _FEATURES]
        self._graph_step = tf.function(
            self._step,
            input_signature=[
                [_ragged(getattr(table, "key_type", tf.int64)) for table in tables],
                [_ragged(tf.float32) for feature in _FEATURES if feature.has_weights],
                [tf.TensorSpec([None, table.shape[1]], tf.float32) for table in tables],
            ],
        )

    def _make_tables(self) -> dict[str, tf.Variable]:
        def dynamic(name: str, initializer: str = "uniform", **options: object) -> tf.Variable:
            key_type = tf.as_dtype(plan.KEY_TYPES.get(name, np.int64))
            return sok.DynamicVariable(
                plan.DIMS[name],
                initializer,
                name=name,
                key_type=key_type,
                seed=self.seed,
                **options,
            )

        full = {"var_type": "hybrid", "init_capacity": 256, "on_refused": "ignore"}
        cities = np.arange(plan.NUM_CITIES * plan.DIMS["city"], dtype=np.float32) / 64 - 9
        return {
            "user": dynamic("user", "random"),
            "item": dynamic("item", partitioner="hash"),
            "tag": dynamic("tag", dtype=tf.bfloat16),
            "word": dynamic(
                "word", var_type="hybrid", dtype=tf.float16, max_hbm_for_vectors=_near(5)
            ),
            "shop": dynamic("shop", max_capacity=1024, max_hbm_for_vectors=_near(8), **full),
            "click": dynamic("click", max_capacity=512, evict_strategy="kLfu", **full),
            "home": dynamic("home", mode="localized:1"),
            "city": sok.Variable(cities.reshape(plan.NUM_CITIES, -1), name="city"),
            "rare": dynamic("rare", var_type="hybrid", enter_threshold=2, filter_ratio=0.5),
        }

    def _make_optimizers(self) -> None:
        optimizers = keras.optimizers
        dense = optimizers.SGD(1 / 64, momentum=0.5)
        dense.build([self.tables["city"]])
        self.dense = dense
        # The first one's count of steps is dumped and loaded; it is that of all of them.
        self.wrappers = [
            (sok.OptimizerWrapper(optimizer, **options), tables)
            for optimizer, tables, options in (
                (dense, ("city", "home"), {}),
                (optimizers.Adam(1 / 64), ("user", "click"), {}),
                (optimizers.Adagrad(1 / 16, initial_accumulator_value=1 / 8), ("item",), {}),
                (
                    optimizers.SGD(1 / 64, momentum=0.75, nesterov=True),
                    ("tag",),
                    {"stochastic_rounding": True},
                ),
                (optimizers.RMSprop(1 / 128), ("word",), {}),
                (
                    optimizers.Ftrl(1 / 16, l1_regularization_strength=1 / 256),
                    ("shop",),
                    {},
                ),
                (optimizers.AdamW(1 / 64, weight_decay=1 / 64, amsgrad=True), ("rare",), {}),
            )
        ]

    # ---------------------------------------------------------------- steps

    @property
    def steps(self) -> int:
        """Steps that were done."""
        return int(self.wrappers[0][0].iterations)

    def step(self, number: int) -> None:
        """Takes the step of this number. Every rank must call it."""
        batches = [plan.batch_of(self.seed, number, self.rank, feature) for feature in _FEATURES]
        ids = [_split(each.ids, each.splits) for each in batches]
        weights = [
            _split(each.weights, each.splits) for each in batches if each.weights is not None
        ]
        slopes = [tf.constant(each.slopes) for each in batches]
        run = self._step if plan.is_eager(self.seed, number) else self._graph_step
        run(ids, weights, slopes)

    def _step(self, ids: list, weights: list, slopes: list) -> None:
        """Looks up, takes gradients and updates; `weights` are those of features that have some."""
        features = plan.FEATURES
        given = iter(weights)
        all_weights = [next(given) if feature.has_weights else None for feature in features]
        tables = [self.tables[feature.table] for feature in features]
        rare = self.tables[plan.FILTERED.table]
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(
                tables,
                ids[:-1],
                sp_weights=all_weights,
                combiners=[feature.combiner for feature in features],
            )
            filtered = sok.lookup_sparse(
                rare, ids[-1], combiners=plan.FILTERED.combiner, use_low_frequency_filter=True
            )
        outputs = [*outputs, filtered]
        # Of rows of 16 bits the gradient is rounded to them, to nearest, as TensorFlow does.
        pulls = [
            tf.cast(slope + tf.cast(output, tf.float32) * (1 / 32), output.dtype)
            for slope, output in zip(slopes, outputs, strict=True)
        ]
        names = list(self.tables)
        grads = tape.gradient(outputs, [self.tables[name] for name in names], pulls)
        of_table = dict(zip(names, grads, strict=True))
        for wrapper, trained in self.wrappers:
            wrapper.apply_gradients([(of_table[name], self.tables[name]) for name in trained])

    # ---------------------------------------------------------------- checkpoints

    def dump(self, folder: Path, how: str) -> object:
        """Dumps all tables; with "background" it returns what to wait for. Every rank calls it."""
        options = {"whole": {}, "incremental": {"incremental": True}}
        options["background"] = {"incremental": True, "background": True}
        tables = list(self.tables.values())
        return sok.dump(folder, tables, self.wrappers[0][0], progress=False, **options[how])

    def load(self, folder: Path) -> None:
        """Goes on from a checkpoint. Every rank must call it."""
        main, *others = [wrapper for wrapper, _ in self.wrappers]
        sok.load(folder, list(self.tables.values()), main, progress=False)
        for wrapper in others:  # a checkpoint has the count of one: all take every step
            wrapper.iterations.assign(main.iterations)

    # ---------------------------------------------------------------- contents

    def contents(self, number: int) -> dict[str, np.ndarray]:
        """Returns all that this rank holds, and what the ids of a step now read. All call it.

        Names are "<table>/<what>"; of rows of any dtype the bytes are given, (n, bytes).
        """
        found: dict[str, np.ndarray] = {}
        for name, table in self.tables.items():
            if name == "city":
                momenta = [v.numpy() for v in self.dense.variables if v.shape == table.shape]
                found["city/keys"] = np.arange(self.rank, plan.NUM_CITIES, plan.RANKS)
                found["city/rows"] = _bytes(table.numpy())
                for place, momentum in enumerate(momenta):
                    found[f"city/state {place}"] = _bytes(momentum)
                continue
            keys, rows = (tensor.numpy() for tensor in sok.export(table))
            found[f"{name}/keys"], found[f"{name}/rows"] = keys, _bytes(rows)
            for state_name, state in sok.optimizer_states(table).items():
                state_keys, values = (tensor.numpy() for tensor in state.export())
                np.testing.assert_array_equal(state_keys, keys)
                found[f"{name}/state {state_name}"] = _bytes(values)
        batches = [plan.batch_of(self.seed, number, self.rank, feature) for feature in _FEATURES]
        outputs = sok.lookup_sparse(
            [self.tables[feature.table] for feature in _FEATURES],
            [_split(each.ids, each.splits) for each in batches],
            combiners="sum",
            training=False,
            missing="zeros",
        )
        for feature, output in zip(_FEATURES, outputs, strict=True):
            found[f"{feature.table}/read {feature.name}"] = _bytes(output.numpy())
        return found


def _ragged(dtype: object) -> tf.RaggedTensorSpec:
    return tf.RaggedTensorSpec([None, None], dtype, ragged_rank=1, row_splits_dtype=tf.int64)


def _split(values: np.ndarray, splits: np.ndarray) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(values, splits)


def _bytes(rows: np.ndarray) -> np.ndarray:
    """Returns rows (n, dim) as bytes (n, m); numbers that are none would have no certain bits."""
    assert np.isfinite(rows.astype(np.float32)).all(), "a row is no number"
    contiguous = np.ascontiguousarray(rows)
    return contiguous.view(np.uint8).reshape(len(rows), rows.shape[1] * rows.itemsize)
