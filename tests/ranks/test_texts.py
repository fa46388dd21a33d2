"""Texts of keys over real ranks: the rank that looked a text up tells all others."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import keras as sk


@pytest.fixture
def table(comm):
    """A table in which each rank has looked up texts of its own, and one that all have."""
    table = sk.Table("city", 2, key_type=str, keep_texts=True)
    table(tf.constant(["all", *texts_of(comm.rank)]), training=True)
    return table


def texts_of(rank):
    return [f"rank {rank}, {i}" for i in range(20)]


def all_texts(comm):
    return sorted([b"all", *(t.encode() for r in range(comm.size) for t in texts_of(r))])


def of_all_ranks(table):
    """The texts of all keys of all ranks, as each rank is told them."""
    keys = table.export()[0]
    every = sok.communication.allgather(keys)
    assert table.texts(keys).shape == keys.shape
    return sorted(table.texts(every).numpy().tolist())


def test_any_rank_finds_any_text(comm, table):
    assert of_all_ranks(table) == all_texts(comm)
    keys = sok.hash_strings(texts_of((comm.rank + 1) % comm.size)) if comm.rank else []
    assert len(table.texts(tf.constant(keys, tf.int64))) == len(keys)


def test_an_error_of_one_rank_is_raised_on_all(comm, table):
    last = comm.rank == comm.size - 1
    with pytest.raises(TypeError, match="int64 keys"):
        table.texts(["Oslo"] if last else [3])
    with pytest.raises(ValueError, match="No rank knows the text of 1 key.*Received: 3"):
        table.texts([3] if last else sok.hash_strings(["all"]))
    np.testing.assert_array_equal(table.texts([3], missing="?"), [b"?"])  # they go together still
