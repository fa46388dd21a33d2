"""Kinds of tables for a fleet, and what a call asks of them, by small numbers and seeds."""

import itertools
from typing import NamedTuple

import numpy as np

from sok_lite.engine.initializer import Initializer
from sok_lite.engine.optimizers import SGD, Adagrad, Adam, Ftrl, Momentum, RMSprop
from sok_lite.engine.table import make_table

_UNIFORM = Initializer("uniform", -1.0, 1.0)
_NORMAL = Initializer("normal", 0.5, 1.0)
_CUT = Initializer("truncated_normal", 0.0, 2.0)
_SAME = Initializer("constant", 0.3)
_GROWS = {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 1 << 20}
_FULL = {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 64, "on_refused": "ignore"}
_HBM = {"var_type": "hbm"}
_REPEATS = {"evict_strategy": "kLfu", "count_repeats": True}


def _tiers(near_rows, dim):
    return {"max_hbm_for_vectors": near_rows * dim * 4 / 2**30}


class Kind(NamedTuple):
    """A kind of tables: dimension, row format, key type, initializer, update rule, options."""

    dim: int
    dtype: str
    key_type: str
    initializer: Initializer
    rule: object
    options: dict


KINDS = [
    Kind(4, "float32", "int64", _UNIFORM, SGD(), _HBM),
    Kind(8, "float32", "int64", _UNIFORM, Adagrad(), _FULL),
    Kind(1, "float16", "int32", _NORMAL, Momentum(), _GROWS),
    Kind(40, "bfloat16", "uint64", _CUT, Adam(), _HBM),
    Kind(3, "float32", "uint64", _SAME, Ftrl(), _GROWS | {"enter_threshold": 2}),
    Kind(16, "float16", "int64", _UNIFORM, Adam(), _GROWS | _tiers(40, 16)),
    Kind(7, "float32", "int32", _NORMAL, RMSprop(), _FULL | {"evict_strategy": "kLfu"}),
    Kind(33, "float32", "int64", _UNIFORM, Adam(), _HBM),
    Kind(2, "bfloat16", "int64", _SAME, SGD(), _FULL | _tiers(16, 2)),
    Kind(31, "float16", "uint64", _UNIFORM, Adagrad(), _FULL | {"evict_strategy": "kEpochLru"}),
    Kind(5, "float32", "int64", _CUT, Momentum(nesterov=True), _GROWS | {"evict_strategy": "kLfu"}),
    Kind(12, "float32", "int64", _NORMAL, SGD(), _FULL | {"enter_threshold": 3}),
    Kind(6, "float32", "int32", _SAME, Adam(amsgrad=True), _HBM),
    Kind(9, "bfloat16", "int64", _UNIFORM, SGD(), _FULL | {"evict_strategy": "kEpochLfu"}),
    Kind(4, "float32", "uint64", _UNIFORM, Adam(), _FULL | {"evict_strategy": "kCustomized"}),
    Kind(64, "float32", "int64", _NORMAL, Adagrad(), _GROWS | _tiers(20, 64)),
    Kind(3, "float32", "int64", _SAME, SGD(), _GROWS | _REPEATS),
    Kind(3, "float32", "int64", _SAME, SGD(), _FULL | _REPEATS),
]


def made(kind, backend, number):
    options = dict(kind.options)
    return make_table(
        options.pop("var_type"),
        *(backend, kind.dim),
        initializer=kind.initializer,
        key_type=kind.key_type,
        dtype=kind.dtype,
        name=f"t{number}",
        seed=0,
        **options,
    )


class Part(NamedTuple):
    """What a call asks of one table: rows of the batch, and of about how many keys its keys are."""

    number: int
    batch: int
    keys: int
    combiner: str
    is_weighted: bool


class Asked(NamedTuple):
    """A part as it was made: ragged keys as Python ints of int64, and ragged weights or None."""

    part: Part
    ragged: list
    weights: list | None


def some_keys(kind, rng, count, span):
    """Keys (count,) int64 of the kind's key type."""
    low = 0 if kind.key_type == "uint64" else -span
    keys = rng.integers(low, span, count)
    if count and rng.random() < 0.2:
        edge = np.iinfo(kind.key_type)
        ends = np.array([edge.min, edge.max], kind.key_type)
        is_wide = kind.key_type == "uint64"
        keys[rng.integers(count)] = ends.view(np.int64)[1] if is_wide else rng.choice(ends)
    return keys


def drawn_from(part, kind, rng):
    """Returns a part with its keys and weights."""
    lengths = rng.choice([0, 1, 1, 2, 4, 40], part.batch, p=[0.2, 0.3, 0.2, 0.15, 0.14, 0.01])
    keys = some_keys(kind, rng, int(lengths.sum()), part.keys)
    splits = np.cumsum([0, *lengths])
    ragged = [keys[a:b].tolist() for a, b in itertools.pairwise(splits)]
    weights = None
    if part.is_weighted:
        flat = rng.uniform(0.5, 2, keys.size).astype(np.float32) * (rng.random() < 0.9)
        weights = [flat[a:b].tolist() for a, b in itertools.pairwise(splits)]
    return Asked(part, ragged, weights)


def treatment(rng):
    """insert, missing and filter_ratio of a table in a call."""
    return (
        bool(rng.random() < 0.85),
        str(rng.choice(["initial", "zeros"])),
        float(rng.choice([1.0, 1.0, 0.5])),
    )
