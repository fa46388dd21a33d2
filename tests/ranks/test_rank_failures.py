"""However a rank ends, and wherever: the job ends, says which rank it was, and leaves nothing."""

import re
import sys

import pytest

from sok_lite.comm import launched_ranks
from tests.support.rank_jobs import run_job

pytestmark = [
    pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# A job that does not see the end of a rank goes on for ever; one that does ends in a second or two.
LIMIT_S = 60.0

HEAD = """
import os, signal, sys, time
import numpy as np

WAY, PLACE, CULPRIT = {way!r}, {place!r}, {culprit}


class Return(Exception):
    pass


def end():
    print("ENDS", time.time(), flush=True)
    if WAY == "exception":
        raise RuntimeError("lost for good")
    if WAY == "memory":
        raise MemoryError("lost for good")
    if WAY.startswith("exit"):
        sys.exit(int(WAY[-1]))
    if WAY == "return":
        raise Return
    os.kill(os.getpid(), getattr(signal, WAY))
    time.sleep(600)


def at(place, number):
    if place == PLACE and number == 3 and comm.rank == CULPRIT:
        end()


def end_in_lookups(place):
    # Of the rank that owns the keys.
    from sok_lite.engine import shard_lookup

    find = shard_lookup.look_up_batch

    def look_up(*args, **kwargs):
        at(place, turn)
        return find(*args, **kwargs)

    shard_lookup.look_up_batch = look_up

"""

# A lookup, its gradient and an export, of the engine alone: it starts in a second or two.
ENGINE = """
from sok_lite.backend import get_backend
from sok_lite.comm import make_communicator
from sok_lite.engine import lookup
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from tests.support.parts import Part, forward_parts

comm = make_communicator(sys.argv[1])
backend = get_backend("cpu")
table = make_table("hbm", backend, 2, initializer=make_initializer("1", 2))
turn = 0
end_in_lookups("owner")


def run():
    global turn
    for turn in range(100):
        at("lookup", turn)
        keys = np.arange(turn, turn + 10)
        part = Part(table, keys, np.array([0, 10]), None, "sum")
        _, context = forward_parts(backend, comm, [part])
        at("gradient", turn)
        grads = [np.ones((1, 2), np.float32)]
        lookup.backward(backend, grads, context)
        at("export", turn)
        list(table.export())


try:
    run()
except Return:
    pass
"""

# A whole training step; `at` is called by the culprit's program, or as the function is traced.
TRAINING = """
import keras
import tensorflow as tf
import sok_lite as sok
from sok_lite.sok.communication import communicator

sok.init(sys.argv[1])
comm = communicator()
table = sok.DynamicVariable(4, name="table", initializer="uniform")
optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())
turn = 0
end_in_lookups("owner in a function")


def step(keys):
    combiner = "sum"
    if PLACE == "arguments" and turn == 3 and comm.rank == CULPRIT:
        print("ENDS", time.time(), flush=True)
        combiner = "largest"
    at("lookup", turn)
    with tf.GradientTape() as tape:
        out = sok.lookup_sparse(table, keys, combiners=combiner)
        loss = tf.reduce_sum(out)
    at("gradient", turn)
    gradient = tape.gradient(loss, table)
    at("update", turn)
    optimizer.apply_gradients([(gradient, table)])


traced = tf.function(step, reduce_retracing=True, autograph=False)


def run():
    global turn
    for turn in range(100):
        keys = tf.RaggedTensor.from_row_lengths(tf.range(turn, turn + 6, dtype=tf.int64), [2, 4])
        if PLACE == "trace" and turn == 3:
            tf.function(lambda: (at("trace", turn), step(keys)), autograph=False)()
        elif PLACE == "owner in a function":
            traced(keys)
        else:
            step(keys)
        at("export", turn)
        sok.export(table)


try:
    run()
except Return:
    pass
"""


# Every way to end and every place, with shared memory or without, two ranks or three. horovodrun
# takes 20 seconds to end a job.
FULL = pytest.mark.full_only("starts and ends ranks")


@pytest.mark.parametrize(
    ("program", "tool", "local", "ranks", "way", "place"),
    [
        (ENGINE, "mpi", True, 2, "exception", "owner"),
        (ENGINE, "mpi", False, 2, "exit 0", "gradient"),
        (ENGINE, "mpi", True, 2, "SIGKILL", "export"),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                (ENGINE, "mpi", True, 3, "return", "lookup"),
                (ENGINE, "mpi", True, 3, "exit 3", "owner"),
                (ENGINE, "mpi", False, 2, "SIGINT", "lookup"),
                (ENGINE, "mpi", True, 2, "SIGTERM", "gradient"),
                (ENGINE, "horovod", True, 3, "SIGKILL", "owner"),
                (ENGINE, "horovod", True, 2, "exception", "lookup"),
                (TRAINING, "mpi", False, 3, "exit 0", "update"),
                (TRAINING, "mpi", False, 2, "exception", "trace"),
                (TRAINING, "mpi", True, 2, "SIGKILL", "owner in a function"),
                (TRAINING, "horovod", False, 3, "exception", "arguments"),
                (TRAINING, "horovod", True, 2, "memory", "owner in a function"),
            )
        ),
    ],
    ids=lambda value: {ENGINE: "engine", TRAINING: "training"}.get(value),
)
def test_a_rank_that_ends_ends_the_job(tmp_path, program, tool, local, ranks, way, place):
    culprit = ranks - 1
    head = HEAD.format(way=way, place=place, culprit=culprit)
    job = run_job(tool, head + program, tmp_path, ranks, local)
    assert job.code != 0, job.output
    assert "ENDS" in job.output, job.output
    names_it = rf"[Rr]ank {culprit} (has |aborts|broke off|with PID|in no call)"
    if way.startswith("SIG"):  # then horovodrun may be the only one to know
        names_it += rf"|Process {culprit} exit with status code"
    assert re.search(names_it, job.output), job.output
    if tool == "mpi" and way == "exception":
        assert f"sok_lite: rank {culprit} aborts: " in job.output, job.output
    assert job.ended_s < LIMIT_S, job.output
    assert job.left == [], job.output


