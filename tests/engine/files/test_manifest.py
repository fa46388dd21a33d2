"""The manifest: names of files, what it says, and that nothing of it can change unseen."""

import hashlib
import json
import os
from urllib.parse import unquote

import pytest

from sok_lite._version import __version__
from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest import Manifest, Shard, StateFacts, TableFacts
from sok_lite.engine.files.shard import Written

SHARD = Shard(
    *("data-0123456789abcdef/a-00000-of-00001.safetensors", 2, 1, True, False),
    (StateFacts("states.0.m", "m", 4, 0.5, 1),),
    {"num_lookups": 3, "spans": {"numbers": [1], "times": [2.0], "ends": [2.5]}},
    Written(9, 4, (1, 2, 3)),
)
TABLE = TableFacts("a", "hbm", 4, "float32", "int64", "key mod ranks", {"seed": 0}, (SHARD,))
WHOLE = Manifest(1, {"a": TABLE}, {"step": 7})


INCREMENT = SHARD._replace(
    file="data-00000000000000ff/a-00000-of-00001.safetensors",
    rows=3,
    states=(SHARD.states[0]._replace(before="states.0.m"),),
    changed=1,
    before=(SHARD,),
    removed=5,
)
WITH_INCREMENT = Manifest(1, {"a": TABLE._replace(shards=(INCREMENT,))}, {})


def test_names_keep_apart():
    names = ["a/b", "a_b", "a b", "a.b", "a%2Fb", "A/b", "ä", "a\u0308", "", ".", "..", "\0", "a\n"]
    names += ["x" * 300, "x" * 301, "ü" * 100, "ü" * 101]
    files = [manifest.file_name(name, 0, 1) for name in names]
    assert len(set(files)) == len(names)
    for name, file in zip(names, files, strict=True):
        assert file.isascii() and "/" not in file and "\0" not in file and len(file) < 200
        if len(name) < 30:
            assert unquote(file.removesuffix("-00000-of-00001.safetensors")) == name


def test_a_manifest_has_exactly_this_text():
    state = {"tensor": "states.0.m", "name": "m", "dim": 4, "initial": 0.5, "group": 1}
    spans = {"numbers": [1], "times": [2.0], "ends": [2.5]}
    shard = {
        "file": "data-0123456789abcdef/a-00000-of-00001.safetensors",
        "rows": 2,
        "sighted": 1,
        "scores": True,
        "slots": False,
        "states": [state],
        "facts": {"num_lookups": 3, "spans": spans},
        "written": {"num_bytes": 9, "chunk_bytes": 4, "crcs": [1, 2, 3]},
    }
    table = {
        "name": "a",
        "var_type": "hbm",
        "dim": 4,
        "dtype": "float32",
        "key_type": "int64",
        "owner": "key mod ranks",
        "options": {"seed": 0},
        "shards": [shard],
    }
    whole = {"format": "sok_lite checkpoint", "version": 1, "library": __version__, "ranks": 1}
    whole |= {"extra": {"step": 7}, "tables": [table], "sha256": "0" * 64}
    text = json.dumps(whole, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert manifest.as_text(WHOLE) == text.replace("0" * 64, digest)


def test_what_is_written_is_read(tmp_path):
    manifest.publish(str(tmp_path), manifest.as_text(WHOLE))
    assert manifest.read(str(tmp_path)) == WHOLE
    assert os.listdir(tmp_path) == ["manifest.json"]


def made_whole(folder):
    folder.mkdir(parents=True)
    manifest.publish(str(folder), manifest.as_text(WHOLE))


def unfinished(path):
    (path / "step-0000000009" / "data-0123456789abcdef").mkdir(parents=True)
    return path / "step-0000000009"


@pytest.mark.cases("name")
@pytest.mark.parametrize(
    ("files", "name", "text"),
    [
        ((), "none", "There is no folder {path}. Give the"),
        ((), "", "{path} has no manifest.json: no dump into it was ever"),
        (
            ["m.keras"],
            "m.keras",
            "{path} is a file.* model.load_weights read .*`sok-lite convert",
        ),
        (
            ["rows.npz"],
            "rows.npz",
            "{path} is a file.* formats `sok-lite convert {path} FOLD",
        ),
        (["ckpt-1.index"], "ckpt-1", "{path} has no manifest.json: .*by tf.train.Checkpoint"),
        ((), "step-0000000009", "{path} has no .*: it is unfinished, .*Dump into it once"),
        (
            ["step-0000000003/manifest.json", "step-0000000020/manifest.json"],
            *("step-0000000009", "{path} has no .*: it is unfinished, .*is .*/step-0000000020\\.$"),
        ),
        ((), "of steps", "{path} has no whole save: step-0000000009 is unfinished, .* Train on"),
        (
            ["monday/manifest.json", "tuesday/manifest.json"],
            *("", "{path} has checkpoints in it: .* such as {path}/monday"),
        ),
    ],
)
def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path, files, name, text):
    for file in files:
        if file.endswith(manifest.NAME):
            made_whole((tmp_path / file).parent)
        else:
            (tmp_path / file).write_bytes(b"")
    if files and files[0].startswith("monday"):
        os.utime(tmp_path / files[0], (9e9, 9e9))
    if "unfinished" in text:
        unfinished(tmp_path / name if name == "of steps" else tmp_path)
    path = tmp_path / name
    with pytest.raises(FileNotFoundError, match=text.format(path=path)):
        manifest.read(path)


