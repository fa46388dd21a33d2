"""One library of operations serves every supported TensorFlow; two of them run all tests too.

What asks for a GPU's stream is compiled for each.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
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
if len(sys.argv) > 2:
    os.environ["SOK_LITE_CACHE"] = sys.argv[2]  # nobody else has this TensorFlow
stream.load_stream_of()
"""


def packages_of(environment):
    """Its folder of packages, which may not be there."""
    return environment / f"lib/python3.{sys.version_info.minor}/site-packages"


def installed(release, folder):
    """Returns folders of packages with a release of TensorFlow, and whether it was installed now.

    Where there is an environment with the oldest release, what a later one can take of its packages
    is not downloaded again.
    """
    import tensorflow as tf

    oldest = packages_of(ROOT / ".venv-oldest")
    for path in (Path(tf.__file__).parents[1], oldest):
        if next(path.glob(f"tensorflow*-{release}.*.dist-info"), None):
            return [path], False
    venv.create(folder, symlinks=True)
    packages = [packages_of(folder), *([oldest] if oldest.is_dir() else [])]
    (packages[0] / "others.pth").write_text("\n".join(map(str, packages[1:])))
    # One import compiles what it needs: a third of all that pip would compile.
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    pip += ["install", "-q", "--no-compile", f"tensorflow-cpu=={release}.*"]
    subprocess.run(pip, check=True, timeout=900)
    return packages, True


@pytest.fixture(scope="module")
def releases(request, tmp_path_factory):
    """Returns what `installed` does of a release: two at a time while others are tried."""
    pytest.importorskip("tensorflow")
    folder, pool = tmp_path_factory.mktemp("releases"), ThreadPoolExecutor(2)
    here = [each for each in request.session.items if each.path == request.path]
    wanted = [each.callspec.params["release"] for each in here]
    coming = {each: pool.submit(installed, each, folder / each) for each in wanted}
    yield lambda release: coming[release].result()
    pool.shutdown(cancel_futures=True)
    shutil.rmtree(folder)  # gigabytes


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="not every release has a wheel for it")
@pytest.mark.full_only("installs four releases of TensorFlow: minutes")
@pytest.mark.parametrize("release", RELEASES)
def test_lookups_gradients_and_updates(release, releases, tmp_path):
    packages, is_new = releases(release)
    # Without this environment's packages, and with those of the release.
    command = [sys.executable, "-S", "-c", PROGRAM, str(library.find_library())]
    command += [str(tmp_path)] * is_new
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*packages, ROOT]))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    version, losses, rows = json.loads(done.stdout.splitlines()[-1])
    assert version.startswith(f"{release}.")
    assert losses == [6.0, -4.0]  # row 1 goes down by 1 in each step, row 2 by 2
    assert rows == [[-1.0, -1.0], [-3.0, -3.0], [-3.0, -3.0]]
