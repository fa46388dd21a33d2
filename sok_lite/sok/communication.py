"""The processes of a job: `sok.init`, and ranks.

Names and meaning are those of SOK's `sok.communication`. One process uses one GPU, so "gpu" in a
name means a rank.
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
    """Wraps a function to raise SOK's error if `init` has not connected the ranks."""

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
    """Connects the ranks and assigns each a GPU. Every rank must call it.

    A single process, such as a notebook, need not call it.

    Call it before TensorFlow's first operation. If tables live on a GPU, TensorFlow then sees only
    the GPU with the rank's local number, and allocates memory on demand. A second call with the
    same tool has no effect, so a notebook cell may run again. Rank 0 logs to "sok_lite" when done;
    `logging.basicConfig(level="INFO")` shows it.

    Args:
      comm_tool: "horovod", "mpi", or "single" for one process. One process needs neither installed,
        whatever the name.
      use_legacy_optimizer: replaces `tf.keras.optimizers` by the legacy optimizers if TensorFlow
        uses tf_keras (`TF_USE_LEGACY_KERAS=1`), as SOK does. No effect under Keras 3.
      gpu_transport: how GPUs exchange keys, rows and gradients: "horovod" (its alltoall on GPUs),
        "host", or "auto": Horovod if it connects the ranks, was built with NCCL and each rank has
        its own GPU; else the host. None: from SOK_LITE_GPU_TRANSPORT, else "auto". No effect for
        one process.
      hash_seed: seed of the hash of tables made from now on, from 0 to 2**58 - 1; None: from
        SOK_LITE_HASH_SEED, else random per table. Rows do not depend on it. The slots of keys do,
        and so what a full "hybrid" table evicts and refuses, and the order of keys in files. A
        checkpoint has its own. Do not fix it if strangers choose the keys: with a known seed, keys
        can be chosen that make a table slow. It may differ between ranks.

    Raises:
      TypeError: `hash_seed` is not an integer.
      ValueError: an unknown tool or transport, or an invalid seed.
      RuntimeError: called before with another tool; several ranks were launched and the tool cannot
        connect them; or TensorFlow uses another GPU than the rank's.
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
    # Keras 3 keeps a stub of this name, whose Optimizer is called LegacyOptimizerWarning.
    if getattr(getattr(legacy, "Optimizer", None), "__name__", "") == "OptimizerV2":
        keras.optimizers = legacy
        tf.optimizers = legacy


def set_comm_tool(tool: str | None = None, *, comm_tool: str | None = None) -> None:
    """Stores the communication tool, as `init` does, with its errors. Every rank must call it.

    Args:
      tool: "horovod", "mpi" or "single"; or `comm_tool`, by the name in `init`.
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
    """Raises RuntimeError if there are several ranks, and `sok.init` has not connected them."""
    communicator()


def rank() -> int:
    """Returns the number of this process, in [0, `num_ranks()`)."""
    return communicator().rank


def local_rank() -> int:
    """Returns the number of this process on its machine."""
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
    """SOK's class for a communication tool; its methods are the functions above.

    Programs ask the functions. Custom tools are not supported: `init` lists the known ones.
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
    """The tool chosen by `init`, as an object. Its methods raise RuntimeError before that."""

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
