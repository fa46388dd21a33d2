"""Files of Keras: tables of models that Keras saved, and of files that it would not write."""

import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.files.source import PENDING_COLUMNS
from sok_lite.engine.table.content import take
from sok_lite.engine.table.named_arrays import named_arrays
from sok_lite.reports.tables import report_of
from tests.cli.helpers import CPU, ONE, fine, loaded, run
from tests.support.filled_tables import KINDS, all_of, filled, held
from tests.support.helpers import new_table

h5py = pytest.importorskip("h5py")


def stored(arrays):
    """Arrays as bridge/stored.py writes them."""
    found = {}
    for name, array in arrays.items():
        if isinstance(array, str):
            found[f"{name}_bytes"] = np.frombuffer(array.encode(), np.uint8)
            found[f"{name}_lengths"] = np.array([len(array)])
        else:
            found[name] = array
    return found


def weights(tables, **options):
    """The bytes of HDF5 with groups {name: (name of the layer, {name: array})}."""
    file = io.BytesIO()
    with h5py.File(file, "w") as out:
        out.create_group("vars")
        for place, (layer, arrays) in tables.items():
            group = out.create_group(f"layers/{place}/vars")
            if layer is not None:
                group.attrs["name"] = layer
            for name, array in arrays.items():
                group.create_dataset(name, data=array, **(options if np.size(array) else {}))
    return file.getvalue()


def archive(path, data, **options):
    """A .keras file."""
    with zipfile.ZipFile(path, "w", **options) as out:
        out.writestr("metadata.json", "{}")
        out.writestr("config.json", "{}")
        out.writestr("model.weights.h5", data)


def arrays_of(table, prefix=""):
    return {prefix + name: array for name, array in stored(named_arrays(take(table))).items()}


