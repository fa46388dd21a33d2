"""Files of HierarchicalKV: keys, values and scores, byte by byte."""

import os

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.cli.errors import WrongUse
from sok_lite.cli.importers.hkv import detect, sources, write
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.load import load
from sok_lite.engine.files.source_writer import write_checkpoint
from tests.cli.importers.arrays import CASES, a_table, content, whole
from tests.support.filled_tables import HYBRID
from tests.support.helpers import new_table


def saved(folder, keys, values, scores, names=("keys", "values", "scores")):
    folder.mkdir(exist_ok=True)
    for name, array in zip(names, (keys, values, scores), strict=True):
        (folder / name).write_bytes(array.tobytes())
    return str(folder)


def test_the_bytes_of_the_files(tmp_path):
    source = a_table(2, dim=2, states=False)
    source.arrays |= {
        "keys": np.array([1, -5], np.int64),
        "values": np.array([[0.5, -1.0], [2.0, 0.0]], np.float32),
        "scores": np.array([2**63, 3], np.uint64),
    }
    source.columns = ("scores",)
    write(str(tmp_path / "d"), [source])
    assert {
        name: (tmp_path / "d" / name).read_bytes().hex() for name in os.listdir(tmp_path / "d")
    } == {
        "keys": "0100000000000000fbffffffffffffff",
        "values": "0000003f000080bf0000004000000000",
        "scores": "00000000000000800300000000000000",
    }
    assert detect(str(tmp_path / "d"))
    (again,) = sources(str(tmp_path / "d"), name="t")
    assert content(again) == content(source)


def test_what_is_written_is_read(tmp_path):
    for i, (n, (key_type, dtype)) in enumerate(CASES):
        source, path = a_table(n, key_type, dtype, states=False), str(tmp_path / f"{i}" / "t")
        source.arrays["scores"] = np.arange(n, dtype=np.uint64) + np.uint64(2**64 - 100)
        source.columns = ("scores",)
        os.mkdir(tmp_path / f"{i}")
        write(path, [source])
        wide = key_type if key_type != "int32" else "int64"
        (again,) = sources(path, dim=3, dtype=dtype, key_type=wide)
        assert (again.name, again.dim, again.dtype, again.key_type) == ("t", 3, dtype, wide)
        for column in ("keys", "values", "scores"):
            np.testing.assert_array_equal(whole(again, column), source.arrays[column])
        if n:
            assert sources(path, dtype=dtype, key_type=wide)[0].dim == 3


def test_names_of_files_and_scores_of_32_bits(tmp_path):
    keys, values = np.array([7, 2**64 - 9], np.uint64), np.ones((2, 3), np.float16)
    names = ("emb.k", "emb.v", "emb.s")
    path = saved(tmp_path / "d", keys, values, np.array([1, 2**32 - 1], np.uint32), names)
    assert not detect(path)
    files = dict(zip(("keys", "values", "scores"), names, strict=True))
    files |= {"score_type": "uint32"}
    (source,) = sources(path, dtype="float16", key_type="uint64", **files)
    assert whole(source, "keys").tolist() == [7, 2**64 - 9]
    assert whole(source, "scores").tolist() == [1, 2**32 - 1]
    assert source.dim == 3
    (source,) = sources(path, dtype="float16", **{**files, "scores": ""})
    assert source.columns == () and whole(source, "keys").tolist() == [7, -9]


@pytest.mark.parametrize("strategy", ["kLfu", "kEpochLfu", "kCustomized"])
def test_a_table_of_the_same_strategy_goes_on_with_the_scores(tmp_path, strategy):
    keys, values = np.arange(1, 4), np.arange(6, dtype=np.float32).reshape(3, 2)
    scores = np.array([5 << 32 | 7, 2, 4 << 32 | 9], np.uint64)
    path = saved(tmp_path / "d", keys, values, scores)
    for name, chosen in (("c", strategy), ("none", None)):
        write_checkpoint(tmp_path / name, sources(path, strategy=chosen, name="t"), 1)
        options = HYBRID | {"evict_strategy": strategy}
        table = new_table(get_backend("cpu"), 2, name="t", **options)
        load(tmp_path / name, [table], SingleCommunicator())
        entries = table.index.entries()
        found = dict(zip(entries.keys.tolist(), entries.scores.tolist(), strict=True))
        assert (found == dict(zip([1, 2, 3], scores.tolist(), strict=True))) == (chosen is not None)
        if chosen == "kEpochLfu":
            assert table.index.epoch == 5


