"""The click data that the example writes for itself."""

import math

import numpy as np
from ctr import planted
from ctr.criteo import MISSING_KEY, NUM_CATEGORIES, read
from ctr.metrics import auc


def test_a_written_file_reads_back_as_it_was_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(planted, "BLOCK_ROWS", 300)
    probabilities = planted.write(tmp_path / "a.tsv", 1000, seed=5)
    rows = read(tmp_path / "a.tsv")
    model, blocks = planted.PlantedModel(5), enumerate((300, 300, 300, 100))
    drawn = zip(*(model.draw(block, n) for block, n in blocks), strict=True)
    labels, expected, numbers, places = map(np.concatenate, drawn)
    np.testing.assert_array_equal(probabilities, expected)
    np.testing.assert_array_equal(rows.labels, labels)
    np.testing.assert_array_equal(rows.numbers, numbers.astype(np.float32))
    for field in range(NUM_CATEGORIES):
        # The same places where the same keys are, and the other way round.
        pairs = set(zip(places[:, field].tolist(), rows.keys[:, field].tolist(), strict=True))
        assert len(pairs) == len({p for p, _ in pairs}) == len({k for _, k in pairs})
    for name, seed in (("b", 5), ("c", 6)):
        planted.write(tmp_path / name, 1000, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in ("a.tsv", "b", "c"))
    assert a == b != c


def test_labels_come_up_as_often_as_their_probabilities_say_in_data_like_criteos(tmp_path):
    probabilities = planted.write(tmp_path / "a.tsv", 20_000, seed=3)
    rows = read(tmp_path / "a.tsv")
    for low in np.arange(0, 1, 0.1):
        picked = (probabilities >= low) & (probabilities < low + 0.1)
        # Five standard deviations of a mean of draws.
        tolerance = 5 * 0.5 / math.sqrt(max(1, picked.sum()))
        assert abs(rows.labels[picked].mean() - probabilities[picked].mean()) < tolerance
    assert 0.15 < rows.labels.mean() < 0.35
    assert 0.75 < auc(rows.labels, probabilities) < 0.85
    assert np.isnan(rows.numbers).any(axis=0).all() and np.nanmin(rows.numbers) == -1
    is_missing = (rows.keys == MISSING_KEY).any(axis=0)
    assert is_missing.any() and not is_missing.all()
    # Zipf: the commonest key of the last field is far more common than an average one.
    _, counts = np.unique(rows.keys[:, -1], return_counts=True)
    assert counts.max() > 100 * counts.mean()
    assert rows.keys.max() >= 2**31, "hexadecimal categories do not fit int32"
