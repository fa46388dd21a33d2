"""Exports over real ranks: what rank 0 writes has the keys of all."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if the program had connected its ranks so."""
    monkeypatch.setattr(job, "_communicator", comm)


def test_an_export_has_the_keys_of_all_ranks(comm, folder):
    keys = np.arange(-30, 31)
    rows = np.stack([keys * 2.0, keys + 0.5], 1).astype(np.float32)
    spread = sok.DynamicVariable(2, initializer="0", name="spread")
    single = sok.DynamicVariable(2, initializer="0", mode="localized:0", name="single")
    own = keys % comm.size == comm.rank
    sok.assign(spread, keys[own], rows[own])
    if comm.rank == 0:
        sok.assign(single, keys, -rows)
    numbers = rows_of_static = np.arange(14, dtype=np.float32).reshape(7, 2)
    static = sok.Variable(rows_of_static, name="static")

    @tf.function
    def function(ids):
        ragged = tf.RaggedTensor.from_tensor(ids[:, None])
        row_numbers = tf.RaggedTensor.from_tensor(tf.abs(ids[:, None]) % 7)
        looked_up = [ragged, ragged, row_numbers]
        first, second, third = sok.lookup_sparse([spread, single, static], looked_up)
        return {"first": first, "second": second, "third": third}

    sok.export_serving(function, folder / "m", [tf.TensorSpec([None], tf.int64, "ids")])
    asked = np.append(keys, [99])
    if comm.rank == 0:
        served = tf.saved_model.load(str(folder / "m"))(tf.constant(asked))
        np.testing.assert_array_equal(served["first"], np.append(rows, [[0, 0]], 0))
        np.testing.assert_array_equal(served["second"], np.append(-rows, [[0, 0]], 0))
        np.testing.assert_array_equal(served["third"], numbers[np.abs(asked) % 7])
    comm.barrier()


def test_publish_has_all_ranks_make_one_version_after_another(comm, folder):
    table, keys = sok.DynamicVariable(2, initializer="0", name="published"), np.arange(20)
    own, ids = keys % comm.size == comm.rank, [tf.TensorSpec([None], tf.int64, "ids")]

    def function(ids):
        return sok.lookup_sparse(table, ids, combiners="sum")

    def publish(number, **options):
        sok.assign(table, keys[own], np.full((own.sum(), 2), number, np.float32))
        return sok.publish(function, folder / "m", signature=ids, **options)

    for number in (1, 2, 3):
        path = publish(number, keep=2)
        assert path == str(folder / "m" / str(number))
        if comm.rank == 0:
            loaded = tf.saved_model.load(path)
            assert (loaded(tf.constant(keys)).numpy() == number).all()
    with pytest.raises((TypeError, ValueError, RuntimeError), match="`keep` must be"):
        publish(4, keep=2 if comm.rank else 0)
    comm.barrier()
    assert sorted(p.name for p in (folder / "m").iterdir() if p.name[0] != ".") == [
        *("2", "3", "latest")
    ]
    comm.barrier()


def test_all_ranks_raise_where_one_cannot_export(comm, folder):
    table = sok.DynamicVariable(2, initializer="0", name="table")
    fails = comm.rank == comm.size - 1

    def function(ids):
        return tf.nn.embedding_lookup(table, ids) if not fails else table.contains(ids)

    error = NotImplementedError if fails else RuntimeError
    with pytest.raises(error, match="contains"):
        sok.export_serving(function, folder / "m", [tf.TensorSpec([None], tf.int64, "ids")])


def lookup_in(tables):
    return lambda ids: sum(sok.lookup_sparse(each, ids, combiners="sum") for each in tables)


def test_a_table_that_rank_0_alone_cannot_write_fails_on_all(comm, folder):
    """Rank 0 has the rows of all, and looks at them, while the others come to the next table."""
    tables = [sok.DynamicVariable(2, initializer="0", name=f"table_{i}") for i in range(3)]
    for i, table in enumerate(tables):
        sok.assign(table, [comm.rank], [[1e6, 1.0] if i == 1 else [1.0, 1.0]])
    ragged = [tf.RaggedTensorSpec([None, None], tf.int64)]
    with pytest.raises(ValueError, match="'table_1' cannot be quantised"):
        sok.export_serving(lookup_in(tables), folder / "m", ragged, quantize="float16")
    assert not (folder / "m").exists()
    # The ranks go on, in the same call.
    keys = tf.RaggedTensor.from_row_splits(np.arange(comm.size), [0, comm.size])
    looked_up = lookup_in(tables[:1])(keys)
    np.testing.assert_array_equal(looked_up, [[comm.size] * 2])


def test_arguments_that_one_rank_alone_has_wrong_fail_on_all(comm, folder):
    table = sok.DynamicVariable(2, initializer="0", name="table")
    is_last = comm.rank == comm.size - 1
    ragged = tf.RaggedTensorSpec([None, None], tf.int64)
    for signature, options, words in [
        ([ragged], {"cutoff": 0.0 if is_last else 1.0}, "`cutoff` must be"),
        (None if is_last else [ragged], {}, "`signature` must say"),
    ]:
        with pytest.raises(ValueError, match=words):
            sok.export_serving(lookup_in([table]), folder / "m", signature, **options)
    assert not (folder / "m").exists()
    comm.barrier()


def test_rank_0_alone_looks_at_the_folder_of_a_graph(comm, folder, tmp_path):
    path = (folder if comm.rank == 0 else tmp_path) / "m"
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(2, initializer="0", name="table")
        session.run(sok.assign(table, [comm.rank], [[1.0, 2.0]]))
        ids = tf.compat.v1.sparse_placeholder(tf.int64, [None, None])
        given = {"inputs": {"ids": ids}, "outputs": {"rows": lookup_in([table])(ids)}}
        if comm.rank > 0:
            (path / "of this rank").mkdir(parents=True)
        sok.export_serving_graph(session, path, **given)
        with pytest.raises(FileExistsError if comm.rank == 0 else OSError, match="is not empty"):
            sok.export_serving_graph(session, path, **given)
    comm.barrier()
