"""Elastic jobs of horovodrun: a rank is killed, one comes, and the tables are as without."""

import sys
from collections import defaultdict

import numpy as np
import pytest

from sok_lite.comm import launched_ranks
from sok_lite.engine.files import manifest
from sok_lite.engine.files.source import checkpoint_sources
from tests.support.rank_jobs import run_job

pytestmark = [
    pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

NUM_STEPS, CHANGES = 24, (10, 18)

# All of it is exact in float32, so that the order of sums does not count.
PROGRAM = """
import os, signal, time
from pathlib import Path
import keras
import numpy as np
import tensorflow as tf
import sok_lite as sok
from tests.ranks.test_elastic import CHANGES, HOSTS, NUM_STEPS, factor_of, ids_of

FOLDER, WAYS = Path(os.environ["FOLDER"]), os.environ["WAYS"].split()
# Else Horovod's time limit would have to cover how long each takes to come here.
(FOLDER / f"is ready {os.getpid()}").touch()
while len(list(FOLDER.glob("is ready *"))) < int(os.environ["HOROVOD_SIZE"]):
    time.sleep(0.05)
sok.init()
comm = sok.communication.communicator()
tables = [
    sok.DynamicVariable(4, name="a", initializer="ones"),
    sok.DynamicVariable(
        2, name="b", initializer="ones", var_type="hybrid", init_capacity=64, max_capacity=8192
    ),
]
factor = tf.Variable(0.0)
optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.25, momentum=0.5))
optimizer.optimizer.build([factor])
path = FOLDER / "commits" if os.environ["ON_DISK"] else None
state = sok.elastic.TableState([*tables, factor], optimizer, path, step=0)


@tf.function(reduce_retracing=True)
def train_step(ids):
    with tf.GradientTape() as tape:
        outputs = sok.lookup_sparse(tables, [ids, ids], combiners=["sum", "sum"])
        loss = factor * tf.add_n([tf.reduce_sum(output) for output in outputs])
    gradients = tape.gradient(loss, tables)
    optimizer.apply_gradients(zip(gradients, tables))


def hosts_changed(way, number):
    # Once; returns whether the ranks have changed.
    mark = FOLDER / f"change {number}"
    is_second = os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1"
    if way == "killed":
        if is_second and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return True
    if comm.rank == 0 and not mark.exists():
        mark.touch()
        (FOLDER / "hosts").write_text(HOSTS[way == "joins"])
    return comm.size == (3 if way == "joins" else 2)


@sok.elastic.run
def train(state):
    print("goes on from", state.step, "with", comm.size, "ranks", flush=True)
    while state.step < NUM_STEPS:
        if state.step in CHANGES:
            change = CHANGES.index(state.step)
            if WAYS[change:] and not hosts_changed(WAYS[change], change):
                time.sleep(0.2)
                state.check_host_updates()
                continue
        factor.assign(factor_of(state.step))
        ids = ids_of(state.step)[comm.rank :: comm.size]
        train_step(tf.RaggedTensor.from_tensor(ids))
        state.step += 1
        if state.step % 4 == 0:
            state.commit()


train(state)
for table in tables:
    keys, _ = sok.export(table)
    assert (np.mod(keys, comm.size) == comm.rank).all()
assert float(factor) == factor_of(NUM_STEPS - 1)
sok.dump(FOLDER / "after", tables, optimizer)
print("has ended", flush=True)
"""


def ids_of(step):
    """(24, 2) keys, others as time goes on."""
    return np.random.default_rng(step).integers(-40, 40, (24, 2)) * (1 + step // 6)


def factor_of(step):
    """What every row's gradient is multiplied by."""
    return 2.0 ** -(step % 3)


def undisturbed():
    """{key: (row's element, its momentum)} after all steps, by the formula of the optimizer."""
    rows, momenta = defaultdict(lambda: 1.0), defaultdict(float)
    for step in range(NUM_STEPS):
        for key, count in zip(*np.unique(ids_of(step), return_counts=True), strict=True):
            momenta[key] = 0.5 * momenta[key] - 0.25 * factor_of(step) * count
            rows[key] += momenta[key]
    return {int(key): (rows[key], momenta[key]) for key in rows}


# 127.0.0.1 is another host to Horovod, which takes no process of a host where one has died.
HOSTS = ("localhost:2\n", "localhost:2\n127.0.0.1:1\n")


LATER = pytest.mark.full_only("starts and kills ranks: half a minute")


@pytest.mark.parametrize(
    ("ways", "local", "on_disk"),
    [
        ("killed", True, ""),
        pytest.param("joins leaves", False, "1", marks=LATER),
    ],
)
def test_ranks_that_come_and_go_change_no_table(tmp_path, ways, local, on_disk):
    size = 2 if ways.startswith("joins") else 3
    (tmp_path / "hosts").write_text(HOSTS[size == 3])
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat '{tmp_path}/hosts'\n")
    script.chmod(0o755)
    # A rank that starts must not take longer, nor does Horovod know sooner that one has died.
    limit = "60" if "joins" in ways else "10"
    options = ["--gloo", "--min-np", "2", "--max-np", "3", "--network-interfaces", "lo"]
    options += ["--host-discovery-script", str(script), "--elastic-timeout", "60"]
    options += ["--gloo-timeout-seconds", limit]
    environment = {"FOLDER": str(tmp_path), "ON_DISK": on_disk, "WAYS": ways}
    job = run_job("horovod", PROGRAM, tmp_path, size, local, 180, options, **environment)
    assert job.code == 0, job.output
    assert job.output.count(f"goes on from 0 with {size} ranks") == size, job.output
    for way, step in zip(ways.split(), CHANGES, strict=False):
        size = 3 if way == "joins" else 2
        begin = step - step % 4 if way == "killed" else step
        assert job.output.count(f"goes on from {begin} with {size} ranks") == size, job.output
    assert job.output.count("has ended") == size, job.output
    assert manifest.read(tmp_path / "after").extra["iterations"][0] == NUM_STEPS
    expected = undisturbed()
    for source in checkpoint_sources(tmp_path / "after"):
        (momentum,) = source.states
        columns = [np.concatenate([*source.read(name)]) for name in ("keys", "values")]
        momenta = np.concatenate([*source.read(momentum.tensor)])
        found = dict(zip(columns[0].tolist(), zip(columns[1], momenta, strict=True), strict=True))
        assert found.keys() == expected.keys()
        for key, (row, its_momentum) in found.items():
            assert (row == expected[key][0]).all()
            assert (its_momentum == expected[key][1]).all()
