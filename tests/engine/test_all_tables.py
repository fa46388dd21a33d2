"""Calls of 1 to 40 tables of mixed kinds give what each table gives alone, and what a dict gives.

What is compared is said in tests/support/fleet.py.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.conftest import QUICK
from tests.support.fleet import CHANGES, CHUNK_BYTES, Fleet, play, threads
from tests.support.fleet_kinds import KINDS, Part
from tests.support.helpers import sized
from tests.support.simt import backend as simt

SEEDS = st.integers(0, 2**16)
MOST = 40


def part(number, num_tables):
    """A part from a whole number: the smaller, the simpler."""
    number, table = divmod(number, num_tables)
    number, batch = divmod(number, 5)
    number, keys = divmod(number, 3)
    is_weighted, combiner = divmod(number, 3)
    return Part(
        *(table, (0, 1, 3, 12, 40)[batch], (5, 40, 400)[keys]),
        *(("sum", "mean", "sqrtn")[combiner], is_weighted % 2 == 1),
    )


class AllTables(RuleBasedStateMachine):
    """By one thread: full tables equal their twins as well."""

    def new_backend(self):
        return threads(1)

    @initialize(
        kinds=st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=8)
        | st.integers(9, MOST).map(lambda count: [i % len(KINDS) for i in range(count)])
    )
    def start(self, kinds):
        self.fleet = Fleet(self.new_backend(), kinds)

    @rule(parts=st.lists(st.integers(0, 90 * MOST), max_size=10), seed=SEEDS, repack=st.booleans())
    def forward(self, parts, seed, repack):
        count = len(self.fleet.tables)
        self.fleet.forward([part(number, count) for number in parts], seed, repack)

    @rule(first=st.integers(0, 90), seed=SEEDS)
    def forward_of_all(self, first, seed):
        count = len(self.fleet.tables)
        parts = [part((first + i) % 90 * count + i, count) for i in range(count)]
        self.fleet.forward(parts, seed)

    @precondition(lambda self: self.fleet.pending)
    @rule(which=st.integers(0, 3), seed=SEEDS)
    def backward(self, which, seed):
        self.fleet.backward(seed, which % len(self.fleet.pending))

    @precondition(lambda self: self.fleet.gradients)
    @rule(which=st.integers(0, 3), of_gradient=st.booleans(), is_rounded=st.booleans())
    def update(self, which, of_gradient, is_rounded):
        which %= len(self.fleet.gradients)
        self.fleet.update(which, of_gradient, stochastic_rounding=is_rounded)

    @rule(number=st.integers(0, MOST - 1), what=st.sampled_from(CHANGES), seed=SEEDS)
    def change(self, number, what, seed):
        self.fleet.change(number % len(self.fleet.tables), what, seed)

    @rule()
    def check(self):
        self.fleet.check()

    def teardown(self):
        if hasattr(self, "fleet"):
            self.fleet.check()


class AllTablesByThreads(AllTables):
    def new_backend(self):
        return threads(3)


class AllTablesOnSimt(AllTables):
    def new_backend(self):
        backend = simt.simt_backend()
        backend.chunk_bytes = backend.far_chunk_bytes = CHUNK_BYTES
        return backend

    def teardown(self):
        try:
            super().teardown()
        finally:
            for name in ("chunk_bytes", "far_chunk_bytes"):
                vars(simt.simt_backend()).pop(name, None)


def _settings(examples, steps):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


TestAllTables = AllTables.TestCase
TestAllTables.settings = _settings(5 if QUICK else 30, 12 if QUICK else 20)
TestAllTablesByThreads = AllTablesByThreads.TestCase
TestAllTablesByThreads.settings = _settings(3 if QUICK else 20, 12 if QUICK else 20)
TestAllTablesOnSimt = pytest.mark.full_only("8 s on the simulated GPU")(
    pytest.mark.skipif(
        simt.unavailable() is not None, reason=f"no simulated GPU: {simt.unavailable()}"
    )(AllTablesOnSimt.TestCase)
)
TestAllTablesOnSimt.settings = _settings(6, 8)


@pytest.mark.parametrize("seed", range(4))
def test_a_history_of_many_tables(backend, monkeypatch, seed):
    """Also that what the machines are for comes to pass at all."""
    if seed and simt.is_simulated(backend):
        pytest.skip("so few tables and calls have it all with the first seed alone")
    monkeypatch.setattr(backend, "chunk_bytes", CHUNK_BYTES)
    monkeypatch.setattr(backend, "far_chunk_bytes", CHUNK_BYTES)
    count = sized(backend, MOST, len(KINDS))
    fleet = Fleet(backend, [i % len(KINDS) for i in range(count)])
    play(fleet, seed, sized(backend, 12, 6))
    fleet.check()
    assert fleet.happened >= {
        *("inserted", "evicted", "refused", "not_admitted", "growth", "far rows", "new places"),
        *("update", "erase", "insert_or_assign"),
    }


@pytest.mark.parametrize("count", [1, 2, 3])
def test_large_batches_by_one_two_and_three_threads(count):
    """Pieces of many items, most of them of a few keys."""
    kinds = [number for number, kind in enumerate(KINDS) if "on_refused" not in kind.options]
    fleet = Fleet(threads(count), kinds)
    for seed in range(2):
        parts = [Part(i, 1500, 60 * (i % 2) + 5, "mean", i % 3 == 0) for i in range(len(kinds))]
        fleet.forward(parts, seed)
        fleet.backward(seed)
        fleet.update()
    fleet.check()
