"""The sort of a GPU, on a real one and in many orders on the simulated one, against NumPy's."""

import numpy as np
import pytest

from sok_lite.engine import sort
from sok_lite.engine.sort import sort_items
from tests.support.helpers import sized
from tests.support.simt import runtime
from tests.support.simt.backend import is_simulated

# A CPU counts items instead.
pytestmark = pytest.mark.parametrize("backend", ["simt", "cuda"], indirect=True)
TILE = 64


@pytest.fixture(autouse=True)
def small_tiles(backend, monkeypatch):
    """Few items have several tiles: each looks back at those before."""
    monkeypatch.setattr(sort, "_LEAST_TILE_ITEMS", TILE)
    monkeypatch.setattr(sort, "_TILES", 16)
    yield
    if is_simulated(backend):
        runtime.set_stale_loads(0)


def assert_sorted(backend, labels, num_labels):
    items, by_label = sort_items(backend, backend.from_host(labels), num_labels)
    expected = np.argsort(labels, kind="stable")
    assert items.dtype == by_label.dtype == np.int32
    np.testing.assert_array_equal(backend.to_host(items), expected)
    np.testing.assert_array_equal(backend.to_host(by_label), labels[expected])


@pytest.mark.parametrize("n", [1, 31, 33, TILE - 1, TILE, TILE + 1, 5 * TILE + 3])
@pytest.mark.parametrize("num_labels", [1, 2, 512, 513, 2**18 + 1, 2**28, 2**31])
def test_items_are_sorted_by_their_labels_and_keep_their_order(backend, n, num_labels):
    rng = np.random.default_rng(n)
    labels = rng.integers(0, num_labels, n).astype(np.int32)
    labels[rng.random(n) < 0.5] = num_labels // 2  # most repeat
    labels[-1] = num_labels - 1
    assert_sorted(backend, labels, num_labels)


@pytest.mark.parametrize("label", [0, 300, 2**28 - 1])
def test_items_of_one_label_stay_where_they_are(backend, label):
    assert_sorted(backend, np.full(5 * TILE, label, np.int32), 2**28)


@pytest.mark.parametrize("block_size", [32, 64, 96, 256, 1024])
@pytest.mark.parametrize("loads", ["fresh", "stale"])
def test_any_order_of_lanes_and_blocks_sorts_alike(backend, block_size, loads):
    """Also one block at a time, in any order: no tile waits for one that nobody has begun."""
    backend = backend.for_table(block_size=block_size)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 600, 6 * TILE).astype(np.int32)
    for seed in range(sized(backend, 1, 8)):
        if is_simulated(backend):
            runtime.set_seed(seed)
            runtime.set_stale_loads(loads == "stale")
        assert_sorted(backend, labels, 600)


@pytest.mark.parametrize("n", [100_003, 1 << 20])
def test_many_items_have_tiles_of_the_usual_size(backend, monkeypatch, n):
    if is_simulated(backend):
        n = n % 5000 + 4000
    monkeypatch.undo()
    rng = np.random.default_rng(1)
    assert_sorted(backend, (rng.zipf(1.2, n) % n).astype(np.int32), n)
