"""The messages of one all-to-all for all tables: keys behind a header, or rows.

keys   from each rank: [tag, num_tables, number of keys of each table, keys of each table ...]
rows   from each rank: the rows of each table, one after another, from a multiple of 16 bytes on
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.ragged import split_offsets
from sok_lite.comm.gpu_transport import failed_lookup_text, mismatched_lookup_text
from sok_lite.comm.protocol import Communicator, CommunicatorError
from sok_lite.engine.failure import reason_in

# Transports send and count lines of two int64.
_LINE_WORDS = 2
LINE_BYTES = 8 * _LINE_WORDS


def keys_with_headers(
    sorted_keys: np.ndarray, send_counts: np.ndarray, tag: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the message of keys (n,) that are sorted by rank, and its splits."""
    size, num_tables = send_counts.shape
    num_keys = send_counts.sum(axis=1)
    message = np.empty(len(sorted_keys) + size * (2 + num_tables), np.int64)
    sources, targets = split_offsets(num_keys), split_offsets(num_keys + 2 + num_tables)
    for rank in range(size):
        part = message[targets[rank] : targets[rank + 1]]
        part[:2] = tag, num_tables
        part[2 : 2 + num_tables] = send_counts[rank]
        part[2 + num_tables :] = sorted_keys[sources[rank] : sources[rank + 1]]
    return message, np.diff(targets)


def keys_without_headers(
    comm: Communicator, message: np.ndarray, recv_splits: np.ndarray, num_tables: int, tag: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the received keys, (m,), table by table and rank by rank, and recv_counts.

    Raises:
      CommunicatorError: a rank failed before it could send, or sent other tables.
    """
    recv_counts = np.empty((comm.size, num_tables), np.int64)
    begin = split_offsets(recv_splits)
    for rank in range(comm.size):
        part = message[begin[rank] : begin[rank + 1]]
        reason = reason_in(part)
        if reason is not None:
            raise CommunicatorError(failed_lookup_text(rank, reason))
        if part[:2].tolist() != [tag, num_tables]:
            words = part[:2].tolist()
            raise CommunicatorError(mismatched_lookup_text(comm.rank, num_tables, tag, rank, words))
        recv_counts[rank] = part[2 : 2 + num_tables]
    ends = begin[:-1, None] + 2 + num_tables + np.cumsum(recv_counts, axis=1)
    lengths = recv_counts.T.reshape(-1)
    # How far the keys of each table and rank move from the message to the result.
    shifts = (ends - recv_counts).T.reshape(-1) - split_offsets(lengths)[:-1]
    index = np.repeat(shifts, lengths)
    index += np.arange(len(index))
    return message[index], recv_counts


class RowMessage(NamedTuple):
    """The layout of a message of rows of all tables: copies rows in and out.

    Attributes:
      row_bytes: of each table.
      num_rows: of each table, of all ranks together.
      splits: (size,) int64, lines of the message for each rank.
      offsets: (num_tables, 3 * size + 1) int64, per table: the offsets of the ranks' rows in the
        table's array, of the ranks' sections in the message in bytes, and of the ranks' rows in
        `order`.
      order: (n,) int32, the indices of the rows of all tables in the order in which they are sent;
        None: those of a table as they are, rank by rank.
    """

    backend: Backend
    row_bytes: list[int]
    num_rows: list[int]
    splits: np.ndarray
    offsets: Array
    order: Array | None

    @staticmethod
    def layout(
        backend: Backend, counts: np.ndarray, row_bytes: Sequence[int], order: Array | None
    ) -> "RowMessage":
        """Returns the layout for `counts` (size, num_tables) rows."""
        lines = -(-counts * np.array(row_bytes, np.int64) // LINE_BYTES)
        sections = LINE_BYTES * split_offsets(lines.reshape(-1))[:-1].reshape(counts.shape)
        in_order = split_offsets(counts.reshape(-1))[:-1].reshape(counts.shape)
        in_array = np.zeros((len(counts) + 1, counts.shape[1]), np.int64)
        np.cumsum(counts, axis=0, out=in_array[1:])
        offsets = backend.from_host(np.concatenate([in_array, sections, in_order]).T)
        num_rows = in_array[-1].tolist()
        return RowMessage(backend, list(row_bytes), num_rows, lines.sum(axis=1), offsets, order)

    def pack(self, arrays: Sequence[Array]) -> Array:
        """Returns the message, (n, 2) int64, of the rows of one array per table."""
        xp = self.backend.xp
        message = xp.empty((int(self.splits.sum()), _LINE_WORDS), np.int64)
        self._copy("exchange_pack", [xp.ascontiguousarray(each) for each in arrays], message)
        return message

    def unpack(self, message: Array, arrays: Sequence[Array]) -> None:
        """Copies the rows of a message into one C-contiguous array per table."""
        self._copy("exchange_unpack", arrays, message)

    def _copy(self, kernel: str, arrays: Sequence[Array], message: Array) -> None:
        size, first, parts = len(self.splits), 0, []
        content = _bytes(message)
        for t, (array, n) in enumerate(zip(arrays, self.num_rows, strict=True)):
            if array.size:
                place = (self.order, first, self.offsets, t, size)
                parts.append(LaunchArgs(n, (_bytes(array), self.row_bytes[t], *place, content, n)))
            first += n
        self.backend.launch_tables(kernel, parts)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
