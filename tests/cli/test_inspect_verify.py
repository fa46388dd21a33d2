"""What is shown of a checkpoint, and what is found wrong with it."""

import json
import os
import re

import numpy as np
import pytest

from sok_lite.cli.importers import names_with
from sok_lite.cli.reading import open_sources
from sok_lite.comm import run_ranks
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.source import Source
from sok_lite.engine.files.source_writer import write_checkpoint
from sok_lite.engine.initializer import Initializer
from sok_lite.engine.owner import FunctionOfKeys
from sok_lite.engine.table import make_table
from tests.cli.helpers import CPU, NAMES, ONE, dumped, fine, optimized, run
from tests.support.filled_tables import KINDS, some_keys
from tests.support.helpers import new_table


def test_what_is_there_is_shown(tmp_path):
    keys = some_keys(50)
    optimized(tmp_path / "c", keys, 4, ranks=2)
    text, before = fine("inspect", tmp_path / "c"), {*(tmp_path / "c").rglob("*")}
    fine("verify", tmp_path / "c")
    assert {*(tmp_path / "c").rglob("*")} == before  # nothing is written
    for part in ("2 ranks, 1 table, ", "table 'table'", "keys      50 of int64, ", " on a rank",
                 "rows      3 of float32", "m of 3 (optimizer 1)", "v of 1 (0.5 in new rows, opt",
                 "acc of 3 (1 in new rows, optimizer 2)", "owner of a key: key mod ranks", "seed=0",
                 "\noptimizer steps: 4\n"):  # fmt: skip
        assert part in text, part
    shown = json.loads(fine("inspect", tmp_path / "c", "--json"))
    assert (shown["format"], shown["ranks"], shown["extra"]) == ("sok_lite", 2, {"iterations": [4]})
    (table,) = shown["tables"]
    assert (table["keys"], sum(table["keys_of_ranks"]), table["dim"]) == (50, 50, 3)
    assert {"name": "acc", "dim": 3, "initial": 1.0, "group": 2} in table["states"]
    sizes = [path.stat().st_size for path in files_of(tmp_path / "c")]
    assert shown["bytes"] == table["bytes"] == sum(sizes)


def test_what_ours_wrote_is_shown_in_words(tmp_path):
    place = {"epoch": 2, "batch": 0, "steps": 40, "dense": "dense/x"}
    dumped(tmp_path / "c", 3, extra={"sok_lite.keras": place, "mine": [1]})
    text = fine("inspect", tmp_path / "c")
    assert '\ntraining: step 40, 2 complete epochs\nextra: {"mine": [1]}\n' in text
    kinds = {"normal": "RandomNormal(0, 0.5)", "uniform": "RandomUniform(0, 0.5)"}
    for kind, shown in (kinds | {"constant": "Constant(0)"}).items():
        table = make_table("hbm", CPU, 2, name="t", initializer=Initializer(kind, 0.0, 0.5))
        dump(tmp_path / kind, [table], ONE)
        assert f"initializer={shown}\n" in fine("inspect", tmp_path / kind)


def test_what_may_have_no_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "device.npz").symlink_to("/dev/zero")
    for path in tmp_path.iterdir():
        for name in (None, *names_with("sources")):
            with pytest.raises(OSError, match="Not a regular file"):
                open_sources(str(path), name)
        status, _, err = run("inspect", path)
        assert status == 3 and err == f"sok-lite inspect: {path}: Not a regular file\n"


def test_some_tables_are_shown_with_their_time_and_what_was_only_seen(tmp_path):
    table = new_table(CPU, 3, name=NAMES[1], **KINDS["sightings"])
    table.lookup([1, 2, 3])
    dump(tmp_path / "c", [table, new_table(CPU, 2)], ONE)
    text = fine("inspect", tmp_path / "c", "--table", NAMES[1])
    assert re.search(r"lookups   1, the last one at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC", text)
    assert "keys      0 of int64, 3 more seen, without a row yet" in text
    assert "table 'it/em, ä\\n'" in text and "'table'" not in text
    status, _, err = run("inspect", tmp_path / "c", "--table", "x")
    assert status == 2 and "has no table 'x'; it has: 'it/em, ä\\n', 'table'" in err
    assert json.loads(fine("inspect", tmp_path / "c", "--json"))["tables"][1]["last_lookup"] is None


