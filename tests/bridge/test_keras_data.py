"""What the fingerprint of data sees: which ranks of `fit` train the same rows."""

import numpy as np
import tensorflow as tf

from sok_lite.bridge.keras.data import data_fingerprint, fingerprint


def arrays(num_rows):
    """Ids, texts and numbers, no two rows alike."""
    ids = np.arange(num_rows * 2).reshape(num_rows, 2)
    texts = np.array([f"text {i}" for i in range(num_rows)], object)
    return [ids, texts, ids[:, 0] / 7]


def test_equal_arrays_have_one_fingerprint_and_another_row_gives_another():
    for num_rows in (1, 6, 999, 1500):
        first, again = fingerprint(*arrays(num_rows)), fingerprint(*arrays(num_rows))
        assert first.tolist() == again.tolist()
        assert first[0] >= 0 and first[1] == num_rows
    for which in range(3):
        for place in (0, 777, 1499):
            other = arrays(1500)
            other[which][place] = -1
            assert fingerprint(*other)[0] != first[0]


def test_of_long_arrays_some_rows_are_looked_at_and_their_number():
    class Long:
        """An array of a million rows, of which the rows that are read are counted."""

        shape, read = (1_000_000, 2), 0

        def __len__(self):
            return self.shape[0]

        def __getitem__(self, rows):
            numbers = np.arange(self.shape[0])[rows]
            self.read += len(numbers)
            return np.stack([numbers, numbers], 1)

    long, longer = Long(), Long()
    longer.shape = (1_000_001, 2)
    assert fingerprint(long)[0] != fingerprint(longer)[0]
    assert 1000 <= long.read < 2000


def test_rows_that_repeat_count_once():
    assert fingerprint(np.zeros((50, 3)), np.arange(50) % 4)[1] == 4


def test_what_is_no_arrays_has_the_fingerprint_of_nothing():
    data = tf.data.Dataset.range(3)
    assert data_fingerprint([data, None]).tolist() == [-1, 0]
    tensors = [tf.range(9), {"a": np.arange(9)}]
    assert (
        data_fingerprint(tensors).tolist()
        == fingerprint(np.arange(9, dtype=np.int32), np.arange(9)).tolist()
    )
