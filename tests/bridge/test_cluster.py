"""A table in a cluster of TensorFlow's own, of real servers: several tasks may not use it."""

import json
from types import SimpleNamespace

import pytest
import tensorflow as tf

from sok_lite.bridge import cluster, tf_private
from sok_lite.bridge.variable import table_for_variable
from tests.support.own_process import run_with_tensorflow

# Two processes: this one is the worker, and the one that it starts the parameter server.
PROGRAM = """
import json
import os
import signal
import socket

import tensorflow as tf

v1 = tf.compat.v1


def places(count):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    found = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


ps, worker, chief = places(3)
other = os.fork()
if other == 0:
    tf.distribute.Server({"ps": [ps], "worker": [worker]}, "ps", 0).join()

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite import kv_variable as kv

sok.init("single")
cluster = tf.train.ClusterSpec({"ps": [ps], "worker": [worker]})
report = {}


def outcome(use):
    try:
        return str(use())
    except Exception as error:
        return f"{type(error).__name__} {error}"


TABLES = {
    "sok": lambda: sok.DynamicVariable(2, "ones", name="s"),
    "de": lambda: de.get_variable("d", dim=2, initializer=1.0),
    "kv": lambda: kv.get_kv_variable("k", 2, initializer=tf.ones_initializer()),
}


def run_in(session, make):
    # As a program does that was written for parameter servers.
    with tf.Graph().as_default(), v1.device(v1.train.replica_device_setter(cluster=cluster)):
        table = make()
        step = v1.train.get_or_create_global_step()
        with v1.device("/job:worker/task:0"):
            ids = tf.constant([1], tf.int64)
            is_de = isinstance(table, de.Variable)
            rows = table.lookup(ids) if is_de else tf.nn.embedding_lookup(table, ids)
        with session() as opened:
            return opened.run(rows).tolist()


def monitored():
    return v1.train.MonitoredTrainingSession(master=server.target)


try:
    server = tf.distribute.Server(cluster, "worker", 0)
    for name, make in TABLES.items():
        report["session, " + name] = outcome(
            lambda: run_in(lambda: v1.Session(server.target), make)
        )
    report["monitored session"] = outcome(lambda: run_in(monitored, TABLES["de"]))
    own = tf.distribute.Server.create_local_server()
    with tf.Graph().as_default():
        rows = tf.nn.embedding_lookup(TABLES["sok"](), [1])
        for name, target in (("no server", ""), ("local server", own.target)):
            report[name] = outcome(lambda: v1.Session(target).run(rows).tolist())
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec({"ps": [ps], "chief": [chief]}), job_name="chief"
    )
    for name, make in TABLES.items():
        report["connected, " + name] = outcome(make)
finally:
    os.kill(other, signal.SIGKILL)
print("REPORT" + json.dumps(report))
"""


def test_a_worker_beside_a_parameter_server_has_no_table(tmp_path):
    report = json.loads(run_with_tensorflow(PROGRAM, tmp_path).rpartition("REPORT")[2])
    refused = {name: text for name, text in report.items() if name.startswith(("ses", "con", "mo"))}
    assert len(refused) == 7
    for name, text in refused.items():
        assert text.startswith("NotImplementedError") and "horovodrun" in text, name
        me = "chief" if name.startswith("connected") else "worker"
        assert f"/job:{me}/task:0" in text and "/job:ps/task:0" in text, name
    for name in ("no server", "local server"):  # one task goes on
        assert report[name] == "[[1.0, 1.0]]"


def test_a_table_that_is_in_a_server_of_its_own_goes_on(monkeypatch):
    jobs = [tf.train.JobDef(name="ps", tasks={0: "localhost:1"})]
    server = SimpleNamespace(cluster=tf.train.ClusterDef(job=jobs))
    context = SimpleNamespace(**dict.fromkeys(tf_private.CLUSTER_OF_CONTEXT, server))
    monkeypatch.setattr(cluster, "context", lambda: context)
    with pytest.raises(NotImplementedError, match="/job:ps/task:0"):
        table_for_variable("table", lambda backend: "a table")
    assert table_for_variable("table", lambda backend: "rows", is_shared=True) == "rows"
