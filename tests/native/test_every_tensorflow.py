"""One library of operations serves every supported TensorFlow; two of them run all tests too.

What asks for a GPU's stream is compiled for each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sok_lite.native import library

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ["2.16", "2.17", "2.18", "2.19", "2.20", "2.21"]

PROGRAM = """
import json, os, sys
from pathlib import Path
import numpy as np, tensorflow as tf, sok_lite as sok
from sok_lite.native import library, stream

library.find_library = lambda: Path(sys.argv[1])
table = sok.DynamicVariable(2, "ones", name="t")
optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))

def step(ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return loss

ids = tf.constant([1, 2, 2], tf.int64)
losses = [float(step(ids)), float(tf.function(step)(ids))]
print(json.dumps([tf.__version__, losses, tf.nn.embedding_lookup(table, ids).numpy().tolist()]))
os.environ["SOK_LITE_CACHE"] = sys.argv[2]  # nobody else has this TensorFlow
stream.load_stream_of()
"""


def oldest():
    """The packages of the environment with the oldest release, which may not be there."""
    return ROOT / f".venv-oldest/lib/python3.{sys.version_info.minor}/site-packages"


@pytest.mark.full_only("installs four releases of TensorFlow, one after another: minutes")
@pytest.mark.parametrize("release", RELEASES)
def test_lookups_gradients_and_updates(release, tmp_path):
    if sys.version_info >= (3, 13):
        pytest.skip("not every release has a wheel for this Python")
    tf = pytest.importorskip("tensorflow")
    folder = str(tmp_path / "packages")
    for path in (Path(tf.__file__).parents[1], oldest()):
        if next(path.glob(f"tensorflow*-{release}.*.dist-info"), None):
            folder = str(path)
    if not Path(folder).exists():
        # One import compiles what it needs: a third of all that pip would compile.
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", folder]
        subprocess.run([*pip, f"tensorflow-cpu=={release}.*"], check=True, timeout=900)
    # Without this environment's packages, and with those of the folder.
    command = [sys.executable, "-S", "-c", PROGRAM, str(library.find_library()), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    version, losses, rows = json.loads(done.stdout.splitlines()[-1])
    assert version.startswith(f"{release}.")
    assert losses == [6.0, -4.0]  # row 1 goes down by 1 in each step, row 2 by 2
    assert rows == [[-1.0, -1.0], [-3.0, -3.0], [-3.0, -3.0]]
