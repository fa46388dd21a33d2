"""How a variable's rows are saved where checkpoints do not hold them: `FileSystemSaver`."""

from typing import Any, NamedTuple

from sok_lite.bridge import job


class DynamicEmbeddingSaver:
    """Base of what a `KVCreator` takes as its `saver`."""


class FileSystemSaverConfig(NamedTuple):
    """The arguments of a `FileSystemSaver`.

    Attributes:
      proc_size: number of processes that save; proc_rank: the number of this one.
      save_path: the directory; None: beside the checkpoint.
      buffer_size: keys that are written together.
    """

    proc_size: int
    proc_rank: int
    save_path: str | None
    buffer_size: int


class FileSystemSaver(DynamicEmbeddingSaver):
    """Keeps rows in key and value files of a directory, out of TensorFlow's checkpoint.

    Optimizer states and scores are in one file more for each process. As many processes restore
    exactly what was saved; another number of them share it out by the partitioner. Each process
    saves all keys that it has, as in TFRA: of one that several have, the last of them counts where
    another number restores, and the logger "sok_lite" says how many there were.

    Args:
      proc_size, proc_rank: how many processes save, and which this one is; None: those of the job
        whose ranks are connected, else one.
      save_path: the directory, one for all saves; None: the one of `de.train.Checkpoint` or
        `de.train.DEHvdSaver`, beside each checkpoint.
      buffer_size: keys that are written together.

    Raises:
      TypeError: only one of `proc_size` and `proc_rank` is passed.
      ValueError: a rank that there is not.
    """

    def __init__(
        self,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        save_path: Any = None,
        buffer_size: int = 4096,
    ) -> None:
        if (proc_size is None) != (proc_rank is None):
            raise TypeError(
                "`proc_size` and `proc_rank` are given together, or neither. "
                f"Received: proc_size={proc_size}, proc_rank={proc_rank}."
            )
        size, rank = (1, 0) if proc_size is None or proc_rank is None else (proc_size, proc_rank)
        if not 0 <= rank < size:
            raise ValueError(
                "`proc_rank` must be from 0 to proc_size - 1. "
                f"Received: proc_size={proc_size}, proc_rank={proc_rank}."
            )
        path = None if save_path is None else str(save_path)
        self.config = FileSystemSaverConfig(size, rank, path, buffer_size)
        self._is_of_job = proc_size is None

    def ranks(self) -> tuple[int, int]:
        """Returns how many processes save, and which this one is, as of now."""
        others = job.other_ranks() if self._is_of_job else None
        if others is not None:
            return others.size, others.rank
        return self.config.proc_size, self.config.proc_rank
