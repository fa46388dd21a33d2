"""`Autosave` over real ranks: what one of them alone knows, all decide alike."""

import logging
import sys

import numpy as np
import pytest

import sok_lite as sok
from sok_lite.bridge import saves as of_saves
from sok_lite.comm import launched_ranks
from sok_lite.comm.protocol import RanksDifferError
from tests.support.rank_jobs import run_job


def of_all(comm, saved):
    """What each rank has saved after: the same on all, or it fails."""
    by_rank = comm.allgatherv(np.array(saved, np.int64)).by_rank()
    assert all(part.tolist() == by_rank[0].tolist() for part in by_rank)
    return by_rank[0].tolist()


@pytest.mark.parametrize("sends", [True, False], ids=["steps that send", "that do not"])
def test_all_save_after_the_same_step_by_the_clock_of_rank_0(comm, monkeypatch, sends):
    clock, saved = [0.0], []
    monkeypatch.setattr(of_saves, "monotonic", lambda: clock[0])
    with sok.Autosave(saved.append, "10s") as saves:
        for step in range(1, 20):
            clock[0] += 3.0 if comm.rank == 0 else 100.0
            if sends:
                comm.allreduce(step)
            saves.after(step)
    # It is 10 s at the end of step 4; others learn of it in step 5, and from there on it counts.
    several = comm.size > 1
    assert of_all(comm, saved) == ([5, 10, 15] if several else [4, 8, 12, 16])


def test_a_failure_of_one_rank_is_that_of_all(comm, caplog):
    saved, bad = [], (2, 3, 6, 7, 8)

    def on_one_rank(step):
        if comm.rank == comm.size - 1 and step in bad:
            raise OSError(f"no space for {step}")

    def save(step):
        comm.barrier("save")  # as of a dump
        saved.append(step)

    with (
        caplog.at_level(logging.WARNING, "sok_lite"),
        pytest.raises(OSError, match="no space for 8") as raised,
        sok.Autosave([on_one_rank, save], 1) as saves,
    ):
        for step in range(1, 20):
            saves.after(step)
    assert of_all(comm, saved) == [1, 4, 5]
    told = [each.getMessage() for each in caplog.records if each.name == "sok_lite"]
    assert len(told) == (4 if comm.rank == 0 else 0)
    if comm.size > 1:
        assert str(raised.value) == f"Rank {comm.size - 1}: no space for 8"


class Writing:
    """What is written in the background, until it is told to be done."""

    def __init__(self, waited):
        self.done, self._waited = False, waited

    def wait(self):
        self._waited.append(True)


def test_a_save_in_the_background_counts_when_all_have_written(comm):
    waited, counted = [], []
    with sok.Autosave(lambda _: Writing(waited), 4) as saves:
        for step in range(1, 8):
            comm.barrier()
            if saves._saves._under_way is not None and step == 4 + min(2, 1 + comm.rank):
                saves._saves._under_way.done = True  # rank 0 after step 5, others after step 6
            saves.after(step)
            counted.append(len(waited))
    assert of_all(comm, counted) == ([0] * 6 + [1] if comm.size > 1 else [0] * 4 + [1] * 3)


def test_other_arguments_on_a_rank_are_refused(comm):
    if comm.size == 1:
        pytest.skip("there is one rank")
    with pytest.raises(RanksDifferError, match="An Autosave must be the same on all ranks"):
        sok.Autosave(print, 2 + comm.rank).__enter__()


# SIGTERM comes to one rank, twice, in the midst of a step; dense weights are on rank 0 alone.
TOLD = """
import os, signal, sys
import numpy as np
import tensorflow as tf
import keras
import sok_lite as sok
import sok_lite.keras as sk

sok.init(sys.argv[1])
rank, ranks = sok.communication.rank(), sok.communication.num_ranks()
folder = {folder!r}


def tell(batch, logs=None):
    if batch == 3 and rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


if {in_fit}:
    ids = keras.Input([3], dtype="int64")
    x = sk.Embedding(sk.Table("rows", 2), "mean")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    x = np.arange(300).reshape(100, 3)
    batches = sk.shard(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(10))
    checkpoint = sk.Checkpoint(folder)
    telling = keras.callbacks.LambdaCallback(on_train_batch_begin=tell)
    model.fit(batches, epochs=2, callbacks=[sk.AllRanks(), telling, checkpoint], verbose=0)
else:
    table = sok.DynamicVariable(2, name="rows", initializer="ones")
    step = tf.function(lambda keys: sok.lookup_sparse(table, keys, combiners="sum"))
    with sok.Autosave(lambda steps: sok.dump(folder, table)) as saves:
        for batch in range(10):
            tell(batch)
            step(tf.RaggedTensor.from_row_lengths(tf.range(10 * batch, 10 * batch + 10), [10]))
            saves.after(batch + 1)
print("NOT ENDED", flush=True)
"""


@pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("tool", "in_fit", "local"),
    [
        ("horovod", True, True),
        pytest.param("mpi", False, False, marks=pytest.mark.full_only("starts ranks")),
    ],
)
def test_one_rank_is_told_to_end_and_all_save_and_end(tmp_path, tool, in_fit, local):
    folder = tmp_path / "saves"
    program = TOLD.format(folder=str(folder), in_fit=in_fit)
    # mpirun ends with the status of a rank. horovodrun does not, and ends the others when one has
    # failed, which may be before they say theirs: so it hears of none.
    says = ["sh", "-c", '"$@"; echo "ended with $?"', "sh"] if tool == "horovod" else []
    ended = run_job(tool, program, tmp_path, local=local, options=says)
    assert "NOT ENDED" not in ended.output and not ended.left, ended.output
    if tool == "horovod":
        assert ended.code == 0 and ended.output.count("ended with 143") == 2, ended.output
    else:
        assert ended.code == 143, ended.output
    if in_fit:
        assert sorted(path.name for path in folder.glob("step-*")) == ["step-0000000004"]
    else:
        table = sok.DynamicVariable(2, name="rows", initializer="ones")
        sok.load(folder, table)
        assert len(table) == 40  # of four steps
