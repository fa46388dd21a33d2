"""SOK's dump and load: the names, until files that any number of ranks can read are here."""

from typing import Any, NoReturn

__all__ = ["dump", "incremental_model_dump", "load"]


def dump(path: Any, dump_vars: Any, optimizer: Any = None) -> NoReturn:
    """Raises NotImplementedError."""
    _refuse("dump", "sok.export and np.save, or tf.train.Checkpoint")


def load(path: Any, load_vars: Any, optimizer: Any = None) -> NoReturn:
    """Raises NotImplementedError."""
    _refuse("load", "np.load and sok.assign, or tf.train.Checkpoint")


def incremental_model_dump(sok_vars: Any, time_threshold: Any, sess: Any = None) -> NoReturn:
    """Raises NotImplementedError."""
    _refuse("incremental_model_dump", "variable.export_if(min_score=...)")


def _refuse(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"sok.{name} is not there yet. Use {instead}, on every rank for its part. "
        "docs/migrating_from_sok.md lists what differs."
    )
