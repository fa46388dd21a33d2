"""TensorFlow's checkpoints of TFRA's tables, written by the real TFRA."""

import os
import shutil

import pytest

from sok_lite.cli.importers import tfra_checkpoint
from tests.cli.recorded import FOLDER, check, rows_of

OBJECTS = FOLDER / "checkpoint_of_tensorflow" / "saved"
SAVER = FOLDER / "checkpoint_of_a_graph" / "saved-7"


def test_what_tfra_wrote_is_what_tfra_says_is_there():
    for ending in ("", ".index"):
        path = f"{OBJECTS}{ending}"
        assert tfra_checkpoint.detect(path)
        slots = {f"ck/emb/ck/emb-shadow/{state}": (state, 0.0) for state in "mv"}
        check(tfra_checkpoint.sources(path), "checkpoint_of_tensorflow", slots)
    slots = {f"v1_emb_Adam_{state}": (state, 0.0) for state in "mv"}  # of a Saver of TF1
    check(tfra_checkpoint.sources(SAVER), "checkpoint_of_a_graph", slots, "_")


def test_some_tables_under_other_names():
    (source,) = tfra_checkpoint.sources(OBJECTS, tables="pair", names="pair=a/b")
    assert (source.name, source.states) == ("a/b", ())
    with pytest.raises(ValueError, match="no table 'x'. It has: 'ck/emb', .*'none', 'pair'"):
        tfra_checkpoint.sources(OBJECTS, tables="x,pair")


def rewritten(path, to, change):
    """Writes a checkpoint anew with some tensors changed."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(path))
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    change(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(to),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    return to


SHARD = "other/tables_of_pair/{}/.ATTRIBUTES/table-{}"


def without_first(tensors):
    for what in ("keys", "values"):
        del tensors[SHARD.format(0, what)]


def without_last(tensors):
    for what in ("keys", "values"):
        del tensors[f"m/v1_emb_Adam_m_mht_2of2-{what}"]


def shorter(tensors):
    tensors[SHARD.format(1, "keys")] = tensors[SHARD.format(1, "keys")][:-1]


def narrower(tensors):
    tensors[SHARD.format(1, "values")] = tensors[SHARD.format(1, "values")][:, :1]


def twice(tensors):
    for what in ("keys", "values"):
        tensors["again/" + SHARD.format(0, what)] = tensors[SHARD.format(0, what)]


def no_tables(tensors):
    for name in [name for name in tensors if "table" in name]:
        del tensors[name]


REFUSED = [
    (OBJECTS, without_first, "not all shards of table 'pair'. Expected 2"),
    (SAVER, without_last, "not all shards of table 'v1_emb_Adam_m'. Expected 2"),
    (OBJECTS, shorter, r"corrupt: '.*pair/1.*-keys' has shape \[4\] and .* \[5, 2\]"),
    (OBJECTS, narrower, "corrupt: the shards of table 'pair' differ"),
    (OBJECTS, twice, "several tables 'pair'"),
    (OBJECTS, no_tables, "no tables of TFRA.*FileSystemSaver"),
]


def test_what_is_refused(tmp_path):
    for path, change, text in REFUSED:
        changed = rewritten(path, tmp_path / change.__name__, change)
        with pytest.raises(ValueError, match=text):
            tfra_checkpoint.sources(changed)
        assert tfra_checkpoint.detect(changed) == (change is not no_tables)


def test_files_that_are_cut_or_missing(tmp_path):
    assert not tfra_checkpoint.detect(tmp_path)
    with pytest.raises(FileNotFoundError, match="saved.index"):
        tfra_checkpoint.sources(tmp_path / "saved")
    for each in OBJECTS.parent.iterdir():
        shutil.copy(each, tmp_path)
    data = tmp_path / "saved.data-00000-of-00001"
    os.truncate(data, data.stat().st_size - 2000)
    with pytest.raises(ValueError, match=r"corrupt: (.|\n)*Take another"):
        for source in tfra_checkpoint.sources(tmp_path / "saved"):
            rows_of(source)
    (tmp_path / "saved.index").write_bytes(b"no index at all" * 10)
    with pytest.raises(ValueError, match="saved is corrupt"):
        tfra_checkpoint.sources(tmp_path / "saved")


def test_names_are_unescaped():
    for escaped, name in (("a.Sb-c..d...Se", "a/b-c.d./e"), ("a_b:0", "a_b:0")):
        assert tfra_checkpoint._unescape(escaped) == name
