"""The reader of Criteo's format, against a plain Python reader."""

import math

import numpy as np
import pytest
from ctr import criteo
from ctr.criteo import COLUMNS, MISSING_KEY, Rows, read

NUMBERS = ["1", "-1", "260", "", "17668", "0", "", "33", "2", "", "0", "12345678", "7"]
CATEGORIES = ["05db9164", "", "ffffffff", "0", "DEADBEEF", *(f"{i:08x}" for i in range(21))]
GOOD = ["0", *NUMBERS, *CATEGORIES]
POSITIVE = ["1", *[""] * 13, *[""] * 26]
HEADER = list(COLUMNS)


def write(path, lines, separator="\t", end="\n"):
    path.write_bytes("".join(separator.join(line) + end for line in lines).encode())
    return path


def plain_read(lines):
    """The oracle: one cell at a time."""
    labels = [float(line[0]) for line in lines]
    numbers = [[float(x) if x else math.nan for x in line[1:14]] for line in lines]
    keys = [[int(x, 16) if x else MISSING_KEY for x in line[14:]] for line in lines]
    return labels, numbers, keys


def assert_rows(rows, lines):
    labels, numbers, keys = plain_read(lines)
    np.testing.assert_array_equal(rows.labels, np.array(labels, np.float32))
    np.testing.assert_array_equal(rows.numbers, np.array(numbers, np.float32).reshape(-1, 13))
    np.testing.assert_array_equal(rows.keys, np.array(keys, np.int64).reshape(-1, 26))
    assert [a.dtype for a in rows] == [np.float32, np.float32, np.int64]


def random_lines(n, seed=0):
    rng = np.random.default_rng(seed)

    def cell(text):
        return "" if rng.random() < 0.2 else text

    return [
        [
            str(rng.integers(2)),
            *(cell(str(rng.integers(-3, 100_000))) for _ in range(13)),
            *(cell(f"{rng.integers(2**32):08x}") for _ in range(26)),
        ]
        for _ in range(n)
    ]


@pytest.mark.parametrize("block_bytes", [1, 100, 313, 1 << 24])
@pytest.mark.parametrize(
    ("head", "separator", "end"),
    [([], "\t", "\n"), ([], "\t", "\r\n"), ([HEADER], ",", "\r\n"), ([HEADER], ";", "\n")],
)
def test_lines_are_read_in_any_blocks_with_a_header_that_names_the_separator_or_without(
    tmp_path, monkeypatch, block_bytes, head, separator, end
):
    monkeypatch.setattr(criteo, "BLOCK_BYTES", block_bytes)
    lines = [GOOD, POSITIVE, *random_lines(38)]
    path = write(tmp_path / "a", [*head, *lines], separator, end)
    assert_rows(read(path), lines)
    for max_rows in (1, 39, 40, 41):
        assert_rows(read(path, max_rows), lines[:max_rows])
    read(path).save(tmp_path)
    picked = np.array([5, 0, 5])
    assert_rows(Rows.open(tmp_path).take(picked), [lines[i] for i in picked])


def test_numbers_may_have_a_point(tmp_path):
    line = ["1.0", "260.0", "1.5", "-1.0", "1e3", *GOOD[5:]]
    assert_rows(read(write(tmp_path / "a.csv", [HEADER, line], ",")), [line])


def test_a_missing_category_is_no_key_of_a_category(tmp_path):
    line = [*GOOD[:14], *["f" * 15] * 13, *["0"] * 12, ""]
    keys = read(write(tmp_path / "a.tsv", [line])).keys[0]
    assert keys[0] == 16**15 - 1
    assert keys[25] == MISSING_KEY
    assert (keys[:25] != MISSING_KEY).all()


def bad(column, text):
    line = list(GOOD)
    line[COLUMNS.index(column)] = text
    return line


BAD_LINES = {
    "39 columns": (GOOD[:-1], r"expected 40 columns .* found 39"),
    "41 columns": ([*GOOD, ""], r"expected 40 columns .* found 41"),
    "an empty line": ([""], r"expected 40 columns .* found 1\b"),
    "a label that is no number": (bad("label", "yes"), r"column label: expected a .* 'yes'"),
    "a label of 2": (bad("label", "2"), r"column label: expected a label 0 or 1.* '2'"),
    "no label": (bad("label", ""), r"column label: expected a label 0 or 1.* ''"),
    "a number that is none": (bad("I7", "12a"), r"column I7: expected a number.* '12a'"),
    "an infinite number": (bad("I7", "inf"), r"column I7: expected a number.* 'inf'"),
    "a written NaN": (bad("I13", "nan"), r"column I13: expected a number.* 'nan'"),
    "a long number": (bad("I1", "1" * 33), r"column I1: expected a number.* '1{33}'"),
    "a category that is not hex": (bad("C1", "05dg9164"), r"column C1: .*hexadecimal.* '05dg9164'"),
    "a sign in a category": (bad("C26", "-1"), r"column C26: .*hexadecimal.* '-1'"),
    "a category of 16 digits": (bad("C3", "0" * 16), r"column C3: .*at most 15 digits.* '0{16}'"),
    "a byte that is no text": (bad("C3", "\u00e9"), r"column C3: .*hexadecimal"),
}


@pytest.mark.cases("what")
@pytest.mark.parametrize("what", BAD_LINES)
@pytest.mark.parametrize("block_bytes", [50, 1 << 24])
def test_a_bad_line_is_named_with_file_line_and_what_was_expected(
    tmp_path, monkeypatch, what, block_bytes
):
    line, message = BAD_LINES[what]
    monkeypatch.setattr(criteo, "BLOCK_BYTES", block_bytes)
    path = write(tmp_path / "bad.tsv", [GOOD, POSITIVE, GOOD, line, GOOD])
    with pytest.raises(ValueError, match=rf"bad\.tsv, line 4\b.*{message}"):
        read(path)
    path = write(tmp_path / "bad.csv", [HEADER, GOOD, line], ",")
    with pytest.raises(ValueError, match=rf"bad\.csv, line 3\b.*{message}"):
        read(path)


def test_a_file_that_ends_within_a_line_is_refused_wherever_it_is_cut(tmp_path):
    path = write(tmp_path / "cut.tsv", [GOOD, POSITIVE, GOOD])
    whole = path.read_bytes()
    for end in range(whole.rindex(b"\n", 0, -1) + 2, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"cut\.tsv, line 3: the file ends within this line"):
            read(path)
    path.write_bytes("\t".join(GOOD[:20]).encode())
    with pytest.raises(ValueError, match=r"line 1: .* in column 20\. Expected 40 columns"):
        read(path)


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("lines", "separator", "text"),
    [
        ([GOOD[:-1], GOOD], "\t", r"a, line 1: expected 40 columns .* found 39"),
        ([], ",", r"a: expected rows of 40 columns"),
        ([HEADER], ",", r"a: expected rows of 40 columns"),
        ([HEADER[:-1], GOOD], ",", r"line 1: expected the header 'label,I1"),
        ([["label"], GOOD], ",", r"line 1: expected the header 'label,I1"),
        ([["label", *HEADER[:0:-1]], GOOD], ",", r"line 1: expected the header 'label,I1"),
        ([GOOD], ",", r"separated by '\\t', found 1\."),
        ([["x" * 100_000]], "\t", "^.{1,600}$"),  # it is shown in part
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, lines, separator, text):
    with pytest.raises(ValueError, match=text):
        read(write(tmp_path / "a", lines, separator))