def test_the_newest_save_is_that_of_most_steps(tmp_path):
    assert manifest.newest_at(str(tmp_path)) == str(tmp_path)
    for number in (999_999_999, 10_000_000_000, 20):  # by number, not by name
        made_whole(tmp_path / f"step-{number:010d}")
    (tmp_path / "step-0000000020" / "step-0000000030").mkdir()
    unfinished(tmp_path)
    made_whole(tmp_path / "step-99")
    assert manifest.newest_at(str(tmp_path)) == str(tmp_path / "step-10000000000")
    inner = str(tmp_path / "step-0000000020")
    assert manifest.newest_at(inner) == inner
    made = manifest.saves_in(tmp_path)
    assert [int(path.rpartition("-")[2]) for path in made] == [20, 999_999_999, 10_000_000_000]
    everything = manifest.all_saves_in(tmp_path)
    assert [path for path, whole in everything.items() if whole] == made
    assert [path for path in everything if path not in made] == [f"{tmp_path}/step-0000000009"]
    (tmp_path / "latest").symlink_to("step-0000000020")
    # Of what it leads to now: it may lead elsewhere before all is read.
    assert manifest.newest_at(f"{tmp_path}/latest") == inner
    manifest.publish(str(tmp_path), manifest.as_text(WHOLE))
    assert manifest.newest_at(str(tmp_path)) == str(tmp_path)


def test_an_increment_has_exactly_these_fields_more():
    assert manifest.from_text(manifest.as_text(WITH_INCREMENT).encode(), "m") == WITH_INCREMENT
    whole, more = (json.loads(manifest.as_text(each)) for each in (WHOLE, WITH_INCREMENT))
    assert (whole["version"], more["version"]) == (1, 2)
    ((old,), (new,)) = (each["tables"][0]["shards"] for each in (whole, more))
    assert new.pop("before") == [old]
    assert (new.pop("changed"), new.pop("removed"), new["rows"]) == (1, 5, 3)
    assert new["states"][0].pop("before") == "states.0.m"
    assert new == old | {"file": INCREMENT.file, "rows": 3}
    assert WITH_INCREMENT.files == [SHARD.file, INCREMENT.file]


def test_an_increment_continues_one_file_with_all_rows():
    for before in [
        (),
        (INCREMENT._replace(before=()),),
        (SHARD, SHARD),
        (SHARD._replace(rows=-1),),
    ]:
        shard = INCREMENT._replace(before=before)
        text = manifest.as_text(Manifest(1, {"a": TABLE._replace(shards=(shard,))}, {}))
        with pytest.raises(ValueError, match="m, a manifest, is corrupt"):
            manifest.from_text(text.encode(), "m")


def test_a_name_like_a_checksum_is_read():
    odd = TABLE._replace(name="0" * 64)
    whole = Manifest(1, {odd.name: odd}, {"0" * 64: "0" * 64})
    assert manifest.from_text(manifest.as_text(whole).encode(), "m") == whole


