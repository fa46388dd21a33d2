"""examples/larger_than_memory.ipynb: what it says is true of the data that it makes.

The oracle is a table that can evict any key, not only one of two buckets.
"""

import functools

import numpy as np
import pytest

from tests.support.notebooks import data_of, notebook, numbers_of, printed

NAME = "larger_than_memory"
# Of hit rates. Among all keys there is a lower count than in two buckets: less is left of kLfu.
CLOSE = {"no limit": 0.005, "kLfu": 0.06}


def test_what_it_says_is_true():
    check_facts(printed(notebook(NAME)), num_days=2)


@functools.cache
def made():
    return data_of(NAME)


@functools.cache
def hit_rates(strategy, threshold=1, num_days=None):
    """Returns the hit rate of each day, of a table that evicts the key of the lowest score."""
    shown, capacity, batch_size = (made()[name] for name in ("shown", "CAPACITY", "BATCH_SIZE"))
    last, count, seen, day_of = np.zeros((4, shown.max() + 1), np.int64)
    is_held = np.zeros(len(last), bool)
    score = {
        "kLru": lambda: last,
        "kLfu": lambda: count,
        "kEpochLru": lambda: day_of * 10**6 + last,
        "kEpochLfu": lambda: day_of * 10**6 + count,
    }
    rng = np.random.default_rng(0)
    rates, number = [], 0
    for day, impressions in enumerate(shown[:num_days]):
        hits = 0
        for batch in impressions.reshape(-1, batch_size):
            number += 1
            hits += is_held[batch].sum()
            keys = np.unique(batch)
            seen[keys] += 1
            held, new = keys[is_held[keys]], keys[~is_held[keys] & (seen[keys] >= threshold)]
            count[held] += 1
            count[new] = 1
            last[keys], day_of[keys] = number, day
            if strategy != "no limit":
                victims = np.setdiff1d(np.flatnonzero(is_held), held)
                too_many = len(victims) + len(held) + len(new) - capacity
                if too_many > 0:
                    chance = rng.random(len(victims))  # which of equal ones
                    order = np.lexsort((chance, score[strategy]()[victims]))
                    gone = victims[order[:too_many]]
                    is_held[gone], seen[gone] = False, 0
            is_held[new] = True
        rates.append(hits / len(impressions))
    return np.array(rates)


def table_of(text):
    """Returns the numbers of each line of a table of results, by the name before them."""
    return {line[:19].rstrip(): numbers_of(line[19:]) for line in text.splitlines()[1:]}


def check_facts(outputs, num_days=None):
    """Compares what a run printed with counts of the data that it made, and with what it says.

    Args:
      num_days: of which the oracle is asked; None: all.
    """
    data = data_of(NAME)
    shown = data["shown"]
    total = len(np.unique(shown))
    ad, distinct = outputs["data"].splitlines()
    assert ad == f"ad {data['ad_ids'][0, 0]}: clicked {data['clicked'][0, 0]:.0f}"
    assert numbers_of(distinct) == [len(np.unique(shown[0])), 1, total, data["NUM_DAYS"]]
    assert len(np.unique(data["ad_ids"])) == total
    times = np.bincount(shown.ravel())
    assert (times == 1).sum() / shown.size > 0.4
    assert total / data["CAPACITY"] == pytest.approx(64, abs=1)

    found = table_of(outputs["limit"]) | table_of(outputs["admission"])
    assert table_of(outputs["model"])["no limit"] == found["no limit"]
    for name, (keys, *rates, _, _) in found.items():
        strategy, _, second = name.partition(", ")
        expected = hit_rates(strategy, 2 if second else 1, num_days)
        close = CLOSE.get(name, 0.02)
        assert rates[0] == pytest.approx(expected[1], abs=close), name
        if num_days is None:
            assert rates[1] == pytest.approx(expected[-1], abs=close), name
        assert keys == (total if name == "no limit" else data["CAPACITY"])
    check_what_is_said_of_strategies(found)
    if num_days is None:
        falling = hit_rates("kLfu")[1:]
        assert (np.diff(falling) < 0.005).all() and falling[-1] < falling[0] - 0.05

    plain, counting = (numbers_of(line)[-1] * 1024 for line in outputs["counters"].splitlines())
    assert abs(plain - 17.25 * data["CAPACITY"]) < 1024  # it is printed in KiB
    never_in = np.sum(times == 1)  # and some whose counters are gone since
    assert 18 < (counting - plain) / never_in < 34
    check_tiers(data, outputs)


def check_what_is_said_of_strategies(found):
    """Whom the text calls better, by what was printed and by the oracle."""
    lru, lfu, epoch_lru, epoch_lfu = (
        found[name][1:] for name in ("kLru", "kLfu", "kEpochLru", "kEpochLfu")
    )
    assert lfu[0] == 0.44 > epoch_lfu[0] > lru[0] and lfu[1] == 0.35 < lru[1] < epoch_lfu[1]
    assert epoch_lru == pytest.approx(lru, abs=0.01)
    assert epoch_lfu[:2] == [0.43, 0.43]
    assert lfu[3] == pytest.approx(epoch_lfu[3], abs=0.01) and lru[3] < lfu[3] - 0.01
    no_limit = found["no limit"][1:]
    for name in ("kLru, 2nd time", "kEpochLfu, 2nd time"):
        rates, aucs = found[name][1:3], found[name][3:]
        assert rates == pytest.approx([0.5, 0.5], abs=0.015) and max(rates) < no_limit[0]
        assert aucs == pytest.approx(no_limit[2:], abs=0.025)


def check_tiers(data, outputs):
    """Compares sizes with docs/sizing.md, and the first shares with the order of insertion."""
    num_rows, num_near, row_bytes, slots = 200_000, 20_000, 256, 1 << 19
    index = 17.25 * slots + 9 * num_rows
    expected = [num_near * row_bytes, (num_rows - num_near) * row_bytes, index]
    for line, each in zip(outputs["tiers"].splitlines()[1:], expected, strict=True):
        sized, used = numbers_of(line)
        assert sized == pytest.approx(each / 2**20, abs=0.05 + 1e-9)
        assert used == pytest.approx(sized, rel=0.03)

    zipf = 1 / np.arange(1, num_rows + 1) ** 1.05
    zipf /= zipf.sum()
    ids = num_rows - 1 - data["rng"].choice(num_rows, 20_000, p=zipf)
    first, change = outputs["share"].splitlines()
    at_first, warm, _ = numbers_of(first)
    cold, again, _ = numbers_of(change)
    assert at_first == pytest.approx(np.mean(ids < num_near), abs=0.005)
    assert cold == pytest.approx(num_near / num_rows, abs=0.03)
    best = zipf[:num_near].sum()
    assert best - 0.05 < min(warm, again) and max(warm, again) < best + 0.01
