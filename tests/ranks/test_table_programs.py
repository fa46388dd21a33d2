"""Drawn programs of methods, lookups and updates in one function, over real ranks."""

import numpy as np
import tensorflow as tf

from sok_lite.bridge import job
from tests.conftest import QUICK
from tests.support.table_programs import NUM_FLAGS, Oracle, Program, drawn, flags_of


def test_each_rank_sees_what_a_dict_of_all_ranks_does(comm, monkeypatch):
    monkeypatch.setattr(job, "_communicator", comm)
    for seed in range(3 if QUICK else 10):
        rng = np.random.default_rng(seed)
        block, oracle = drawn(rng.integers), Oracle(comm.rank, comm.size)
        traced = tf.function(Program(block, comm.rank, comm.size), autograph=False)
        for _ in range(2):
            flags = flags_of(int(rng.integers(2**NUM_FLAGS)))
            seen = traced(tf.constant(flags))
            np.testing.assert_array_equal(seen, oracle.run(block, flags), f"{seed} {block}")
