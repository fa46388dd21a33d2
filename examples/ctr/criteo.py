"""Reads Criteo's click data: a label, 13 numbers and 26 hexadecimal categories a line.

Two forms are read: Criteo's own (columns separated by tabs, no header), and one with a header,
whose separator is the character after `label` (a comma in a CSV). Any number or category may be
missing, that is, empty. All else that is not as expected is a ValueError with file and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUM_NUMBERS = 13
NUM_CATEGORIES = 26
COLUMNS = (
    "label",
    *(f"I{i}" for i in range(1, NUM_NUMBERS + 1)),
    *(f"C{i}" for i in range(1, NUM_CATEGORIES + 1)),
)
MISSING_KEY = -1  # no hexadecimal category is negative
MAX_HEX_DIGITS = 15  # below 2^60, so that a key is never negative; Criteo writes 8 digits
MAX_NUMBER_LENGTH = 32
BLOCK_BYTES = 1 << 24

_NEWLINE = ord("\n")
_HEX_DIGIT = np.full(256, -1, np.int64)  # -1: not a hexadecimal digit
_HEX_DIGIT[list(b"0123456789abcdef")] = range(16)
_HEX_DIGIT[list(b"ABCDEF")] = range(10, 16)


class Rows(NamedTuple):
    """n rows of a Criteo file."""

    labels: np.ndarray  # (n,) float32, 0 or 1
    numbers: np.ndarray  # (n, 13) float32, NaN where missing
    keys: np.ndarray  # (n, 26) int64, MISSING_KEY where missing

    def take(self, index: slice | np.ndarray) -> Rows:
        """Returns the rows of a slice or of an array of row positions, in its order."""
        return Rows(self.labels[index], self.numbers[index], self.keys[index])

    def save(self, directory: Path) -> None:
        """Writes one .npy file per array into an existing directory."""
        for name, array in self._asdict().items():
            np.save(directory / f"{name}.npy", array)

    @classmethod
    def open(cls, directory: Path) -> Rows:
        """Maps the files of `save`: the ranks of one machine share one copy in memory."""
        return cls(*(np.load(directory / f"{name}.npy", mmap_mode="r") for name in cls._fields))


def read(path: str | Path, max_rows: int | None = None) -> Rows:
    """Reads a whole file, or its first `max_rows` rows.

    Raises:
      ValueError: the file is not as described on top; the message names file, line and column.
    """
    blocks: list[Rows] = []
    missing_rows = float("inf") if max_rows is None else max_rows
    for block in read_blocks(path):
        blocks.append(block.take(slice(None, int(min(missing_rows, len(block.labels))))))
        missing_rows -= len(block.labels)
        if missing_rows <= 0:
            break
    if not blocks:
        raise ValueError(
            f"{path}: expected rows of {len(COLUMNS)} columns, but the file holds none."
        )
    return Rows(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))


def read_blocks(path: str | Path) -> Iterator[Rows]:
    """Yields the rows of a file in order, some ten thousand at a time."""
    with open(path, "rb") as file:
        first = file.readline()
        line = 1
        separator = b"\t"
        if first.startswith(b"label"):
            separator = first[5:6]
            if first.rstrip(b"\r\n").split(separator or b"\t") != [c.encode() for c in COLUMNS]:
                raise ValueError(
                    f"{path}, line 1: expected the header 'label,I1,...,I{NUM_NUMBERS},C1,...,"
                    f"C{NUM_CATEGORIES}' or no header. Received: {_shown(first)}"
                )
            line = 2
            first = b""
        rest = first
        while chunk := file.read(BLOCK_BYTES):
            head, newline, tail = chunk.rpartition(b"\n")
            if not newline:
                rest += chunk
                continue
            yield parse(rest + head + newline, separator, path, line)
            line += 1 + head.count(b"\n") + rest.count(b"\n")
            rest = tail
        whole, newline, cut = rest.rpartition(b"\n")
        if newline:  # a file of one line: it was read as `first`
            yield parse(whole + newline, separator, path, line)
            line += 1
        if cut:
            raise ValueError(
                f"{path}, line {line}: the file ends within this line, in column "
                f"{cut.count(separator) + 1}. Expected {len(COLUMNS)} columns and an end of line. "
                f"Received: {_shown(cut)}"
            )


def parse(text: bytes, separator: bytes, path: str | Path, first_line: int) -> Rows:
    """Parses whole lines; each ends with a newline.

    Args:
      text: the lines.
      separator: one byte, between two columns.
      path: where the lines come from, for messages.
      first_line: number of the first of these lines in that file, from 1.

    Raises:
      ValueError: a line has not 40 columns, a label is not 0 or 1, a number is no number, or a
        category is not hexadecimal.
    """
    text = text.replace(b"\r\n", b"\n")
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((data == ord(separator)) | (data == _NEWLINE))
    num_columns = np.diff(np.flatnonzero(data[ends] == _NEWLINE), prepend=-1)
    wrong = np.flatnonzero(num_columns != len(COLUMNS))
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"{path}, line {first_line + row}: expected {len(COLUMNS)} columns (a label, "
            f"{NUM_NUMBERS} numbers, {NUM_CATEGORIES} categories) separated by "
            f"{separator.decode()!r}, found {num_columns[row]}. "
            f"Received: {_shown(text.splitlines()[row])}"
        )
    starts = np.concatenate([[0], ends[:-1] + 1]).reshape(-1, len(COLUMNS))
    cells = _Cells(data, starts, ends.reshape(-1, len(COLUMNS)) - starts, path, first_line)
    numbers = cells.parse_numbers(slice(0, 1 + NUM_NUMBERS))
    labels = numbers[:, 0]
    cells.check((labels == 0) | (labels == 1), 0, "a label 0 or 1")
    keys = cells.parse_hex(slice(1 + NUM_NUMBERS, None))
    return Rows(labels.astype(np.float32), numbers[:, 1:].astype(np.float32), keys)


class _Cells(NamedTuple):
    """The cells of n lines of text: cell (i, j) is data[starts[i, j]:][:lengths[i, j]]."""

    data: np.ndarray  # (bytes,) uint8
    starts: np.ndarray  # (n, 40) int64
    lengths: np.ndarray  # (n, 40) int64
    path: str | Path
    first_line: int

    def check(self, is_good: np.ndarray, first_column: int, expected: str) -> None:
        """Raises a ValueError about the first cell of (n,) or (n, columns) that is not good."""
        if is_good.all():
            return
        row, column = np.argwhere(~is_good.reshape(len(self.starts), -1))[0]
        column += first_column
        start = self.starts[row, column]
        cell = self.data[start : start + self.lengths[row, column]].tobytes()
        raise ValueError(
            f"{self.path}, line {self.first_line + row}, column {COLUMNS[column]}: "
            f"expected {expected}. Received: {_shown(cell)}"
        )

    def parse_numbers(self, columns: slice) -> np.ndarray:
        """Returns (n, columns) float64, NaN where a cell is empty."""
        starts, lengths = self.starts[:, columns], self.lengths[:, columns]
        expected = "a number or nothing"
        self.check(lengths <= MAX_NUMBER_LENGTH, columns.start, expected)
        width = max(3, int(lengths.max(initial=0)))
        offset = np.arange(width)
        position = np.minimum(starts[..., None] + offset, len(self.data) - 1)
        chars = np.where(offset < lengths[..., None], self.data[position], 0).astype(np.uint8)
        chars[lengths == 0, :3] = np.frombuffer(b"nan", np.uint8)
        texts = chars.view(f"S{width}")[..., 0]
        try:
            values = texts.astype(np.float64)
        except ValueError:
            values = np.array([[_float_or_inf(t) for t in row] for row in texts])
        self.check(np.isfinite(values) | (lengths == 0), columns.start, expected)
        return values

    def parse_hex(self, columns: slice) -> np.ndarray:
        """Returns (n, columns) int64, MISSING_KEY where a cell is empty."""
        starts, lengths = self.starts[:, columns], self.lengths[:, columns]
        expected = f"a hexadecimal category of at most {MAX_HEX_DIGITS} digits or nothing"
        self.check(lengths <= MAX_HEX_DIGITS, columns.start, expected)
        keys = np.zeros(starts.shape, np.int64)
        is_good = np.ones(starts.shape, bool)
        for i in range(int(lengths.max(initial=0))):
            digit = _HEX_DIGIT[self.data[np.minimum(starts + i, len(self.data) - 1)]]
            is_inside = i < lengths
            is_good &= (digit >= 0) | ~is_inside
            keys = np.where(is_inside, keys * 16 + digit, keys)
        self.check(is_good, columns.start, expected)
        keys[lengths == 0] = MISSING_KEY
        return keys


def _float_or_inf(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")  # no cell of a good file is infinite, so the caller can tell


def _shown(text: bytes) -> str:
    """Returns the text as it may stand in a message: quoted, and not too long."""
    return repr(text[:80].decode("utf-8", "replace")) + ("..." if len(text) > 80 else "")
