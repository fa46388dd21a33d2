"""`Expire`: what `Table.expire` does, while a model is trained."""

import numpy as np
import pytest


def made(keras, sk):
    tables = [sk.Table("first", 2), sk.Table("second", 2)]
    ids = keras.Input([2], dtype="int64")
    rows = [sk.Embedding(table, "sum")(ids) for table in tables]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Add()(rows)))
    model.compile("sgd", "mse")
    return model, tables


def fit(model, *callbacks, epochs=1):
    x = np.arange(12).reshape(6, 2)  # each id in one batch of an epoch
    settings = {"batch_size": 1, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(x, np.ones([6, 1]), callbacks=list(callbacks), **settings)


def test_keys_that_were_not_seen_lately_go_at_the_end_of_each_epoch(keras, sk):
    model, tables = made(keras, sk)
    expire = sk.Expire(num_lookups=2)
    fit(model, expire, epochs=2)
    for table in tables:
        assert table.export()[0].numpy().tolist() == [8, 9, 10, 11]
    assert expire.removed == {"first": 16, "second": 16}  # 8 in each epoch


def test_new_keys_count_where_they_have_expired_before_they_are_told(keras, sk):
    model, _ = made(keras, sk)
    told = sk.TableMetrics()
    fit(model, sk.Expire(num_lookups=2), told, epochs=2)
    # Of the 12 keys of the second epoch 4 were there still.
    assert told.history["first/new_keys"] == [12, 8] and told.history["first/keys"] == [4, 4]


def test_keys_of_chosen_tables_go_every_so_many_batches(keras, sk):
    model, (first, second) = made(keras, sk)
    expire = sk.Expire(num_lookups=1, every=5, tables=first)
    fit(model, expire)
    assert first.export()[0].numpy().tolist() == [8, 9, 10, 11]  # the last batch came behind
    assert (len(second), expire.removed) == (12, {"first": 8})


def test_keys_of_some_time_ago_go(keras, sk):
    model, tables = made(keras, sk)
    fit(model, sk.Expire(seconds=86400))
    assert len(tables[0]) == 12


def test_wrong_arguments_are_refused(sk):
    for arguments, error, reason in (
        ({}, ValueError, "Give `num_lookups` or `seconds`"),
        ({"num_lookups": 1, "seconds": 1}, ValueError, "Give `num_lookups` or `seconds`"),
        ({"seconds": -1}, ValueError, "`seconds` must be 0 or more"),
        ({"days": 3}, TypeError, r"Received: days=3. Give seconds=3 \* 86_400."),
        ({"seconds": 1, "every": 0}, ValueError, "`every` must be at least 1"),
        ({"seconds": 1, "every": 1.5}, TypeError, "`every` must be an integer"),
    ):
        with pytest.raises(error, match=reason):
            sk.Expire(**arguments)
