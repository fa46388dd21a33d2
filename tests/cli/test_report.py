"""`sok-lite report`: of a checkpoint what `sok.report` says of the tables that wrote it."""

import json

import numpy as np
import pytest

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


def test_rows_of_bfloat16_are_read_as_numbers(tmp_path):
    table, _ = filled(CPU, 50, "bfloat16")
    dump(tmp_path / "c", [table], ONE)
    assert shown(tmp_path / "c")["tables"][0]["norms"] == report_of(table).norms.as_dict()


def test_the_ranks_that_wrote_it_are_told_apart(tmp_path):
    def program(comm):
        table = new_table(CPU, 2)
        table.lookup(np.arange(10) * comm.size + comm.rank if comm.rank else [0])
        dump(tmp_path / "c", [table], comm)

    run_ranks(3, program)
    found = shown(tmp_path / "c")
    assert (found["ranks"], found["tables"][0]["keys_of_ranks"]) == (3, [1, 10, 10])
    assert "1 to 10 keys on a rank; rank 1 has 1.43 of the mean" in fine("report", tmp_path / "c")


def test_some_tables_are_written_as_a_page(tmp_path):
    dumped(tmp_path / "c", 20)
    text = fine("report", tmp_path / "c", "--table", NAMES[1], "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert text.startswith(str(tmp_path / "c")) and "1 table, 1 rank" in text
    assert page.startswith("<!DOCTYPE html>") and "it/em, ä" in page and ">user<" not in page


def test_files_of_others_are_reported_as_far_as_they_say(tmp_path):
    dumped(tmp_path / "c", 20, names=NAMES[:1])
    fine("export", tmp_path / "c", "--format", "npz", "--to", tmp_path / "t.npz")
    (found,) = shown(tmp_path / "t.npz")["tables"]
    (own,) = shown(tmp_path / "c")["tables"]
    assert (found["keys"], found["norms"]) == (own["keys"], own["norms"])
    assert shown(tmp_path / "t.npz")["ranks"] == 1


@pytest.mark.parametrize("command", ["report", "inspect", "verify"])
def test_a_save_that_was_not_finished_is_called_that(tmp_path, command):
    for steps in (10, 20, 30):
        dumped(tmp_path / f"step-{steps:010d}", 3)
    unfinished = tmp_path / "step-0000000030"
    (unfinished / manifest.NAME).unlink()
    status, out, err = run(command, unfinished)
    assert (status, out) == (3, "") and err.count("\n") == 1
    assert f"{unfinished} has no manifest.json: this save was not finished" in err
    assert f"The newest whole one is {tmp_path / 'step-0000000020'}." in err


def test_what_is_no_checkpoint_is_an_error(tmp_path):
    status, out, err = run("report", tmp_path)
    assert (status, out) == (2, "") and err.startswith("sok-lite report: ")
