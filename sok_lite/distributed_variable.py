"""SOK's module of this name. Its static variables are not there yet."""

from typing import NoReturn

__all__: list[str] = []

_NOT_YET = ("Variable", "DistributedVariable", "LocalizedVariable")


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_YET:
        raise AttributeError(
            f"sok_lite has no {name!r} yet. Use a DynamicVariable, or a tf.Variable. "
            "docs/migrating_from_sok.md lists what differs."
        )
    raise AttributeError(f"module 'sok_lite.distributed_variable' has no attribute {name!r}")
