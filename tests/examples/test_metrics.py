"""Facts about the AUC and the progress bar of the example."""

import io
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from ctr.metrics import ProgressBar, auc


def plain_auc(labels, scores):
    """The oracle: every pair of a positive and a negative."""
    positives = [s for s, label in zip(scores, labels, strict=True) if label]
    negatives = [s for s, label in zip(scores, labels, strict=True) if not label]
    wins = sum((p > n) + 0.5 * (p == n) for p, n in itertools.product(positives, negatives))
    return wins / (len(positives) * len(negatives))


@pytest.mark.parametrize("n", [2, 31, 33, 1000])
@pytest.mark.parametrize("num_scores", [1, 3, 10**9])
def test_auc_is_the_share_of_pairs_in_order(n, num_scores):
    rng = np.random.default_rng(n)
    labels = rng.integers(0, 2, n)
    labels[:2] = 0, 1
    scores = rng.integers(0, num_scores, n).astype(np.float32)
    assert auc(labels, scores) == pytest.approx(plain_auc(labels, scores), abs=1e-12)


def test_auc_of_a_perfect_and_of_a_reversed_order():
    labels = np.array([0, 0, 1, 1, 1])
    assert auc(labels, np.arange(5)) == 1
    assert auc(labels, -np.arange(5)) == 0


@pytest.mark.parametrize("labels", [[], [0], [1], [1, 1, 1]])
def test_auc_of_equal_labels_is_not_a_number(labels):
    assert math.isnan(auc(np.array(labels), np.arange(len(labels))))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_in_a_pipe_prints_a_line_per_tenth():
    stream = io.StringIO()
    progress = ProgressBar(1000, stream=stream)
    for _ in range(100):
        progress.update(10, 0.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert "100%" in lines[-1] and "samples/s" in lines[-1] and "loss 0.5000" in lines[-1]


def test_a_bar_on_a_terminal_stays_on_one_line():
    stream = Terminal()
    progress = ProgressBar(1000, stream=stream)
    for _ in range(100):
        progress.update(10, 0.5)
    assert stream.getvalue().startswith("\r")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("\n")


def test_the_loss_of_a_bar_is_a_running_one():
    progress = ProgressBar(1000, stream=io.StringIO())
    progress.update(1, 1.0)
    assert progress.loss == 1.0
    progress.update(1, 0.0)
    assert 0.9 < progress.loss < 1.0
    for _ in range(500):
        progress.update(1, 0.0)
    assert progress.loss < 1e-3


def test_the_speed_leaves_the_first_update_out(monkeypatch):
    now_s = iter(range(0, 1000, 10))
    monkeypatch.setattr("ctr.metrics.time", SimpleNamespace(perf_counter=lambda: next(now_s)))
    progress = ProgressBar(1000, is_shown=False)
    progress.update(500, 0.5)
    assert math.isnan(progress.samples_per_second)
    progress.update(60, 0.5)
    # the clock goes on by 10 s whenever it is read: first update, then here
    assert progress.samples_per_second == pytest.approx(60 / 10)


def test_a_bar_of_another_rank_prints_nothing():
    stream = io.StringIO()
    progress = ProgressBar(10, is_shown=False, stream=stream)
    progress.update(10, 0.5)
    assert stream.getvalue() == ""
