"""What a soak does: batches, operations, dumps and kills, each a function of the seed alone.

Nothing here knows TensorFlow or sok_lite, and nothing reads a clock. Random numbers are the raw
words of PCG64, whose stream NumPy promises to keep; what its Generator makes of them may change.

A round is: some steps, a dump, more steps, some operations, a digest, a dump. A dump follows at
least one step, so the count of steps in a checkpoint says which place in which round it is of.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

RANKS = 2


class Feature(NamedTuple):
    """A column of ids in every batch.

    About `span` keys are in use at one time; at each step their range moves on by `drift`, so that
    old ones are left.
    """

    name: str
    table: str
    combiner: str
    span: int
    drift: int = 0
    num_ids: int = 5
    has_weights: bool = False


FEATURES = (
    Feature("user", "user", "mean", 3000, 9, has_weights=True),
    Feature("item", "item", "sum", 2000, 5),
    Feature("seen item", "item", "sqrtn", 2000, 5, 8),
    Feature("tag", "tag", "mean", 700, 2, 3),
    Feature("word", "word", "sqrtn", 900, 3, has_weights=True),
    Feature("shop", "shop", "sum", 6000, 7, 4),
    Feature("click", "click", "mean", 4000, 5, has_weights=True),
    Feature("home", "home", "sum", 500, 1, 2),
    Feature("city", "city", "mean", 301, 0, 3, has_weights=True),
)
# Looked up by itself, with the low-frequency filter, which is of a whole call.
FILTERED = Feature("rare", "rare", "sum", 5000, 11, 4)

KEY_TYPES = {"item": np.int32, "click": np.uint64}  # int64 elsewhere
DIMS = {
    "user": 8,
    "item": 4,
    "tag": 6,
    "word": 5,
    "shop": 8,
    "click": 3,
    "home": 4,
    "city": 4,
    "rare": 7,
}
NUM_CITIES = 301  # rows of the static table, an odd number: the ranks have unlike shares
EVICTING = ("shop", "click")

# Operations between steps, by how often they come.
OPERATIONS = (
    *("expire", "assign", "scatter_add", "erase", "erase_if", "insert", "assign_state"),
    *("expire", "assign", "insert", "scatter_update", "reserve", "clear"),
    *("read_and_evict", "read_and_evict"),
)


class Batch(NamedTuple):
    """Ids of a feature on one rank, ragged. Weights, and `slopes`, which a loss would pull the
    output by, are multiples of 1/64."""

    ids: np.ndarray
    splits: np.ndarray
    weights: np.ndarray | None
    slopes: np.ndarray


class Operation(NamedTuple):
    """Something done to a table between steps; `number` chooses keys and values."""

    name: str
    table: str
    number: int


class Round(NamedTuple):
    """The fixed sequence of one round: steps before the first dump and after it, and how the two
    dumps are made: "whole", "incremental" or "background"."""

    number: int
    first: int
    steps: tuple[int, int]
    dumps: tuple[str, str]
    operations: tuple[Operation, ...]

    @property
    def middle(self) -> int:
        """Steps that are done at the first dump."""
        return self.first + self.steps[0]

    @property
    def end(self) -> int:
        """Steps that are done at the second dump."""
        return self.middle + self.steps[1]


class Kill(NamedTuple):
    """Ranks that are killed some time after they begin a step. The job after it repeats the round,
    and is not killed there."""

    round: int
    step: int
    delay_ms: int
    ranks: tuple[int, ...]


def words(*seeds: int | str, count: int) -> np.ndarray:
    """Returns random uint64, (count,), that belong to some seeds."""
    numbers = [
        int.from_bytes(seed.encode(), "little") if isinstance(seed, str) else seed for seed in seeds
    ]
    return np.random.PCG64(numbers).random_raw(count)


def keys_of(table: str, numbers: np.ndarray) -> np.ndarray:
    """Returns the keys of a table that belong to numbers from 0 on, spread over the key type."""
    if table == "city":
        return numbers.astype(np.int64)
    if table == "item":
        return (numbers.astype(np.int64) * 7919 - 4_000_000).astype(np.int32)
    spread = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # wraps around
    return spread if table == "click" else spread.view(np.int64)


def batch_of(seed: int, step: int, rank: int, feature: Feature) -> Batch:
    """Returns what a rank looks up in a step. Small numbers come more often, as ids do."""
    # The same number of samples for all features; now and then a rank has none.
    (draw,) = words(seed, step, rank, "samples", count=1)
    num_samples = 0 if draw % np.uint64(23) == 0 else 8 + int(draw >> np.uint64(32)) % 33
    drawn = words(seed, step, rank, feature.name, count=num_samples)
    lengths = (drawn % np.uint64(feature.num_ids + 1)).astype(np.int64)
    splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    num_ids = int(splits[-1])
    span = np.uint64(feature.span)
    one, other, heavy = words(seed, step, rank, feature.name, "ids", count=3 * num_ids).reshape(
        3, num_ids
    )
    numbers = (one % span) * (other % span) // span + np.uint64(feature.drift * step)
    weights = None
    if feature.has_weights:
        weights = (heavy % np.uint64(96)).astype(np.float32) / np.float32(64)
    dim = DIMS[feature.table]
    pulls = words(seed, step, rank, feature.name, "slopes", count=num_samples * dim)
    slopes = (pulls % np.uint64(128)).astype(np.float32) / np.float32(64) - np.float32(1)
    ids = keys_of(feature.table, numbers)
    return Batch(ids, splits, weights, slopes.reshape(num_samples, dim))


def is_eager(seed: int, step: int) -> bool:
    """Whether a step runs eagerly: one of three does, the others in a tf.function."""
    return int(words(seed, step, "eager", count=1)[0] % np.uint64(3)) == 0


def rounds_of(seed: int) -> Iterator[Round]:
    """Yields the rounds of a seed, without an end."""
    first = 0
    tables = [name for name in DIMS if name != "city"]
    for number in itertools.count():
        draw = [int(word) for word in words(seed, number, "round", count=8)]
        steps = 10 + draw[0] % 13, 6 + draw[1] % 9
        # Increments add up: every sixth round replaces them.
        dumps = (
            "whole" if number % 6 == 0 else ("incremental", "background")[draw[2] % 2],
            "incremental",
        )
        chosen = words(seed, number, "operations", count=9).reshape(3, 3)
        operations = []
        for name, table, value in chosen.tolist():
            name = OPERATIONS[name % len(OPERATIONS)]
            among = EVICTING if name == "read_and_evict" else tables
            operations.append(Operation(name, among[table % len(among)], value % 2**31))
        yield Round(number, first, steps, dumps, tuple(operations))
        first += sum(steps)


def kills_of(seed: int, rounds: int) -> list[Kill]:
    """Returns the kills of the first rounds of a seed, in their order."""
    kills: list[Kill] = []
    for place in itertools.islice(rounds_of(seed), rounds):
        draw = [int(word) for word in words(seed, place.number, "kill", count=6)]
        # Round 1 always has one, of the others each fifth may have: a new job takes seconds.
        if place.number != 1 and (place.number % 5 != 1 or draw[0] % 4 == 0):
            continue
        step = place.first + draw[2] % sum(place.steps)
        # At once; in a step, which takes some 50 ms; in a dump, which takes some 300 ms.
        delay = (0, 1 + draw[3] % 60, 1 + draw[3] % 400)[draw[4] % 3]
        ranks = ((0,), (1,), (0, 1))[draw[5] % 3]
        kills.append(Kill(place.number, step, delay, ranks))
    return kills
