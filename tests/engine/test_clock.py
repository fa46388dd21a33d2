"""The clock of a table against a plain list of times, and expiry by seconds."""

import json

import numpy as np
import pytest

from sok_lite.engine.table import clock as clock_module
from sok_lite.engine.table.clock import Clock, Spans
from tests.conftest import QUICK
from tests.support.helpers import new_table


def tick(clock):
    """Begins a lookup and returns its number."""
    clock.tick()
    return clock.now


def state_of(clock):
    """All that a clock knows."""
    fields = ("now", "last_time", "span_time", "span_number", "num_spans", "max_spans")
    return [*(getattr(clock, name) for name in fields), clock.spans]


def test_lookups_are_numbered_and_their_times_known_to_a_second(time):
    for seed, n in enumerate((0, 1, 31, 33, 500, 1000)):
        rng, clock, times = np.random.default_rng(seed), Clock(), [0.0]
        for number in range(1, n + 1):
            # Bursts, steady steps and long pauses.
            time.now += float(rng.choice([0, 0.01, 0.3, 1.0, 50.0], p=[0.2, 0.4, 0.3, 0.07, 0.03]))
            assert tick(clock) == number
            times.append(time.now)
        numbers = rng.integers(0, n + 1, 2 * n).astype(np.uint32)
        late = clock.times_of(numbers) - np.array(times)[numbers]
        assert late.shape == numbers.shape and ((late >= 0) & (late <= 1)).all()
        assert (late[numbers == 0] == 0).all()
        for at in rng.uniform(990, time.now + 10, 300) if n else []:
            exact = int(np.searchsorted(times[1:], at)) + 1
            # As if it had asked for up to a second earlier, never for later.
            earliest = int(np.searchsorted(times[1:], at - 1.0)) + 1
            since = clock.first_since(at)
            assert min(earliest, exact) - 1 <= since <= exact
            if exact == n + 1 and at > times[-1]:
                assert since == exact
        # A key that is expired is one whose time is before.
        for at in (times[n // 2], times[n // 2] + 1, time.now - 3):
            is_since = (clock.times_of(numbers) >= at) & (numbers > 0)
            np.testing.assert_array_equal(is_since, numbers >= clock.first_since(at))


def test_a_long_life_is_kept_in_little_memory(time):
    """Of long ago a time is known to a part of it."""
    clock = Clock()
    # Five days, or one, of a lookup every two seconds.
    start, n = time.now, 43_200 if QUICK else 200_000
    for _ in range(n):
        time.now += 2
        tick(clock)
    assert len(clock.spans.times) <= clock_module._MAX_SPANS
    assert clock.max_spans < clock_module._MAX_SPANS  # one is the current one
    for ago in (0, 1, 60, 100, 3000, 40_000, 150_000, 199_000):
        if ago >= n:
            break
        early = n - ago - clock.first_since(start + 2 * (n - ago))
        assert 0 <= early <= ago / 128 + 1
    exact = start + 2.0 * np.arange(1, n + 1)
    late = clock.times_of(np.arange(1, n + 1)) - exact
    assert ((late >= 0) & (late <= 1 + (time.now - exact) / 128)).all()
    assert late.max() > 2  # it does matter


def test_clocks_that_tick_together_tick_as_each_would(time):
    """None ticks where one needs a new span, is ahead of the time, or is full."""
    rng, have_ticked_alike = np.random.default_rng(0), set()
    clocks, twins = ([Clock() for _ in range(3)] for _ in range(2))
    for number in range(500):
        # On, far on, or back by a moment.
        time.now += rng.choice([0.01, 0.4, 3.0, -0.2], p=[0.7, 0.2, 0.05, 0.05])
        if number == 250:
            clocks[1].now = twins[1].now = clock_module.LAST_LOOKUP_NUMBER - 3
        which = np.flatnonzero(rng.random(3) < 0.7)
        before = list(map(state_of, clocks))
        is_alike = Clock.tick_all([clocks[i] for i in which])
        have_ticked_alike.add(is_alike)
        assert is_alike or list(map(state_of, clocks)) == before
        for i in which:
            for clock in (twins[i], *([] if is_alike else [clocks[i]])):
                if clock.is_full:
                    clock.halve()
                tick(clock)
        assert list(map(state_of, clocks)) == list(map(state_of, twins))
    assert have_ticked_alike == {True, False} and clocks[1].now < 2**31 + 500


def test_after_a_restart_everything_counts_as_seen_then(time):
    clock = Clock()
    tick(clock)
    time.now += 500
    clock.prepare_restart(70)()
    assert clock.first_since(time.now - 100) <= 70
    time.now += 100
    assert clock.first_since(time.now - 50) == 71
    assert clock.first_since(time.now - 200) <= 70
    assert tick(clock) == 71
    assert clock.first_since(time.now) == 71


@pytest.mark.parametrize("reads", [False, True])
def test_lookups_that_are_ahead_of_a_clock_that_is_put_back_count_as_of_then(time, reads):
    clock = Clock()
    tick(clock)  # at 1000
    time.now = 5000.0
    for _ in range(3):
        tick(clock)
        time.now += 2
    time.now = 1100.0
    numbers = np.arange(6)
    assert clock.times_of(numbers[:5]).tolist() == [0, 1000, 1100, 1100, 1100]
    if reads:
        assert clock.read() == 1100
        assert clock.times_of(numbers[:5]).tolist() == [0, 1000, 1100, 1100, 1100]
    assert tick(clock) == 5
    time.now += 50
    assert clock.times_of(numbers).tolist() == [0, 1000, 1100, 1100, 1100, 1100]
    assert [clock.first_since(at) for at in (999, 1000, 1001, 1100, 1101)] == [0, 1, 2, 2, 6]
    assert Spans.of(clock.spans._asdict(), clock.now) == clock.spans


def test_a_clock_that_is_put_back_by_a_moment_goes_on(time):
    clock = Clock()
    tick(clock)
    time.now += 0.5
    tick(clock)
    time.now -= 0.25
    assert tick(clock) == 3
    assert clock.times_of(np.array([1, 2, 3])).tolist() == 3 * [1000.25]
    assert clock.first_since(1000.25) == 1 and clock.first_since(1000.5) == 4


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_spans_survive_as_text(time, n):
    rng = np.random.default_rng(n)
    clock, other = Clock(), Clock()
    for _ in range(n):
        time.now += float(rng.choice([0.1, 1 / 3, 50.0]))
        tick(clock)
    saved = json.loads(json.dumps(clock.spans._asdict()))
    time.now += 500
    tick(other)
    other.prepare_restart(clock.now, Spans.of(saved, clock.now))()
    assert other.now == n
    numbers = np.arange(n + 1)
    if n:
        np.testing.assert_array_equal(other.times_of(numbers), clock.times_of(numbers))
        assert other.first_since(time.now - 400) == n + 1
    for each in (clock, other):
        assert tick(each) == n + 1
    for at in rng.uniform(990, time.now + 1, 200) if n else []:
        assert other.first_since(at) == clock.first_since(at)


@pytest.mark.cases("change")
@pytest.mark.parametrize(
    "change",
    [
        {"numbers": [1, 5, 3]},
        {"numbers": [1, 3]},
        {"numbers": [1, 3, 9]},
        {"numbers": [-1, 3, 5]},
        {"numbers": [1.5, 3, 5]},
        {"times": [10.0, 30.0, 20.0]},
        {"ends": [10.0, 35.0, 40.0]},
        {"ends": [9.0, 20.0, 40.0]},
        {"ends": [10.0, 20.0, float("nan")]},
        {"ends": [10.0, 20.0, 1e300]},
        {"ends": [10.0, 20.0, 10**400]},
        {"times": ["10", "20", "30"], "ends": ["10", "20", "40"]},
        {"times": [-10.0, 20.0, 30.0]},
        {"times": "soon"},
        {"times": None},
    ],
    ids=str,
)
def test_times_that_no_clock_has_are_refused(change):
    saved = {"numbers": [1, 3, 5], "times": [10.0, 20.0, 30.0], "ends": [10.0, 20.0, 40.0]}
    assert Spans.of(saved, 7) == Spans(*saved.values())
    with pytest.raises(ValueError, match="contradict each other"):
        Spans.of(saved | change, 7)
    with pytest.raises(ValueError, match="contradict each other"):
        Spans.of({"numbers": []}, 7)


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_keys_expire_by_seconds(backend, time, var_type):
    for n in (0, 1, 31, 1000):
        table, seen, rng = new_table(backend, 1, var_type), {}, np.random.default_rng(n)
        for _ in range(12):
            time.now += float(rng.choice([2.5, 30.0]))
            keys = rng.integers(0, n + 1, n // 3 + 1)
            table.lookup(keys)
            seen.update((key, time.now) for key in keys.tolist())
        for seconds in (200.0, 60.0, 31.0, 4.0, 0.0):
            time.now += 1.5
            doomed = {key for key, at in seen.items() if at < time.now - seconds}
            assert table.expire(seconds=seconds) == len(doomed)
            seen = {key: at for key, at in seen.items() if key not in doomed}
            assert backend.to_host(table.export()[0]).tolist() == sorted(seen)


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_expiry_survives_the_end_of_the_clock(backend, time, var_type):
    table = new_table(backend, 1, var_type)
    table.clock.now = 2**32 - 5
    for key in range(10):
        time.now += 10
        table.find_or_insert([key])
        table.find_or_insert([])
    assert table.num_lookups < 2**31 + 20
    assert table.expire(seconds=85) == 1  # of before the numbers were halved
    assert table.expire(seconds=65) == 2
    assert backend.to_host(table.export()[0]).tolist() == list(range(3, 10))
    assert table.expire(num_lookups=4) == 5
    assert backend.to_host(table.export()[0]).tolist() == [8, 9]
