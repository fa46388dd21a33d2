"""`sok-lite report`: of a checkpoint what `sok.report` says of the tables that wrote it."""

import json
import os

import numpy as np

from sok_lite.comm import run_ranks
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.reports.tables import report_of
from tests.cli.helpers import CPU, NAMES, ONE, dumped, fine, run
from tests.support.filled_tables import KINDS, filled
from tests.support.helpers import new_table


def shown(*arguments):
    return json.loads(fine("report", *arguments, "--json"))


def test_the_numbers_are_those_of_the_table(tmp_path):
    for kind, options in KINDS.items():
        table, _ = filled(CPU, 100, **options)
        table.lookup(np.arange(5))
        dump(tmp_path / kind, [table], ONE)
        (found,) = shown(tmp_path / kind)["tables"]
        expected = report_of(table).as_dict()
        for name in ("name", "dim", "dtype", "key_type", "keys", "pending", "norms", "ages"):
            assert found[name] == expected[name], (kind, name)
        assert found["memory"]["values"] == table.size * 12


def test_the_ranks_that_wrote_it_are_told_apart(tmp_path):
    def program(comm):
        table = new_table(CPU, 2)
        table.lookup(np.arange(10) * comm.size + comm.rank if comm.rank else [0])
        dump(tmp_path / "c", [table], comm)

    run_ranks(3, program)
    found = shown(tmp_path / "c")
    assert (found["ranks"], found["tables"][0]["keys_of_ranks"]) == (3, [1, 10, 10])
    assert "1 to 10 keys on a rank; rank 1 has 1.43 of the mean" in fine("report", tmp_path / "c")


def test_files_of_others_are_reported_as_far_as_they_say(tmp_path):
    dumped(tmp_path / "c", 20, names=NAMES[:1])
    fine("export", tmp_path / "c", "--format", "npz", "--to", tmp_path / "t.npz")
    (found,) = shown(tmp_path / "t.npz")["tables"]
    (own,) = shown(tmp_path / "c")["tables"]
    assert (found["keys"], found["norms"]) == (own["keys"], own["norms"])
    assert shown(tmp_path / "t.npz")["ranks"] == 1


def test_the_folder_of_all_saves_is_read_as_the_newest_whole_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (10, 20, 30):
        dumped(f"fit/step-{steps:010d}", steps)
    os.unlink(f"fit/step-0000000030/{manifest.NAME}")
    os.symlink("step-0000000010", "fit/latest")
    one, two = "fit/step-0000000010", "fit/step-0000000020"
    for command in ("inspect", "verify"):
        assert fine(command, "fit") == fine(command, two) != fine(command, "fit/latest")
        assert fine(command, "fit/latest") == fine(command, one)
    assert [shown(path)["source"] for path in ("fit", "fit/latest")] == [two, one]
    saves = "step-0000000010 whole, step-0000000020 whole, step-0000000030 unfinished"
    assert f"\nsaves: {saves}\n" in fine("inspect", "fit")
    assert fine("diff", "fit", two) == f"{two} and {two} are equal\n"
    fine("reshard", "fit", "two", "--ranks", "2")
    fine("merge", "fit/latest", "fit", "merged")
    for path in ("two", "merged"):
        assert fine("diff", "fit", path).endswith("are equal\n")
    status, _, err = run("reshard", "fit", "fit", "--ranks", "2", "--force")
    assert status == 2 and "cannot be replaced" in err
    assert run("plan", "fit", "--ranks", "2", "--host-gb", "9")[1].startswith("fits")
    for path in (one, two):
        os.unlink(f"{path}/{manifest.NAME}")
    status, out, err = run("report", "fit")
    assert (status, out) == (3, "")
    assert "fit has no whole save: step-0000000030 is unfinished" in err


def test_what_is_no_checkpoint_is_an_error(tmp_path):
    status, out, err = run("report", tmp_path)
    assert (status, out) == (2, "") and err.startswith("sok-lite report: ")
