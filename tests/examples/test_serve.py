"""The example of a server: a trainer, a server and a client, as a user starts them."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import sok_lite as sok

tf = pytest.importorskip("tensorflow")
pytest.importorskip("waitress")
pytestmark = pytest.mark.full_only("three processes with TensorFlow")
ROOT = Path(__file__).parents[2]


def process(*words):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "serve.py"), *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


def asked(url, ids=None):
    body = None if ids is None else json.dumps(ids).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return answer.read().decode()


def scores_of(folder, ids):
    """What the newest rows and layers give, by NumPy."""
    reader = tf.train.load_checkpoint(str(folder / "dense" / "latest" / "variables" / "variables"))
    shapes = reader.get_variable_to_shape_map()
    by_shape = {tuple(shape): reader.get_tensor(name) for name, shape in shapes.items() if shape}
    hidden, bias, last, last_bias = (by_shape[s] for s in ((32, 32), (32,), (32, 1), (1,)))
    tables = sok.open_readonly(folder / "tables")
    rows = np.concatenate([tables[name].lookup(ids[name]) for name in ("user", "item")], 1)
    logits = np.maximum(rows @ hidden + bias, 0) @ last + last_bias
    return (1 / (1 + np.exp(-logits)))[:, 0]


def test_a_server_follows_the_trainer(tmp_path):
    running = []

    def begin(*words):
        running.append(process(*words))
        return running[-1]

    try:
        trainer = begin("train", tmp_path, "--every", 0, "--whole", 3, "--rounds", 8)
        assert trainer.stdout.readline().startswith("round 1 keys")
        server = begin("serve", tmp_path, "--port", 0, "--every", 0.01)
        url = server.stdout.readline().split()[-1]
        trainer.communicate(timeout=300)
        ids = {"user": [1, 2, 1500, 10**9], "item": [3, 4, 1600, 10**9]}
        expected = scores_of(tmp_path, ids)
        while True:  # until it has followed
            found = json.loads(asked(f"{url}/score", ids))["scores"]
            if np.allclose(found, expected, atol=1e-6):
                break
        client = begin("ask", url, "--requests", 20)
        said, _ = client.communicate(timeout=300)
        assert "20 answers of 20 scores: p50" in said and "rows are" in said
        assert 'sok_served_age_seconds{table="item",rank="0"}' in asked(f"{url}/metrics")
        for path, body, status in (("score", {"user": ["a"]}, 400), ("other", None, 404)):
            with pytest.raises(urllib.error.HTTPError) as failed:
                asked(f"{url}/{path}", body)
            assert failed.value.code == status
    finally:
        for each in running:
            each.kill()
            each.communicate()
