"""The jobs that use Keras, run as their users run them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import two_tower as two_towers

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(command):
    """Returns what the last line of a job says."""
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    return json.loads(lines[-1].split("RESULT ")[1])


def two_tower(*launcher):
    script = str(EXAMPLES / "two_tower.py")
    return run([*launcher, sys.executable, script])


def test_recall_and_neighbors_are_those_of_sorting_all_items():
    scores = np.random.default_rng(5).standard_normal((two_towers.USERS, two_towers.ITEMS))
    train, held_out = two_towers.draw_pairs(8000, seed=3)
    assert not set(map(tuple, train.tolist())) & set(map(tuple, held_out.tolist()))
    scores -= 20  # what was seen is left out, however low all others are
    scores[tuple(held_out[::2].T)] += 2
    hits = []
    for user, item in held_out.tolist():
        seen = set(train[train[:, 0] == user, 1].tolist())
        ranking = sorted(set(range(two_towers.ITEMS)) - seen, key=lambda i: -scores[user, i])
        hits.append(item in ranking[:10])
    assert 0.1 < np.mean(hits) < 0.9
    assert two_towers.recall(scores, train, held_out) == pytest.approx(np.mean(hits))
    vectors = np.array([[1.0, 0.0], [9.0, 0.5], [0.0, 1.0], [2.0, 1.0], [-1.0, 0.0]])
    assert two_towers.neighbors(vectors, 0).tolist() == [1, 3, 2, 4]


def check_retrieval(result):
    """The towers come close to the true preferences, and items are nearest to those of a genre."""
    assert result["most_popular"] < 0.1 and result["recall_at_10"] > 0.8 * result["best_possible"]
    for name, others in result["neighbors"].items():
        assert len(others) == 4 and {other.split("-")[0] for other in others} == {
            name.split("-")[0]
        }
    assert (result["users"], result["items"]) == (1000, 400)  # of all ranks


@pytest.mark.full_only("starts ranks with Keras")
def test_two_towers_on_two_ranks():
    horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    if horovodrun is None:
        pytest.skip("no horovodrun beside this Python: scripts/setup.sh installs Horovod")
    check_retrieval(two_tower(horovodrun, "--gloo", "-np", "2"))


@pytest.mark.full_only("trains for 13 s; two towers are the smoke")
def test_a_deep_and_cross_network_is_loaded_and_served(tmp_path):
    options = ["--rows", "8000", "--epochs", "3", "--workdir", str(tmp_path)]
    result = run([sys.executable, str(EXAMPLES / "dcn.py"), *options])
    assert result["auc"] > 0.65
    assert result["served_differs_by"] < 1e-5
