"""Facts about the click data that the example writes for itself."""

import math

import numpy as np
import pytest
from ctr import planted
from ctr.criteo import MISSING_KEY, NUM_CATEGORIES, read
from ctr.metrics import auc


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "a.tsv"
    return path, planted.write(path, 20_000, seed=3)


def test_a_written_file_reads_back_as_it_was_drawn(tmp_path):
    probabilities = planted.write(tmp_path / "a.tsv", 1000, seed=5)
    rows = read(tmp_path / "a.tsv")
    labels, expected, numbers, places = planted.PlantedModel(5).draw(0, 1000)
    np.testing.assert_array_equal(probabilities, expected)
    np.testing.assert_array_equal(rows.labels, labels)
    np.testing.assert_array_equal(rows.numbers, numbers.astype(np.float32))
    for field in range(NUM_CATEGORIES):
        # the same places where the same keys are, and the other way round
        pairs = set(zip(places[:, field].tolist(), rows.keys[:, field].tolist(), strict=True))
        assert len(pairs) == len({p for p, _ in pairs}) == len({k for _, k in pairs})


@pytest.mark.parametrize("num_rows", [0, 1, 33, 101])
def test_as_many_rows_are_written_as_asked_for(tmp_path, monkeypatch, num_rows):
    monkeypatch.setattr(planted, "BLOCK_ROWS", 50)
    probabilities = planted.write(tmp_path / "a.tsv", num_rows, seed=1)
    assert len(probabilities) == num_rows
    assert len((tmp_path / "a.tsv").read_text().splitlines()) == num_rows


def test_the_seed_decides_the_file(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        planted.write(tmp_path / name, 200, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_labels_come_up_as_often_as_their_probabilities_say(written):
    path, probabilities = written
    labels = read(path).labels
    for low in np.arange(0, 1, 0.1):
        picked = (probabilities >= low) & (probabilities < low + 0.1)
        # five standard deviations of a mean of draws
        tolerance = 5 * 0.5 / math.sqrt(max(1, picked.sum()))
        assert abs(labels[picked].mean() - probabilities[picked].mean()) < tolerance


def test_the_data_has_what_criteo_data_has(written):
    path, probabilities = written
    rows = read(path)
    assert 0.15 < rows.labels.mean() < 0.35
    assert 0.75 < auc(rows.labels, probabilities) < 0.85
    assert np.isnan(rows.numbers).any(axis=0).all(), "every number is missing somewhere"
    assert np.nanmin(rows.numbers) == -1
    is_missing = (rows.keys == MISSING_KEY).any(axis=0)
    assert is_missing.any() and not is_missing.all()
    # Zipf: the commonest key of the last field is far more common than an average one
    _, counts = np.unique(rows.keys[:, -1], return_counts=True)
    assert counts.max() > 100 * counts.mean()
    assert rows.keys.max() >= 2**31, "hexadecimal categories do not fit int32"