def test_scores_of_a_table_that_has_none(tmp_path):
    """HierarchicalKV takes a slot with the score 0 for a free one."""
    source = a_table(3, states=False)
    write(str(tmp_path / "a"), [source])
    assert (tmp_path / "a" / "scores").read_bytes() == np.ones(3, np.uint64).tobytes()
    source.arrays["stamps"] = np.array([0, 1, 2**32 - 1], np.uint32)
    source.columns = ("stamps",)
    write(str(tmp_path / "b"), [source])
    assert (tmp_path / "b" / "scores").read_bytes() == np.array([1, 1, 2**32 - 1]).tobytes()


def test_what_there_is_no_place_for_is_refused(tmp_path):
    with pytest.raises(WrongUse, match=r"no optimizer states.*states=no"):
        write(str(tmp_path / "d"), [a_table(3)])
    write(str(tmp_path / "a"), [a_table(3)], states=False)
    with pytest.raises(WrongUse, match="one table, and there are 2"):
        write(str(tmp_path / "d"), [a_table(3), a_table(3)])
    with pytest.raises(WrongUse, match="int64 or uint64"):
        write(str(tmp_path / "d"), [a_table(3)], states=False, key_type="int32")
    assert not os.path.exists(tmp_path / "d")
    for i, (key, key_type) in enumerate([(-1, "int64"), (-4, "int64"), (2**64 - 4, "uint64")]):
        source = a_table(1, key_type, states=False)
        source.arrays["keys"] = np.array([key], key_type)
        with pytest.raises(WrongUse, match=f"cannot hold key {key}"):
            write(str(tmp_path / f"k{i}"), [source])


def test_a_cut_file_is_named(tmp_path):
    arrays = np.arange(3), np.ones((3, 2), np.float32), np.ones(3, np.uint64)
    path = saved(tmp_path / "d", *arrays)
    for file in (tmp_path / "d" / name for name in ("keys", "values", "scores")):
        data = file.read_bytes()
        for length in range(len(data)):
            file.write_bytes(data[:length])
            with pytest.raises((ValueError, WrongUse), match=r"d/(keys|values|scores) "):
                sources(path, dim=2)
        file.unlink()
        with pytest.raises(FileNotFoundError, match=f"d/{file.name}"):
            sources(path, dim=2)
        file.write_bytes(data)


def test_options_that_do_not_fit(tmp_path):
    for options, error in [
        ({"dim": 3}, r"d/values must have 3 elements of float32 for each of 3 keys.*24 bytes"),
        ({"dim": 0}, "d/values must have 0 elements"),
        ({"dim": -1}, "d/values must have -1 elements"),
        ({"dim": 2**62}, "d/values must have"),
        ({"dtype": "float64", "dim": 2}, "d/values must have 2 elements of float64"),
        ({"values": "keys", "dtype": "int64", "scores": "values"}, ""),
        ({"dtype": "complex64"}, "dtype must be one of"),
        ({"key_type": "int32"}, "int64 or uint64. Received: 'int32'"),
        ({"score_type": "uint32"}, "d/scores must have a score of 4 bytes.*24 bytes"),
        ({"score_type": "int64"}, "score_type must be"),
        ({"strategy": "lru"}, "strategy must be one of kLru"),
    ]:
        arrays = np.arange(3), np.ones((3, 2), np.float32), np.ones(3, np.uint64)
        path = saved(tmp_path / "d", *arrays)
        if not error:
            (source,) = sources(path, **options)
            assert source.dim == 1
            continue
        with pytest.raises((ValueError, WrongUse), match=error):
            sources(path, **options)


def test_an_empty_table_needs_its_dimension(tmp_path):
    path = saved(tmp_path / "d", *(np.empty(0, np.int64),) * 3)
    with pytest.raises(WrongUse, match="give dim="):
        sources(path)
    (source,) = sources(path, dim=5)
    assert (source.num_keys, source.dim) == (0, 5)
    assert whole(source, "values").shape == (0, 5)
