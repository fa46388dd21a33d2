"""`sok.profile` on several ranks: each has its own, with the trips between ranks."""

import json

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def test_the_trips_between_ranks_are_measured(comm, folder):
    table = sok.DynamicVariable(2, name="v")
    ids = tf.ragged.constant([[1, 2, 3], [4]], dtype=tf.int64)
    with sok.profile() as profile:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
        tape.gradient(loss, table)
    found = {each.stage for each in profile.report()}
    trips = {"exchange keys", "exchange rows", "exchange gradients"}
    assert found & trips == (trips if comm.size > 1 else set())
    profile.save(folder / f"{comm.rank}.json")
    events = json.loads((folder / f"{comm.rank}.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {comm.rank}


def test_one_rank_may_profile_alone(comm):
    table = sok.DynamicVariable(2, name="v")
    ids = tf.ragged.constant([np.arange(5)], dtype=tf.int64)
    if comm.rank == 0:
        with sok.profile() as profile:
            sok.lookup_sparse(table, ids, combiners="sum")
        assert "lookup" in {each.stage for each in profile.report()}
    else:
        sok.lookup_sparse(table, ids, combiners="sum")
