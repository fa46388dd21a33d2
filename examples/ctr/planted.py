"""Writes click data in Criteo's format whose best possible AUC is known.

Every click is drawn from a probability that this module computes (the planted model): a logistic
function of one effect per key, of the 13 numbers, and of how the keys of a few pairs of fields get
on. Nobody can rank the rows better than by these probabilities: their AUC is the best possible one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ctr.criteo import NUM_CATEGORIES, NUM_NUMBERS

# from 4 keys in the first field to 20,000 in the last; the key of place i comes up ~ (i + 1)^-ZIPF
NUM_KEYS = np.geomspace(4, 20_000, NUM_CATEGORIES).astype(np.int64)
ZIPF = 1.2
PAIRS = ((1, 4), (3, 6))
MISSING_PLACE = 2  # in every third field the third commonest category is the missing one
MISSING_NUMBER_SHARE = 0.15
LOGIT_MEAN = -1.7  # clicks are the rarer label, about a quarter
LOGIT_STDDEV = 1.4
BLOCK_ROWS = 50_000


class PlantedModel:
    """The true model. Equal seeds give equal models and equal rows."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self._seed = seed
        # small effects where keys are rare: what the data cannot teach should matter little
        scales = 0.9 / (1 + np.log(NUM_KEYS / NUM_KEYS[0]))
        self._key_effects = [rng.normal(0, s, n) for n, s in zip(NUM_KEYS, scales, strict=True)]
        self._number_effects = rng.normal(0, 0.2, NUM_NUMBERS)
        self._missing_effects = rng.normal(0, 0.3, NUM_NUMBERS)
        self._pair_tastes = [
            (rng.normal(0, 0.4, (NUM_KEYS[a], 2)), rng.normal(0, 0.4, (NUM_KEYS[b], 2)))
            for a, b in PAIRS
        ]
        self._cdfs = [_zipf_cdf(n) for n in NUM_KEYS]
        # every seed gives a task of about the same difficulty
        sample = self._effects(*self._draw_features(np.random.default_rng([seed, 1]), 20_000))
        self._mean, self._stddev = sample.mean(), sample.std()

    def draw(self, block: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draws n rows, the same ones whenever it is asked for the same block.

        Returns:
          labels (n,) int64; probabilities (n,) float64; numbers (n, 13) float64, NaN where missing;
          places (n, 26) int64: 0 is the commonest key of its field.
        """
        rng = np.random.default_rng([self._seed, 2, block])
        numbers, places = self._draw_features(rng, n)
        standard = (self._effects(numbers, places) - self._mean) / self._stddev
        probabilities = 1 / (1 + np.exp(-(LOGIT_MEAN + LOGIT_STDDEV * standard)))
        labels = (rng.random(n) < probabilities).astype(np.int64)
        return labels, probabilities, numbers, places

    def _draw_features(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        places = np.stack([cdf.searchsorted(rng.random(n)) for cdf in self._cdfs], axis=1)
        # skewed counts from -1 up, as Criteo has them
        numbers = np.floor(np.exp(rng.normal(1.5, 1.2, (n, NUM_NUMBERS)))) - 1
        numbers[rng.random(numbers.shape) < MISSING_NUMBER_SHARE] = np.nan
        return numbers, places

    def _effects(self, numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns (n,): what the features of each row add up to."""
        is_missing = np.isnan(numbers)
        size = np.log1p(np.maximum(np.nan_to_num(numbers), 0))
        total = np.where(is_missing, self._missing_effects, size * self._number_effects).sum(axis=1)
        for field, effects in enumerate(self._key_effects):
            total += effects[places[:, field]]
        for (a, b), (a_tastes, b_tastes) in zip(PAIRS, self._pair_tastes, strict=True):
            total += (a_tastes[places[:, a]] * b_tastes[places[:, b]]).sum(axis=1)
        return total


def write(path: str | Path, num_rows: int, seed: int) -> np.ndarray:
    """Writes a file in Criteo's own form (tabs, no header).

    Returns:
      (num_rows,) float64: the true probability of a click of every row.
    """
    model = PlantedModel(seed)
    names = [_category_names(field) for field in range(NUM_CATEGORIES)]
    all_probabilities = []
    with open(path, "w", encoding="ascii") as file:
        for block, start in enumerate(range(0, num_rows, BLOCK_ROWS)):
            n = min(BLOCK_ROWS, num_rows - start)
            labels, probabilities, numbers, places = model.draw(block, n)
            columns = [list(map(str, labels.tolist()))]
            columns += [
                [f"{x:.0f}" if x == x else "" for x in column] for column in numbers.T.tolist()
            ]
            columns += [names[field][places[:, field]].tolist() for field in range(NUM_CATEGORIES)]
            file.writelines("\t".join(row) + "\n" for row in zip(*columns, strict=True))
            all_probabilities.append(probabilities)
    return np.concatenate(all_probabilities) if all_probabilities else np.zeros(0)


def _zipf_cdf(n: int) -> np.ndarray:
    weights = np.arange(1, n + 1) ** -ZIPF
    cdf = np.cumsum(weights / weights.sum())
    cdf[-1] = 1  # a sum of roundings may end just below, and a draw just above it
    return cdf


def _category_names(field: int) -> np.ndarray:
    """Returns (keys,) texts of 8 hexadecimal digits, no two alike; the missing one is empty."""
    # an odd factor makes the product one-to-one modulo 2^32
    hashes = (np.arange(NUM_KEYS[field]) * 2_654_435_761 + field * 1_234_567_891) % 2**32
    names = np.array([f"{h:08x}" for h in hashes], dtype=object)
    if field % 3 == 0:
        names[MISSING_PLACE] = ""
    return names
