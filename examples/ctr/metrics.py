"""The area under the ROC curve, and a progress bar."""

from __future__ import annotations

import sys
import time
from typing import TextIO

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns how often a positive scores above a negative; a tie counts one half.

    Args:
      labels: (n,) 0 or 1.
      scores: (n,) any finite numbers.

    Returns:
      The exact area under the ROC curve; NaN where the labels are all the same.
    """
    is_positive = np.asarray(labels) > 0.5
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # equal scores share the mean of their places, counted from 1
    mean_place = np.cumsum(counts) - (counts - 1) / 2
    num_positive = int(is_positive.sum())
    num_negative = len(is_positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    wins = mean_place[inverse][is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(wins / (num_positive * num_negative))


class ProgressBar:
    """A line with a bar, samples per second and the running loss.

    On a terminal the line is rewritten about ten times a second. Elsewhere, as under `horovodrun`,
    which reads what the ranks print, there is one line per tenth of the work.
    """

    def __init__(self, total: int, is_shown: bool = True, stream: TextIO | None = None) -> None:
        """Makes a bar at nothing done.

        Args:
          total: samples in all.
          is_shown: False on every rank but one.
          stream: where to write; standard error unless given.
        """
        self.total = total
        self.done = 0
        self.loss = float("nan")
        self._stream = stream or sys.stderr
        self._is_shown = is_shown
        self._is_terminal = self._stream.isatty()
        self._first = 0  # samples of the first update, which ends at _start_s
        self._start_s = self._shown_s = time.perf_counter()
        self._shown_tenth = 0

    def update(self, num_samples: int, loss: float) -> None:
        """Counts some samples done, with their mean loss."""
        self.done += num_samples
        if self._first == 0:
            self._first, self._start_s = num_samples, time.perf_counter()
        # an average over about the last 50 steps, so that the eye can follow it
        self.loss = loss if self.loss != self.loss else 0.98 * self.loss + 0.02 * loss
        if not self._is_shown:
            return
        now_s = time.perf_counter()
        tenth = 10 * self.done // max(1, self.total)
        is_last = self.done >= self.total
        if self._is_terminal and (is_last or now_s - self._shown_s > 0.1):
            self._stream.write(f"\r{self}" + ("\n" if is_last else ""))
            self._shown_s = now_s
        elif not self._is_terminal and tenth > self._shown_tenth:
            self._stream.write(f"{self}\n")
            self._shown_tenth = tenth
        self._stream.flush()

    @property
    def samples_per_second(self) -> float:
        """Speed since the first update, whose step traces the graph; NaN until the second."""
        if self.done == self._first:
            return float("nan")
        return (self.done - self._first) / max(1e-9, time.perf_counter() - self._start_s)

    def __str__(self) -> str:
        share = self.done / max(1, self.total)
        bar = ("#" * int(30 * share)).ljust(30, ".")
        speed = f"{self.samples_per_second:9,.0f} samples/s"
        return f"training [{bar}] {100 * share:3.0f}% | {speed} | loss {self.loss:.4f}"