def test_every_flipped_bit_and_every_cut_is_noticed():
    data = manifest.as_text(WHOLE).encode()
    for i in range(8 * len(data)):
        bad = bytearray(data)
        bad[i // 8] ^= 1 << i % 8
        with pytest.raises(ValueError, match="path/m"):
            manifest.from_text(bytes(bad), "path/m")
    for i in range(len(data)):
        with pytest.raises(ValueError, match="corrupt"):
            manifest.from_text(data[:i], "m")


def test_another_version_is_refused():
    described = json.loads(manifest.as_text(WHOLE))
    described |= {"version": 3, "library": "9.9", "sha256": "0" * 64}
    text = json.dumps(described)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(ValueError, match=r"version 1 or 2\. Received: .* version 3.*'9\.9'"):
        manifest.from_text(text.replace("0" * 64, digest).encode(), "m")


def test_a_manifest_that_lies_is_not_believed():
    for change, to in [
        ('"file": "data-', '"file": "../data-'),
        ("/a-00000", "/../../a-00000"),
        ('"rows": 2', '"rows": -2'),
        ('"rows": 2', '"rows": 2.0'),
        ('"rows": 2', '"rows": 1e999'),
        ('"ranks": 1', '"ranks": 2'),
        ('"dim": 4,\n   "dtype"', '"dim": 0,\n   "dtype"'),
        ('"chunk_bytes": 4', '"chunk_bytes": 4000000000'),
        ('"chunk_bytes": 4', '"chunk_bytes": 0'),
        ('"num_lookups": 3', '"num_lookups": "3"'),
        ('"num_lookups": 3', '"num_lookups": 3, "hash_seed": 33'),
        ('"num_lookups": 3', '"num_lookups": 3, "hash_seed": -32'),
        ('"name": "a"', '"name": 3'),
        ('"changed": 1', '"changed": 4'),
        ('"changed": 1', '"changed": null'),
        ('"removed": 5', '"removed": -1'),
        ('"before": "states.0.m"', '"before": 1'),
        ('"before": "states.0.m"', '"before": "states.0.v"'),
        (
            '"dim": 4,\n       "initial": 0.5,\n       "group": 1,',
            '"dim": 3,\n       "initial": 0.5,\n       "group": 1,',
        ),
        ('"before": [', '"before": 1, "other": ['),
        ('"rows": 2', '"rows": 3, "rows": 2'),
        ('"dtype": "float32"', '"dtype": "float8"'),
        ('"key_type": "int64"', '"key_type": "int16"'),
        ('"initial": 0.5', '"initial": ' + 400 * "9"),
        ('"spans": {', '"spans": [1], "x": {'),
        ('"times": [', '"times": ["soon"], "x": ['),
        ('"ends": [\n        2.5', '"ends": [\n        1.5'),
        ('"ends": [\n        2.5', '"ends": [\n        1e300'),
        ('"ends": [\n        2.5', '"ends": [\n        ' + 400 * "9"),
        ('"numbers": [\n        1', '"numbers": [\n        5'),
        ('"num_lookups": 3', '"num_lookups": 3, "strategy": "kLru"'),
        ('"num_lookups": 3', '"num_lookups": 3, "strategy": "kLru", "epoch": 4294967296'),
        ('"num_lookups": 3', '"num_lookups": 3, "strategy": [], "epoch": 0'),
        ('"num_lookups": 3', '"num_lookups": 3, "capacity": 16'),
    ]:
        text = manifest.as_text(WHOLE)
        if change not in text:
            text = manifest.as_text(WITH_INCREMENT)
        assert change in text
        text = text.replace(change, to)
        stated = json.loads(text)["sha256"]
        text = text.replace(stated, "0" * 64)
        text = text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest())
        with pytest.raises(ValueError, match="m, a manifest, is corrupt"):
            manifest.from_text(text.encode(), "m")


def test_a_manifest_of_many_gigabytes_is_not_read(tmp_path):
    """It would be in memory as a whole, though it were nothing but a hole."""
    path = tmp_path / manifest.NAME
    path.write_text(manifest.as_text(WHOLE))
    os.truncate(path, 5 << 30)
    with pytest.raises(ValueError, match="manifest.json must have at most 1,073,741,824 bytes"):
        manifest.read(tmp_path)


def test_a_manifest_that_is_nested_too_deeply_is_corrupt():
    with pytest.raises(ValueError, match="m, a manifest, is corrupt: .*nested too deeply"):
        manifest.from_text(b"[" * 1_000_000, "m")


def test_two_tables_of_one_name_are_not_believed():
    text = manifest.as_text(Manifest(1, {"a": TABLE, "b": TABLE}, {}))
    with pytest.raises(ValueError, match="m, a manifest, is corrupt: .*table 'a' is there twice"):
        manifest.from_text(text.encode(), "m")
