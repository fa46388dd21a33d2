"""Work of one rank that all wait for: they go on together, or all raise."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sok_lite.comm import Communicator


@contextmanager
def together(comm: Communicator | None) -> Iterator[None]:
    """Ends when all ranks have done what is inside, and raises on all where one has failed.

    Args:
      comm: the job; None: there is one rank.
    """
    if comm is None:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
    texts = comm.allgatherv(np.frombuffer(text, np.uint8), call="export_serving")
    if failure is not None:
        raise failure
    if len(texts.rows):
        raise RuntimeError(f"Another rank could not export: {texts.rows.tobytes().decode()}")
