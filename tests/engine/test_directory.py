"""How an index is dealt to segments: sizes, and what takes the place of what."""

import itertools

import numpy as np
import pytest

from sok_lite.engine.table.det_index import _MAX_LOAD_FACTOR, slots_for
from sok_lite.engine.table.directory import SegmentShape, SizePolicy, matching_groups

HBM, HYBRID = SizePolicy(4, 4, 64), SizePolicy(16, 1, 256)
ALL = [HBM, HYBRID, SizePolicy(32, 4, 32), SizePolicy(1024, 1, 1024), SizePolicy(1, 4, 1)]


def hashes_of(shapes):
    """The part of all hashes that each segment has."""
    return [2.0**-shape.depth for shape in shapes]


@pytest.mark.parametrize("sizes", ALL, ids=str)
def test_segments_grow_in_turn_by_a_unit(sizes):
    before, num_slots = None, sizes.granule
    while num_slots < 40 * sizes.min_units * sizes.unit:
        num_slots = sizes.round_up(num_slots)
        shapes = sizes.shapes(num_slots)
        assert sum(shape.slots for shape in shapes) == num_slots
        assert sum(hashes_of(shapes)) == 1
        assert all(shape.slots % sizes.granule == 0 for shape in shapes)
        if len(shapes) > 1:
            assert all(1 <= shape.slots / sizes.unit / sizes.min_units < 2 for shape in shapes)
            loads = [shape.slots << shape.depth for shape in shapes]
            assert max(loads) * sizes.min_units <= min(loads) * (sizes.min_units + 1)
        if before is not None:
            at, changes = 0, 0
            for num_segments, some in matching_groups(before, shapes):
                changes += some != before[at : at + num_segments]
                at += num_segments
            assert len(before) == 1 or changes == 1, "more than one segment has changed"
        before, num_slots = shapes, num_slots + 1


def test_a_size_is_rounded_to_the_next_that_there_is():
    for sizes in ALL:
        for num_slots in range(1, 20 * sizes.min_units * sizes.unit, 7):
            rounded = sizes.round_up(num_slots)
            assert rounded >= num_slots and sizes.round_up(rounded) == rounded
            assert rounded - num_slots < max(sizes.granule, num_slots / sizes.min_units)
    # Those of one segment have few bits.
    rounded = {HBM.round_up(n) for n in range(1, 257)}
    small = [4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert sorted(rounded) == small
    assert sorted({HYBRID.round_up(n) for n in range(1, 513)}) == [16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(("sizes", "least"), [(HBM, 0.54), (SizePolicy(4, 2, 128), 0.45)], ids=str)
def test_no_segment_of_an_hbm_index_is_loaded_above_the_limit(sizes, least):
    last, steps = 0, []
    for num_keys in range(20_000):
        num_slots = slots_for(sizes, num_keys)
        assert num_slots >= last
        if num_slots > last and last:
            steps.append((num_slots - last) / sizes.unit)
        last = num_slots
        shapes = sizes.shapes(num_slots)
        # In each segment there are as many keys as it has hashes.
        loads = [num_keys * 2.0**-shape.depth / shape.slots for shape in shapes]
        assert max(loads) <= _MAX_LOAD_FACTOR
        if num_keys > 1000:
            assert min(loads) > 0.85 * least * sizes.min_units / (sizes.min_units + 1)
            assert num_keys / num_slots > least
    assert max(steps) <= 1, "more than one segment grows for one key"


@pytest.mark.parametrize("seed", range(20))
def test_groups_have_the_same_hashes(seed):
    rng = np.random.default_rng(seed)

    def tree(depth):
        if depth == 6 or rng.random() < 0.4:
            return [SegmentShape(depth, int(rng.integers(1, 9)))]
        return tree(depth + 1) + tree(depth + 1)

    before, after = tree(0), tree(0)
    left, coming = iter(before), []
    for num_segments, shapes in matching_groups(before, after):
        some = list(itertools.islice(left, num_segments))
        assert sum(hashes_of(some)) == sum(hashes_of(shapes))
        assert min(len(some), len(shapes)) == 1
        coming += shapes
    assert coming == after and not list(left)
