"""A CPU whose memory goes back in small blocks and is forgotten at once."""

import copy

from sok_lite.backend import get_backend

BLOCK_BYTES = 64


def forgetful_backend():
    """Returns a CPU backend that writes zeros to all that it is given back, not to whole pages.

    A page of the system keeps what it held until the system takes it. Attribute `num_forgotten`
    counts the bytes.
    """
    backend = copy.copy(get_backend("cpu"))
    backend.chunk_bytes = backend.far_chunk_bytes = BLOCK_BYTES
    backend.num_forgotten = 0

    def forget(memory):
        memory.fill(0)
        backend.num_forgotten += memory.nbytes

    backend.give_back = forget
    return backend
