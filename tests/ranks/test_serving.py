"""Exports over real ranks: what rank 0 writes has the keys of all."""

import gc
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.serving import files


@pytest.mark.parametrize("cutoff", [None, 1e-20])
@pytest.mark.parametrize("of", ["all", "one", "none"])
def test_rows_come_in_pieces_whoever_has_them(comm, folder, monkeypatch, of, cutoff):
    """Of all ranks alike, of the last one alone, or of nobody; the last piece is a smaller one."""
    monkeypatch.setattr(files, "PIECE_BYTES", 3001)
    keys = np.random.default_rng(5).integers(-(2**63), 2**63, 997)
    rows = np.arange(997 * 5, dtype=np.float32).reshape(-1, 5) + 1
    rows[::3] = 0
    owner = keys % comm.size if of == "all" else np.full(997, comm.size - 1)
    options = {"mode": f"localized:{comm.size - 1}"} if of == "one" else {}
    table = sok.DynamicVariable(5, initializer="0", name="table", **options)
    if of != "none":
        sok.assign(table, keys[owner == comm.rank], rows[owner == comm.rank])
    static = sok.Variable(rows, name="static", mode=options.get("mode"))

    @tf.function
    def function(ids, numbers):
        return sok.lookup_sparse([table, static], [ids, numbers], combiners=["sum", "sum"])

    specs = [tf.TensorSpec([None, 1], tf.int64, name) for name in ("ids", "numbers")]
    sok.export_serving(function, folder / "m", specs, cutoff=cutoff)
    if comm.rank == 0:
        served = tf.saved_model.load(str(folder / "m"))
        numbers = np.arange(997)[:, None]
        found, by_number = served(tf.constant(keys[:, None]), tf.constant(numbers))
        np.testing.assert_array_equal(found, np.zeros_like(rows) if of == "none" else rows)
        np.testing.assert_array_equal(by_number, rows)
        named = dict(tf.train.list_variables(str(folder / "m" / "variables" / "variables")))
        num_rows, _ = named["sok_table_0_rows/.ATTRIBUTES/VARIABLE_VALUE"]
        kept = 0 if of == "none" else 997 if cutoff is None else 664
        assert num_rows == kept + 2  # and those of missing keys
    comm.barrier()


def test_no_rank_holds_the_rows_of_others(comm, folder, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 400_000)
    table = sok.DynamicVariable(256, initializer="0", name="table")
    own = np.arange(comm.rank, 20_000, comm.size)
    for some in np.array_split(own, 8):
        sok.assign(table, some, np.ones((len(some), 256), np.float32))
    ids = [tf.TensorSpec([None], tf.int64, "ids")]
    gc.collect()
    tracemalloc.start()
    try:
        sok.export_serving(lambda ids: sok.lookup_sparse(table, ids, combiners="sum"), folder, ids)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 20 MB of rows in all. A few pieces, the keys and their order, and what TensorFlow traces.
    assert most < 5.5e6
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
        rows = sok.lookup_sparse(table, ids, combiners="sum")
        return table.contains(ids) if fails else rows

    error = NotImplementedError if fails else RuntimeError
    with pytest.raises(error, match="contains"):
        sok.export_serving(function, folder / "m", [tf.TensorSpec([None], tf.int64, "ids")])
    assert not (folder / "m").exists()  # rank 0 had all of it
    comm.barrier()


def lookup_in(tables):
    return lambda ids: sum(sok.lookup_sparse(each, ids, combiners="sum") for each in tables)


def test_a_table_that_rank_0_alone_cannot_write_fails_on_all(comm, folder):
    """Rank 0 has the rows of all, and looks at them, while the others come to the next table."""
    tables = [sok.DynamicVariable(2, initializer="0", name=f"table_{i}") for i in range(3)]
    for i, table in enumerate(tables):
        sok.assign(table, [comm.rank], [[1e6, 1.0] if i == 1 else [1.0, 1.0]])
    ragged = [tf.RaggedTensorSpec([None, None], tf.int64)]
    with pytest.raises(ValueError, match="'table_1' cannot be quantized"):
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