def shown(command, path, *more):
    return json.loads(fine(command, path, *more, "--json"))["tables"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_what_a_dump_of_it_has(tmp_path, kind):
    table, _ = filled(CPU, 50, name="user", **KINDS[kind])
    table.lookup(np.arange(5))
    archive(tmp_path / "m.keras", weights({"table": ("user", arrays_of(table))}))
    dump(tmp_path / "c", [table], ONE)
    (found,), (expected,) = (shown("inspect", tmp_path / p) for p in ("m.keras", "c"))
    for name in ("name", "keys", "dim", "dtype", "key_type", "columns", "states"):
        assert found[name] == expected[name], name
    fine("convert", tmp_path / "m.keras", tmp_path / "d")
    fine("diff", tmp_path / "c", tmp_path / "d")
    again = new_table(CPU, 3, name="user", **KINDS[kind])
    load(tmp_path / "d", [again], ONE)
    assert all_of(again, with_places=False) == all_of(table, with_places=False)


def test_texts_are_shown(tmp_path):
    arrays = arrays_of(filled(CPU, 2, name="town")[0])
    texts = np.frombuffer(b"OsloRio", np.uint8)
    arrays |= {"text_keys": arrays["keys"], "texts_lengths": np.array([4, 3]), "texts_bytes": texts}
    archive(tmp_path / "m.keras", weights({"table": ("town", arrays)}))
    assert "2 of int64, with the texts of 2\n" in fine("inspect", tmp_path / "m.keras")
    out = fine("plan", tmp_path / "m.keras", "--ranks", 1, "--host-gb", 1)
    assert 'sk.Table("town", 3, key_type=str, keep_texts=True' in out


def test_all_types_are_read(tmp_path):
    for n, dtype, key_type in (
        *((0, "float32", "int64"), (1, "float16", "int32"), (33, "bfloat16", "uint64")),
        *((33, "float16", "uint64"), (33, "bfloat16", "int32"), (33, "float32", "int64")),
    ):
        table, _ = filled(CPU, n, dtype, key_type, name="user")
        whole = weights({"table": ("user", arrays_of(table))})
        archive(tmp_path / "m.keras", whole)
        (tmp_path / "m.weights.h5").write_bytes(whole)  # weights alone
        fine("convert", tmp_path / "m.keras", tmp_path / "d", "--force")
        assert loaded(tmp_path / "d", "user", dtype=dtype, key_type=key_type)[0] == held(table)
        for name in ("m.keras", "m.weights.h5"):
            (report,) = shown("report", tmp_path / name)
            assert report["norms"] == report_of(table).norms.as_dict()
            assert report["keys"] == shown("inspect", tmp_path / name)[0]["keys"] == n


def test_the_ranks_that_saved_it_are_told_apart(tmp_path):
    arrays, tables = {}, []
    for rank in range(3):
        table = new_table(CPU, 2)
        table.lookup(np.arange(10) * 3 + rank if rank else [0])
        tables.append(table)
        arrays |= arrays_of(table, f"rank{rank}of3_")
    archive(tmp_path / "m.keras", weights({"table": ("user", arrays)}))
    report = json.loads(fine("report", tmp_path / "m.keras", "--json"))
    assert (report["ranks"], report["tables"][0]["keys_of_ranks"]) == (3, [1, 10, 10])
    assert report["tables"][0]["keys"] == 21
    del arrays["rank1of3_keys"]
    archive(tmp_path / "less.keras", weights({"table": ("user", arrays)}))
    corrupt(tmp_path / "less.keras", "table 'user' has no 'keys'")
    some = {name: array for name, array in arrays.items() if "rank1" not in name}
    archive(tmp_path / "less.keras", weights({"table": ("user", some)}))
    corrupt(tmp_path / "less.keras", "does not have the parts of all of 3 ranks")


def test_keys_that_were_seen_and_have_no_row_come_along(tmp_path):
    table, _ = filled(CPU, 20, **KINDS["sightings"])
    table.lookup(np.arange(1000, 1007))
    archive(tmp_path / "m.keras", weights({"table": ("user", arrays_of(table))}))
    from sok_lite.cli.importers.keras_file import sources

    (source,) = sources(str(tmp_path / "m.keras"))
    assert source.about.num_pending == 7
    found = {name: np.concatenate(list(source.read(name))) for name in PENDING_COLUMNS}
    content = take(table)
    np.testing.assert_array_equal(found["sighted_keys"], content.pending_keys)
    for name, array in content.pending.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == np.uint32


def test_a_layer_that_has_no_name_of_its_own_is_known_by_its_place(tmp_path):
    arrays = arrays_of(filled(CPU, 4)[0])
    tables = {
        "one": ("t", arrays),
        "two": ("t", arrays),
        "three": (None, arrays),
        "x": ("u", arrays),
    }
    archive(tmp_path / "m.keras", weights(tables | {"dense": ("dense", {"0": np.ones(3)})}))
    names = [table["name"] for table in shown("inspect", tmp_path / "m.keras")]
    assert sorted(names) == ["layers/one", "layers/three", "layers/two", "u"]
    (found,) = shown("report", tmp_path / "m.keras", "--table", "u")
    assert found["name"] == "u"


def corrupt(path, text):
    for command in ("inspect", "report"):
        status, out, err = run(command, path)
        assert (status, out) == (3, "") and err.count("\n") == 1
        assert f"{path} is corrupt, or another kind of file: " in err and text in err


def test_layers_with_arrays_of_their_own_are_left_alone(tmp_path):
    """As those of sok_lite.dynamic_embedding, whose arrays have a prefix."""
    arrays = arrays_of(filled(CPU, 9)[0])
    of_others = {f"rows_{name}": array for name, array in arrays.items()}
    for other in ({"other": ("other", of_others)}, {"dense": ("dense", {"0": np.ones(3)})}):
        archive(tmp_path / "m.keras", weights(other))
        status, _, err = run("report", tmp_path / "m.keras")
        assert status == 2 and "has no table of sok_lite.keras" in err
    archive(
        tmp_path / "both.keras",
        weights({"other": ("other", of_others), "table": ("user", arrays)}),
    )
    (found,) = shown("report", tmp_path / "both.keras")
    assert (found["name"], found["keys"]) == ("user", 9)


def test_what_keras_would_not_write_is_refused(tmp_path):
    arrays, path = arrays_of(filled(CPU, 9)[0]), tmp_path / "m.keras"
    whole = weights({"table": ("user", arrays)})
    archive(path, whole, compression=zipfile.ZIP_DEFLATED)
    corrupt(path, "'model.weights.h5' in it is compressed")
    archive(path, weights({"table": ("user", arrays)}, chunks=True))
    corrupt(path, "does not lie in one piece in it")
    archive(path, weights({"table": ("user", arrays)}, external=[("/etc/passwd", 0, 1 << 20)]))
    corrupt(path, "does not lie in one piece in it")
    for name, array, text in (
        ("keys", np.ones(9), "/keys is of float64, which"),
        ("facts_bytes", np.frombuffer(b"[1]", np.uint8), ""),
        ("facts_bytes", np.zeros((1 << 20) + 1, np.uint8), "1,048,577 bytes"),
        ("facts_bytes", np.frombuffer(b'{"num_lookups": "x"}', np.uint8), "number of lookups"),
        ("states", np.ones((9, 4), np.float32), "its states have 3 columns"),
        (
            "values",
            np.ones((8, 3), np.float32),
            "'values' of table 'user' have shape (8, 3), and keys (9,)",
        ),
        ("sighted_keys", np.int64(3), ""),
    ):
        archive(path, weights({"table": ("user", arrays | {name: array})}))
        corrupt(path, text)
    for size in range(0, len(whole), 97):
        archive(path, whole[:size])
        status, out, err = run("report", path)
        assert status in (2, 3) and out == "" and err.count("\n") == 1, (size, err)


def test_every_byte_of_a_file_may_be_another(tmp_path):
    whole = weights({"table": ("user", arrays_of(filled(CPU, 5)[0]))})
    path = tmp_path / "m.weights.h5"
    for at in range(0, len(whole), 151):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        status, _, err = run("report", path)
        assert status in (0, 2, 3) and err.count("\n") == (status != 0), (at, err)


def test_what_it_needs_is_h5py_alone_and_said_where_missing(tmp_path, monkeypatch):
    archive(tmp_path / "m.keras", weights({"table": ("user", arrays_of(filled(CPU, 4)[0]))}))
    program = (
        "import sys\nfrom sok_lite.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\nassert not {'tensorflow', 'keras'} & sys.modules.keys()"
    )
    arguments = [sys.executable, "-c", program, "report", str(tmp_path / "m.keras")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setitem(sys.modules, "h5py", None)
    status, _, err = run("report", tmp_path / "m.keras")
    assert status == 3 and 'Install it with `pip install "h5py"`.' in err


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_a_model_that_keras_saved_is_reported_as_in_memory(tmp_path, package):
    keras = pytest.importorskip(package)
    import tensorflow as tf

    import sok_lite as sok
    import sok_lite.keras

    sk = sok_lite.keras.classes_for(keras)
    tables = [sk.Table("user", 3), sk.Table("city", 2, key_type=str, row_dtype="bfloat16")]
    tables.append(sk.Table("item", 4, var_type="hybrid", max_capacity=1024))
    inputs = [keras.Input([2], dtype="string" if i == 1 else "int64") for i in range(3)]
    pooled = [sk.Embedding(tables[i], "sum")(inputs[i]) for i in range(3)]
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(pooled))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    ids = np.random.default_rng(0).integers(0, 30, (20, 2))
    texts = tf.strings.as_string(ids)
    model.fit([tf.constant(ids), texts, tf.constant(ids)], tf.ones([20, 1]), verbose=0)
    expected = sok.report(tables).as_dict()["tables"]
    for name, save in (("m.keras", model.save), ("m.weights.h5", model.save_weights)):
        save(tmp_path / name)
        found = shown("report", tmp_path / name)
        assert len(found) == 3
        of_dim = {table["dim"]: table for table in found}
        for own in expected:
            for fact in ("dtype", "key_type", "var_type", "keys", "norms", "ages"):
                assert of_dim[own["dim"]][fact] == own[fact], (name, fact)
            assert package == "tf_keras" or of_dim[own["dim"]]["name"] == own["name"]
