"""The AUC and the progress bar of the example."""

import io
import itertools
import math

import numpy as np
import pytest
from ctr.metrics import ProgressBar, auc


def plain_auc(labels, scores):
    """The oracle: every pair of a positive and a negative."""
    positives = [s for s, label in zip(scores, labels, strict=True) if label]
    negatives = [s for s, label in zip(scores, labels, strict=True) if not label]
    wins = sum((p > n) + 0.5 * (p == n) for p, n in itertools.product(positives, negatives))
    return wins / (len(positives) * len(negatives))


@pytest.mark.parametrize("n", [2, 33, 600])
def test_auc_is_the_share_of_pairs_in_order(n):
    for num_scores in (1, 3, 10**9):
        rng = np.random.default_rng(n)
        labels = rng.integers(0, 2, n)
        labels[:2] = 0, 1
        scores = rng.integers(0, num_scores, n).astype(np.float32)
        assert auc(labels, scores) == pytest.approx(plain_auc(labels, scores), abs=1e-12)
    for equal in (labels[:0], labels[:1], np.ones(3)):
        assert math.isnan(auc(equal, np.arange(len(equal))))


def test_a_bar_prints_a_line_per_tenth_in_a_pipe_and_one_on_a_terminal():
    pipe, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for bar in [ProgressBar(1000, stream=stream) for stream in (pipe, terminal)]:
        for _ in range(100):
            bar.update(10, 0.5)
    lines = pipe.getvalue().splitlines()
    assert len(lines) == 10 and "100%" in lines[-1] and "loss 0.5000" in lines[-1]
    shown = terminal.getvalue()
    assert shown.startswith("\r") and shown.endswith("\n") and shown.count("\n") == 1
