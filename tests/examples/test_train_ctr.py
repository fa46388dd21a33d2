"""Facts about the main job, run as its users run it: one rank, two ranks, bad data.

Both runs train for 20 steps, the last one with a smaller batch, and leave their tables in files.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ctr.criteo import COLUMNS
from ctr.metrics import auc
from ctr.planted import PlantedModel

from tests.support.own_process import run_with_tensorflow

pytest.importorskip("tensorflow")

from train_ctr import print_result, split

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_ctr.py"
# 1268 rows to train on: 19 batches of 64 and one of 52, of which rank 1 gets 20
OPTIONS = ["--rows", "1585", "--batch", "64", "--dim", "8", "--seed", "7"]


class Run(NamedTuple):
    """What a finished run has left."""

    result: dict[str, Any]
    lines: list[str]
    errors: str
    workdir: Path

    def tables(self):
        """Returns {table: {key: row}}, put together from the parts of all ranks."""
        tables: dict[str, dict[int, np.ndarray]] = {}
        for part in range(self.result["ranks"]):
            with np.load(self.workdir / f"part_{part}_of_{self.result['ranks']}.npz") as arrays:
                for name in (n for n in arrays.files if n.endswith(".keys")):
                    table = tables.setdefault(name.removesuffix(".keys"), {})
                    rows = arrays[name.replace(".keys", ".values")]
                    new = dict(zip(arrays[name].tolist(), rows, strict=True))
                    assert not table.keys() & new.keys(), "a key belongs to one rank"
                    table.update(new)
        return tables

    def dense(self):
        with np.load(self.workdir / "dense.npz") as arrays:
            return [arrays[name] for name in arrays.files]


def execute(*options):
    """Runs the script on two ranks; returns the finished process, stdout without prefixes."""
    horovodrun = shutil.which("horovodrun", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if horovodrun is None:
        pytest.skip("no horovodrun beside this Python: scripts/setup.sh installs Horovod")
    # Gloo: needs no mpirun
    command = [horovodrun, "--gloo", "-np", "2", sys.executable, str(SCRIPT), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    # a line of rank 0 begins with `[0]<stdout>:`
    done.stdout = re.sub(r"^\[\d+\]<stdout>:", "", done.stdout, flags=re.MULTILINE)
    done.stderr = re.sub(r"^\[\d+\]<stderr>:", "", done.stderr, flags=re.MULTILINE)
    return done


def left_in(workdir, printed, errors=""):
    lines = printed.splitlines()
    assert lines[-1].startswith("RESULT "), printed
    return Run(json.loads(lines[-1].removeprefix("RESULT ")), lines, errors, workdir)


def run(workdir, *options):
    done = execute("--workdir", str(workdir), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return left_in(workdir, done.stdout, done.stderr)


def run_alone(folder, *options):
    """Runs the script as a program for each list of options, all in one process of its own.

    Returns what it printed, and the reprs of what they exited with.
    """
    program = f"""
        import runpy, sys
        for words in {options}:
            sys.argv = [{str(SCRIPT)!r}, *words]
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                print(repr(end.code))
        """
    return run_with_tensorflow(program, folder, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    workdir, folder = (tmp_path_factory.mktemp(name) for name in ("one", "program"))
    return left_in(workdir, run_alone(folder, ["--workdir", str(workdir), *OPTIONS]))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), *OPTIONS)


@pytest.mark.full_only("starts ranks once more")
def test_the_tables_are_the_same_with_one_and_with_two_ranks(one_rank, two_ranks):
    assert one_rank.result["steps"] == two_ranks.result["steps"] == 20
    labels, probabilities, _, _ = PlantedModel(7).draw(0, 1585)
    expected = auc(labels[1268:], probabilities[1268:])  # of the true probabilities
    assert one_rank.result["best_auc"] == two_ranks.result["best_auc"] == expected
    assert (one_rank.result["ranks"], two_ranks.result["ranks"]) == (1, 2)
    one, two = one_rank.tables(), two_ranks.tables()
    assert one.keys() == two.keys() and len(one) == 26
    for name in one:
        assert one[name].keys() == two[name].keys()
        keys = sorted(one[name])
        # the order of the sums over a batch differs, and Adam takes what is near 0 for large
        np.testing.assert_allclose(
            np.stack([two[name][k] for k in keys]),
            np.stack([one[name][k] for k in keys]),
            rtol=0,
            atol=1e-5,
            err_msg=name,
        )
    for a, b in zip(one_rank.dense(), two_ranks.dense(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_training_moves_embeddings_and_dense_weights(two_ranks):
    rows = np.stack([row for table in two_ranks.tables().values() for row in table.values()])
    # new rows are uniform from -0.05 to 0.05
    assert np.abs(rows).max() > 0.06
    assert all(np.abs(bias).max() > 0 for bias in two_ranks.dense() if bias.ndim == 1)


def test_the_result_line_says_what_was_done(two_ranks):
    result = two_ranks.result
    assert 0.4 < result["auc"] <= 1
    assert result["reloaded_auc"] == pytest.approx(result["auc"], abs=1e-6)
    assert result["keys"] == sum(map(len, two_ranks.tables().values()))
    assert result["samples_per_second"] > 0
    assert result["loss"] < np.log(2) + 0.1
    expected = {"rows": 1585, "batch": 64, "dim": 8, "seed": 7, "optimizer": "adam", "epochs": 1}
    assert {name: result[name] for name in expected} == expected
    assert sum(line.startswith("RESULT ") for line in two_ranks.lines) == 1
    sentence = two_ranks.lines[-2]
    assert sentence.startswith(f"Trained 26 tables of {result['keys']:,} keys on 1,268 rows in ")
    found = f"{result['auc']:.4f}"
    assert f" s: AUC {found} on 317 held-out rows, and {found} after the ranks " in sentence
    assert sentence.endswith(f"the best possible is {result['best_auc']:.4f}.")


def test_rank_0_shows_a_progress_bar(two_ranks):
    bars = [line for line in two_ranks.errors.splitlines() if "training [" in line]
    assert len(bars) == 10
    assert all("samples/s" in bar and "loss" in bar for bar in bars)
    assert bars[-1].find("100%") > 0


def hex_row(rng, i):
    cells = [
        str(i % 2),
        *map(str, rng.integers(-1, 50, 13)),
        *(f"{k:08x}" for k in rng.integers(9, size=26)),
    ]
    for column in rng.integers(1, 40, 6):
        cells[column] = ""
    return cells


def criteo_csv(path, num_rows=30):
    rng = np.random.default_rng(0)
    lines = [list(COLUMNS), *(hex_row(rng, i) for i in range(num_rows))]
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    return path


@pytest.mark.full_only("starts ranks once more")
def test_a_csv_with_header_is_trained_on_by_ranks_that_get_no_rows(tmp_path):
    # 24 rows to train on: in the last batch of 4, and in the evaluation, all rows are rank 0's
    path = criteo_csv(tmp_path / "a.csv")
    options = ["--data", str(path), "--batch", "10", "--epochs", "2", "--optimizer", "adagrad"]
    done = run(tmp_path / "new", *options, "--ranks", "2")
    assert done.result["rows"] == 30
    assert done.result["steps"] == 6
    assert done.result["best_auc"] is None
    assert done.result["reloaded_auc"] == pytest.approx(done.result["auc"], abs=1e-6)


@pytest.mark.full_only("starts ranks once more")
def test_a_bad_data_file_ends_all_ranks_with_its_line(tmp_path):
    path = criteo_csv(tmp_path / "bad.csv")
    path.write_text(path.read_text() + "1,2,3\n")
    done = execute("--data", str(path))
    assert done.returncode != 0
    assert "bad.csv, line 32: expected 40 columns" in done.stderr
    assert 'train_ctr.py", line' not in done.stderr, "a message, not a traceback"
    assert "RESULT" not in done.stdout


@pytest.mark.full_only("starts a process")
def test_wrong_options_end_with_a_clear_message(tmp_path):
    said = run_alone(tmp_path, ["--ranks", "2"], ["--data", "/nowhere/a.tsv"])
    # Texts, which Python prints to stderr, and no status: it is 1.
    ends = said.splitlines()[-2:]
    for end, message in zip(ends, ("horovodrun -np 2", "No data to train on. "), strict=True):
        assert message in ast.literal_eval(end)
    assert "/nowhere/a.tsv" in ends[1]


def test_a_result_has_null_for_what_is_no_number_and_a_split_rows_on_both_sides(capsys):
    print_result({"auc": float("nan"), "keys": 3})
    assert json.loads(capsys.readouterr().out.removeprefix("RESULT ")) == {"auc": None, "keys": 3}
    assert (split(10, 0.2), split(3, 0.5)) == (8, 1)
    for wrong in ((1, 0.2), (10, 0.0), (10, 1.0), (10, -1.0)):
        with pytest.raises(ValueError, match="Expected enough rows"):
            split(*wrong)