@pytest.mark.full_only("starts and ends ranks")
def test_a_forked_child_does_not_hide_the_end_of_its_rank(tmp_path):
    """Rank 1 forks, as a data loader does, and is killed: the job ends, and then the child."""
    job = run_job(
        "mpi",
        HEAD.format(way="SIGKILL", place="", culprit=1)
        + """
from sok_lite.comm import make_communicator
comm = make_communicator("mpi")
if comm.rank == 0:  # mpirun ends it too, a second later if need be: let it say first what it saw
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
comm.allgatherv(np.zeros((100_000, 2)))
if comm.rank == 1:
    launcher = os.getppid()
    if os.fork() == 0:
        print("the child holds", sum("memfd:sok_lite" in x for x in open("/proc/self/maps")),
              "pieces of shared memory", flush=True)
        for number in (1, 2):  # mpirun itself waits for whoever holds the output of a rank
            os.close(number)
        while os.path.exists(f"/proc/{launcher}"):
            time.sleep(0.05)
        os._exit(0)
    time.sleep(1)
    end()
comm.barrier()
""",
        tmp_path,
    )
    assert job.code != 0
    assert "the child holds 0 pieces" in job.output
    assert job.ended_s < LIMIT_S, job.output
    assert "Rank 1 has died or has left, seen by rank 0" in job.output, job.output
    assert job.left == []


@pytest.mark.full_only("starts and ends ranks")
@pytest.mark.parametrize(("tool", "local"), [("mpi", True), ("horovod", False)])
def test_a_rank_that_is_stopped_for_a_while_does_no_harm(tmp_path, tool, local):
    job = run_job(
        tool,
        """
        import os, signal, subprocess, sys
        from sok_lite.comm import make_communicator
        comm = make_communicator(sys.argv[1])
        for turn in range(20):
            if turn == 7 and comm.rank == 1:
                subprocess.Popen(["sh", "-c", f"sleep 12; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            assert comm.allreduce(comm.rank + turn) == 1 + 2 * turn
        print("well", flush=True)
        """,
        tmp_path,
        local=local,
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
    )
    assert job.code == 0, job.output
    assert job.output.count("well") == 2, job.output
    assert job.left == []


@pytest.mark.full_only("starts and ends ranks")
@pytest.mark.parametrize(
    ("tool", "local", "ranks", "settings"),
    [
        ("mpi", True, 3, {}),
        ("horovod", True, 2, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "abc"}),
        ("horovod", False, 2, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0"}),
        (
            *("horovod", False, 3),
            {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"},
        ),
    ],
)
def test_ranks_that_end_at_different_times_end_well(tmp_path, tool, local, ranks, settings):
    job = run_job(
        tool,
        """
        import sys, time
        from sok_lite.comm import make_communicator
        comm = make_communicator(sys.argv[1])
        comm.barrier()
        time.sleep(2 * comm.rank / (comm.size - 1))
        print("well", flush=True)
        """,
        tmp_path,
        ranks=ranks,
        local=local,
        **settings,
    )
    assert (job.code, job.output.count("well"), job.left) == (0, ranks, []), job.output
    assert "sok_lite:" not in job.output
