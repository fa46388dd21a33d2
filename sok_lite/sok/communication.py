"""Which processes make up the job: `sok.init` and the questions a program asks about ranks.

The names and their meaning are those of SOK's `sok.communication`; one process uses one GPU, so
"gpu" in a name here is what the rest of this package calls a rank.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import tensorflow as tf

from sok_lite.bridge import collectives, job
from sok_lite.bridge.gpu import check_local_rank, share_gpu_of_rank
from sok_lite.engine.hashing import checked_seed, fix_seed

__all__ = [
    "CommToolBase",
    "HorovodTool",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "check_comm_tool",
    "communicator",
    "global_gpu_id",
    "id_in_rank",
    "init",
    "local_rank",
    "num_gpu_per_rank",
    "num_gpus",
    "num_ranks",
    "rank",
    "set_comm_tool",
]


_log = logging.getLogger("sok_lite")

P = ParamSpec("P")
R = TypeVar("R")


def _in_soks_words(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that says as SOK does that `init` has not connected the ranks."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except job.NotJoinedError as error:
            raise RuntimeError(
                "[SOK INFO] Communication tool is not set. Did you forget to call sok.init()? "
                f"{error}"
            ) from None

    return call


communicator = _in_soks_words(job.communicator)
num_ranks = _in_soks_words(job.num_ranks)
alltoall = _in_soks_words(collectives.alltoall)
allreduce = _in_soks_words(collectives.allreduce)
allgather = _in_soks_words(collectives.allgather)
broadcast = _in_soks_words(collectives.broadcast)


def init(
    comm_tool: str = "horovod",
    use_legacy_optimizer: bool = True,
    gpu_transport: str | None = None,
    hash_seed: int | None = None,
) -> None:
    """Chooses how ranks talk to each other, and the GPU of each. Every rank must call it.

    A process by itself, such as a notebook, need not call it.

    Call it before TensorFlow's first operation. Where tables live on a GPU, TensorFlow then uses
    that of the rank's number on its machine alone, and takes memory there as it needs it. A second
    call with the same tool changes nothing, so a notebook's cell may run again. Rank 0 tells the
    logger "sok_lite" when it is done; `logging.basicConfig(level="INFO")` shows that.

    Args:
      comm_tool: "horovod", "mpi", or "single" for one process. One process needs neither
        installed, whatever is named here.
      use_legacy_optimizer: makes `tf.keras.optimizers` the legacy optimizers where TensorFlow runs
        with tf_keras (`TF_USE_LEGACY_KERAS=1`), as SOK does. Nothing changes under Keras 3.
      gpu_transport: how keys, rows and gradients travel between GPUs: "horovod" (its alltoall on
        GPUs), "host", or "auto": Horovod, where it connects the ranks, was built with NCCL and each
        has a GPU of its own; else the host. None: what SOK_LITE_GPU_TRANSPORT says, else "auto". Of
        no use to one process.
      hash_seed: from 0 to 2**58 - 1, with which tables made from now on hash their keys; None: as
        SOK_LITE_HASH_SEED says, else a random one for each table. Rows do not depend on it; where a
        "hybrid" table has its keys does, and so what a full one evicts and refuses, and the order
        of keys in files. A checkpoint brings its own. Do not fix it where keys come from strangers:
        who knows the seed can choose keys that make a table slow. Each rank may have another.

    Raises:
      TypeError: `hash_seed` is not an integer.
      ValueError: unknown tool or transport, or no such seed.
      RuntimeError: it was called before with another tool, or several ranks were launched and the
        tool cannot connect them; TensorFlow uses another GPU than the rank's.
    """
    if hash_seed is not None:
        checked_seed("`hash_seed`", hash_seed)
    share_gpu_of_rank()
    _join(comm_tool, gpu_transport)
    if hash_seed is not None:
        fix_seed(hash_seed)
    if num_ranks() > 1:
        check_local_rank(local_rank())
    if use_legacy_optimizer:
        _use_legacy_optimizers()
    if rank() == 0:
        used = comm_tool if num_ranks() > 1 else "single process"
        _log.info("[SOK INFO] Initialize finished, communication tool: %s", used)
        if job.transport():
            _log.info("[SOK INFO] Between GPUs: %s", job.transport())


def _use_legacy_optimizers() -> None:
    keras = tf.keras
    legacy = getattr(keras.optimizers, "legacy", None)
    # Keras 3 keeps a stub under this name, whose Optimizer is called LegacyOptimizerWarning.
    if getattr(getattr(legacy, "Optimizer", None), "__name__", "") == "OptimizerV2":
        keras.optimizers = legacy
        tf.optimizers = legacy


def set_comm_tool(tool: str | None = None, *, comm_tool: str | None = None) -> None:
    """Stores the communication tool; `init` calls it. Every rank must call it.

    Args:
      tool: "horovod", "mpi" or "single".
      comm_tool: the same, by the name that `init` has for it.

    Raises:
      TypeError: not exactly one of the two is passed.
      ValueError: unknown tool. RuntimeError: it was called before with another tool, or several
        ranks were launched and the tool cannot connect them.
    """
    tools = [name for name in (tool, comm_tool) if name is not None]
    if len(tools) != 1:
        raise TypeError(
            "set_comm_tool takes one tool: 'horovod', 'mpi' or 'single'. "
            f"Received: tool={tool!r}, comm_tool={comm_tool!r}."
        )
    _join(tools[0], None)


def _join(comm_tool: str, gpu_transport: str | None) -> None:
    try:
        job.join(comm_tool, gpu_transport)
    except job.JoinedBeforeError as error:
        raise RuntimeError(
            f"[SOK INFO] Communication tool cannot be set more than once. {error}"
        ) from None


def check_comm_tool() -> None:
    """Raises RuntimeError if there are several ranks, which `sok.init` has not connected."""
    communicator()


def rank() -> int:
    """Returns the number of this process, 0 to `num_ranks() - 1`."""
    return communicator().rank


def local_rank() -> int:
    """Returns the number of this process among those of its machine."""
    return communicator().local_rank


def id_in_rank() -> int:
    """Returns 0: a process uses one GPU."""
    return 0


def num_gpu_per_rank() -> int:
    """Returns 1: a process uses one GPU."""
    return 1


def global_gpu_id() -> int:
    """Returns `rank()`."""
    return rank()


def num_gpus() -> int:
    """Returns `num_ranks()`."""
    return num_ranks()


def _missing(method: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} has no {method}(). Use sok.communication.{method}."
        )

    refuse.__name__ = method
    return refuse


class CommToolBase:
    """A communication tool as a class of SOK's: its methods have the names of the functions above.

    Programs ask the functions. A tool of a program's own is not taken: `init` lists those there
    are.
    """

    rank = _missing("rank")
    num_ranks = _missing("num_ranks")
    local_rank = _missing("local_rank")
    id_in_rank = _missing("id_in_rank")
    num_gpu_per_rank = _missing("num_gpu_per_rank")
    global_gpu_id = _missing("global_gpu_id")
    num_gpus = _missing("num_gpus")
    alltoall = _missing("alltoall")
    allreduce = _missing("allreduce")
    allgather = _missing("allgather")
    broadcast = _missing("broadcast")


class HorovodTool(CommToolBase):
    """The tool that `init` has chosen, as an object. Its methods raise RuntimeError before that."""

    rank = staticmethod(rank)
    num_ranks = staticmethod(num_ranks)
    local_rank = staticmethod(local_rank)
    id_in_rank = staticmethod(id_in_rank)
    num_gpu_per_rank = staticmethod(num_gpu_per_rank)
    global_gpu_id = staticmethod(global_gpu_id)
    num_gpus = staticmethod(num_gpus)
    alltoall = staticmethod(alltoall)
    allreduce = staticmethod(allreduce)
    allgather = staticmethod(allgather)
    broadcast = staticmethod(broadcast)