def files_of(folder):
    return sorted(folder.rglob("*.safetensors"))


def change(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def findings(folder):
    status, out, err = run("verify", folder)
    assert (status, err) == (1, "")
    *lines, last = out.splitlines()
    assert last == f"{len(lines)} finding" + "s" * (len(lines) != 1)
    return lines


def test_a_whole_checkpoint_has_no_findings(tmp_path):
    dumped(tmp_path / "c", 50)
    assert "is whole: 2 tables, 100 keys" in fine("verify", tmp_path / "c")
    fine("reshard", tmp_path / "c", tmp_path / "d", "--ranks", 3)
    fine("verify", tmp_path / "d")
    dumped(tmp_path / "e", 0)
    fine("verify", tmp_path / "e")


def test_every_wrong_chunk_is_named(tmp_path):
    dumped(tmp_path / "c", 50, names=["user"])
    (path,) = files_of(tmp_path / "c")
    num_chunks = -(-path.stat().st_size // 200)
    whole = path.read_bytes()
    for number in range(num_chunks):
        change(path, 200 * number)
        (finding,) = findings(tmp_path / "c")
        assert finding.startswith(
            f"{path}: table 'user', chunk {number} of {num_chunks}, 200 bytes"
        )
        path.write_bytes(whole)
    change(path, 450)
    change(path, path.stat().st_size - 1)
    assert [re.search(r"chunk (\d+)", line)[1] for line in findings(tmp_path / "c")] == [
        "2",
        str(num_chunks - 1),
    ]


def test_files_that_are_short_or_gone_are_found_all_at_once(tmp_path):
    dumped(tmp_path / "c", 50)
    fine("reshard", tmp_path / "c", tmp_path / "d", "--ranks", 3)
    one, two, *_, last = files_of(tmp_path / "d")
    one.unlink()
    os.truncate(two, 100)
    with open(last, "ab") as file:
        file.write(b"x")
    gone, short, long = sorted(findings(tmp_path / "d"))
    assert gone == f"{one}: table {NAMES[1]!r}: the file is missing"
    assert re.fullmatch(
        re.escape(f"{two}: table {NAMES[1]!r}: it has 100 bytes and not ") + ".*", short
    )
    assert long.startswith(f"{last}: table 'user': it has ")


def test_a_manifest_that_is_corrupt_is_found(tmp_path):
    dumped(tmp_path / "c", 3)
    path = tmp_path / "c" / "manifest.json"
    path.write_text(path.read_text().replace('"dim": 3', '"dim": 4'))
    status, out, _ = run("verify", tmp_path / "c")
    assert status == 1 and "its SHA-256 is not the one that it names" in out
    path.unlink()
    status, _, err = run("verify", tmp_path / "c")
    assert status == 3 and "it is unfinished, was ended or is being written" in err
    dumped(tmp_path / "c", 3, names=["user"])
    for each in (*files_of(tmp_path / "c"), path):
        each.unlink()
        os.mkfifo(each)  # which nobody waits for
        for command in ("verify", "inspect")[: 1 + (each == path)]:
            status, out, err = run(command, tmp_path / "c")
            assert (status, out) == (3, "") and f"{each}: Not a regular file" in err


def rewritten(folder, change_shards):
    """Gives a checkpoint another manifest, with its own checksum."""
    found = manifest.read(folder)
    tables = {
        name: facts._replace(shards=change_shards(facts.shards))
        for name, facts in found.tables.items()
    }
    manifest.publish(folder, manifest.as_text(found._replace(tables=tables)))


@pytest.mark.parametrize("key_type", ["int64", "uint64", "int32"])
def test_keys_in_files_of_other_ranks_are_found(tmp_path, key_type):
    dumped(tmp_path / "c", 20, names=["user"], key_type=key_type)
    fine("reshard", tmp_path / "c", tmp_path / "d", "--ranks", 2)
    rewritten(tmp_path / "d", lambda shards: shards[::-1])
    one, two = findings(tmp_path / "d")
    one_file, two_file = files_of(tmp_path / "d")
    # The manifest has the files the other way round: that of rank 1 has the even keys.
    assert re.match(
        re.escape(f"{two_file}: table 'user': ") + r"\d+ keys owned by other ranks than 0", one
    )
    assert re.match(
        re.escape(f"{one_file}: table 'user': ") + r"\d+ keys owned by other ranks than 1", two
    )
    counts = [int(re.search(r": (\d+) keys", line)[1]) for line in (one, two)]
    assert sum(counts) == 20 and "by key mod ranks: " in one and one.endswith(", ...")


@pytest.mark.parametrize("num_bytes", [64 << 20, 100])
def test_keys_that_are_there_twice_are_found(tmp_path, monkeypatch, num_bytes):
    monkeypatch.setattr("sok_lite.cli.buckets.BUCKET_BYTES", num_bytes)
    dumped(tmp_path / "c", 20, names=["user"])
    fine("reshard", tmp_path / "c", tmp_path / "d", "--ranks", 2)
    rewritten(tmp_path / "d", lambda shards: (shards[0], shards[0]))
    foreign, twice = findings(tmp_path / "d")
    assert "owned by other ranks than 1" in foreign
    count = manifest.read(tmp_path / "d").tables["user"].shards[0].rows
    start = f"{tmp_path / 'd'}: table 'user': {count} keys are repeated: "
    assert twice.startswith(start)
    assert re.match(r"-?\d+ in rank 0 and rank 1, ", twice[len(start) :])


class Twice(Source):
    name, dim, dtype, key_type, num_keys = "x", 1, "float32", "int64", 3

    def read(self, column):
        keys = np.array([4, 6, 4])
        yield keys if column == "keys" else keys.astype(np.float32)[:, None]


def test_a_key_that_is_twice_in_one_file_is_found(tmp_path):
    write_checkpoint(tmp_path / "c", [Twice()])
    (finding,) = findings(tmp_path / "c")
    assert finding == f"{tmp_path / 'c'}: table 'x': 1 key is repeated: 4 in rank 0"
    # A number of keys that cannot be takes no time.
    dumped(tmp_path / "d", 50, names=["user"])
    rewritten(tmp_path / "d", lambda shards: [s._replace(rows=1 << 60) for s in shards])
    (file,) = files_of(tmp_path / "d")
    assert any(line.startswith(f"{file}: table 'user'") for line in findings(tmp_path / "d"))


def test_a_manifest_that_lies_is_told_in_one_line(tmp_path):
    dumped(tmp_path / "c", 3, names=["user"])
    found, path = manifest.read(tmp_path / "c"), tmp_path / "c" / "manifest.json"
    tables = {"user": found.tables["user"]._replace(dtype="float8")}
    manifest.publish(tmp_path / "c", manifest.as_text(found._replace(tables=tables)))
    said = f"{path}, a manifest, is corrupt: "
    for command, *more in (
        ("inspect",),
        ("export", "--format", "npz", "--to", tmp_path / "f"),
        ("merge", tmp_path / "d"),
    ):
        status, out, err = run(command, tmp_path / "c", *more)
        assert (status, out, err.count("\n")) == (3, "", 1)
        assert said in err and "must be one of" in err
    status, out, err = run("verify", tmp_path / "c")
    assert (status, err) == (1, "") and said in out and "must be one of" in out


def test_owners_that_a_function_says_are_not_looked_at(tmp_path):
    def program(comm):
        rule = FunctionOfKeys("f", lambda keys, size: keys * 0)
        dump(tmp_path, [new_table(CPU, 3, owner=rule)], comm)

    run_ranks(2, program)
    assert "owners of keys were not checked: function 'f'" in fine("verify", tmp_path)
