"""The times after which a wait for other ranks is logged or an error, by Horovod's settings.

Horovod reads whole seconds and takes a value that it cannot read for 0. A job must not break at a
setting that Horovod accepts, so nothing is rejected here either.
"""

import math
import os


def stall_limits() -> tuple[float, float]:
    """Returns the seconds between two logs of a wait, and until it is an error; infinite: never."""
    if _seconds("HOROVOD_STALL_CHECK_DISABLE", 0.0):
        return math.inf, math.inf
    return (
        _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0) or math.inf,
        _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or math.inf,
    )


def _seconds(name: str, otherwise: float) -> float:
    """Returns a variable's number, 0 or more; `otherwise` if it is not set or no such number."""
    try:
        seconds = float(os.environ.get(name) or otherwise)
    except ValueError:
        return otherwise
    return seconds if 0 <= seconds < math.inf else otherwise
