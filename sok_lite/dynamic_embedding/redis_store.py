"""Rows by key in a Redis, which workers share.

A table is `num_buckets` hashes of Redis, and one more that says what they hold:

    sok_lite:<model_tag_runtime>:<name>:<bucket>   8 bytes of a key, little-endian -> its row
    sok_lite:<model_tag_runtime>:<name>:form       row_bytes, num_buckets

A key's bucket is its hash modulo num_buckets, so that no hash of Redis becomes huge, and a cluster
has a part of them on each node.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sok_lite.dynamic_embedding.redis_settings import CLUSTER, connect
from sok_lite.engine.hashing import hash_keys

# Sets each row that still is what it is expected to be, '' for none, and returns which are not.
# ARGV: key, expected row and new row, of each.
_SWAP = """
local changed = {}
for i = 1, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') == ARGV[i + 1] then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
  else
    changed[#changed + 1] = (i - 1) / 3
  end
end
return changed
"""


class RedisStore:
    """Rows of bytes by key, in a Redis. Threads may share it.

    Nothing is sent twice: where an answer is lost, a redis.RedisError tells so, and what was sent
    may have happened.

    Args:
      settings: of `redis_settings`.
      name: of the table. Every store of this name and of the same model_tag_runtime is this table.
      row_bytes: length of a row.
      num_buckets: of a table that is new; another keeps its own.

    Attributes:
      name, row_bytes, num_buckets: of the table.

    Raises:
      ConnectionError: no Redis answers.
      ImportError: the package `redis` is not installed.
      ValueError: the Redis has the table with rows of another length.
    """

    def __init__(
        self, settings: dict[str, Any], name: str, row_bytes: int, num_buckets: int = 256
    ) -> None:
        if row_bytes < 1 or num_buckets < 1:
            raise ValueError(
                "A table in a Redis has at least one byte a row and one bucket. Received: "
                f"row_bytes={row_bytes}, num_buckets={num_buckets}."
            )
        self.name = name
        self.row_bytes = row_bytes
        self._keys_at_a_time = settings["keys_sending_size"]
        self._start = f"sok_lite:{settings['model_tag_runtime']}:{name}"
        self._is_cluster = settings["redis_connection_mode"] == CLUSTER
        self._client = connect(settings)
        form = f"{self._start}:form"
        for field, value in (("row_bytes", row_bytes), ("num_buckets", num_buckets)):
            self._client.hsetnx(form, field, value)  # of several workers the first decides
        found, buckets = map(int, self._client.hmget(form, "row_bytes", "num_buckets"))
        if found != row_bytes:
            self.close()
            raise ValueError(
                f"The Redis has a table {name!r} with rows of {found} bytes. Expected {row_bytes} "
                "bytes. Use another name or model_tag_runtime, or the same length and type of rows."
            )
        self.num_buckets = buckets

    def close(self) -> None:
        """Closes the connections. The rows stay."""
        self._client.close()

    def get(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows.

        Args:
          keys: (n,) int64.

        Returns:
          ((n,) bool, which keys there are; (n, row_bytes) uint8, 0 where there is none).
        """
        keys = _checked_keys(keys)
        found = np.zeros(len(keys), bool)
        rows = np.zeros((len(keys), self.row_bytes), np.uint8)
        fields = _fields(keys)
        for parts in self._batches(keys):
            replies = self._send(
                parts, lambda pipe, bucket, at: pipe.hmget(bucket, _chosen(fields, at))
            )
            values = [value for reply in replies for value in reply]
            places = np.concatenate([at for _, at in parts])
            hit = np.array([value is not None for value in values])
            found[places] = hit
            rows[places[hit]] = self._joined([value for value in values if value is not None])
        return found, rows

    def put(self, keys: Any, rows: Any) -> None:
        """Writes rows. Of a key that repeats the last row counts.

        Args:
          keys: (n,) int64.
          rows: (n, row_bytes) uint8.
        """
        keys, rows = _checked_keys(keys), self._checked_rows(keys, rows)
        fields, values = _fields(keys), self._values(rows)

        def write(pipe: Any, bucket: str, at: np.ndarray) -> None:
            pairs = zip(_chosen(fields, at), _chosen(values, at), strict=True)
            pipe.hset(bucket, items=[each for pair in pairs for each in pair])

        for parts in self._batches(keys):
            self._send(parts, write)

    def update(
        self,
        keys: Any,
        function: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[Any, Any]],
    ) -> None:
        """Changes rows depending on what they are, each as a whole, whoever else changes them.

        A row that another worker changed in between is read again and given to `function` again. A
        key that repeats is changed as often, one after the other, each time after another round
        trip: let callers join those that repeat.

        Args:
          keys: (n,) int64.
          function: takes (m,) which of the keys they are, (m,) bool whether each is there, and
            their rows (m, row_bytes) uint8, which are not to be changed. Returns (m,) bool which to
            write, and rows (m, row_bytes) uint8, that count for those only. It is called until all
            that were to be written are.
        """
        keys = _checked_keys(keys)
        left = np.arange(len(keys))
        while len(left):
            found, old = self.get(keys[left])
            chosen, new = function(left, found, old)
            chosen = np.flatnonzero(np.asarray(chosen))
            new = self._checked_rows(left, new)
            left = left[self._swap(keys[left], found, old, new, chosen)]

    def delete(self, keys: Any) -> int:
        """Removes keys, those that are there.

        Args:
          keys: (n,) int64.

        Returns:
          How many there were.
        """
        keys = _checked_keys(keys)
        fields = _fields(keys)
        return sum(
            sum(self._send(parts, lambda pipe, bucket, at: pipe.hdel(bucket, *_chosen(fields, at))))
            for parts in self._batches(keys)
        )

    def size(self) -> int:
        """Returns how many keys there are."""
        return sum(self._send(self._everything(), lambda pipe, bucket, _: pipe.hlen(bucket)))

    def clear(self) -> None:
        """Removes all keys."""
        self._send(self._everything(), lambda pipe, bucket, _: pipe.unlink(bucket))

    def export(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields all keys and rows, in pieces of about keys_sending_size keys, in no order.

        A key that is written or removed meanwhile is in none of the pieces or in one, and all
        others are in one.

        Yields:
          ((m,) int64, (m, row_bytes) uint8).
        """
        for bucket, _ in self._everything():
            seen: set[bytes] = set()
            cursor = -1
            while cursor:
                cursor, part = self._client.hscan(
                    bucket, max(cursor, 0), count=self._keys_at_a_time
                )
                # Redis may tell of one twice while a hash of its grows or shrinks.
                part = {field: row for field, row in part.items() if field not in seen}
                seen.update(part)
                if part:
                    keys = np.frombuffer(b"".join(part), "<i8").astype(np.int64)
                    yield keys, self._joined(list(part.values()))

    def copy_from(self, other: "RedisStore") -> None:
        """Writes all rows of another table into this one, over those of the same keys."""
        for keys, rows in other.export():
            self.put(keys, rows)

    def _batches(self, keys: np.ndarray) -> Iterator[list[tuple[str, np.ndarray]]]:
        """Yields the places of keys by bucket, few at a time, in order within a bucket."""
        buckets = hash_keys(keys) % np.uint64(self.num_buckets)
        order = np.argsort(buckets, kind="stable")
        for start in range(0, len(keys), self._keys_at_a_time):
            places = order[start : start + self._keys_at_a_time]
            cuts = np.flatnonzero(np.diff(buckets[places])) + 1
            yield [(self._bucket(buckets[at[0]]), at) for at in np.split(places, cuts)]

    def _everything(self) -> list[tuple[str, np.ndarray]]:
        nothing = np.empty(0, np.int64)
        return [(self._bucket(number), nothing) for number in range(self.num_buckets)]

    def _bucket(self, number: Any) -> str:
        return f"{self._start}:{number}"

    def _send(
        self,
        parts: list[tuple[str, np.ndarray]],
        command: Callable[[Any, str, np.ndarray], Any],
    ) -> list[Any]:
        """Sends a command for each bucket, all at once, and returns the replies."""
        with self._client.pipeline(transaction=False) as pipe:
            for bucket, at in parts:
                command(pipe, bucket, at)
            return pipe.execute()

    def _swap(
        self,
        keys: np.ndarray,
        found: np.ndarray,
        old: np.ndarray,
        new: np.ndarray,
        chosen: np.ndarray,
    ) -> np.ndarray:
        """Writes the chosen rows that still are as they were, and returns which are not."""
        keys = keys[chosen]
        fields, olds, news = _fields(keys), self._values(old[chosen]), self._values(new[chosen])
        olds[~found[chosen]] = b""
        triples = np.stack([fields, olds, news], axis=1)

        def swap(client: Any, bucket: str, at: np.ndarray) -> Any:
            # Not `eval`, which the pipeline of a cluster lacks.
            return client.execute_command("EVAL", _SWAP, 1, bucket, *triples[at].reshape(-1))

        changed = [chosen[:0]]
        for parts in self._batches(keys):
            if self._is_cluster:
                # Its pipeline sends what got no answer a second time.
                replies = [swap(self._client, bucket, at) for bucket, at in parts]
            else:
                replies = self._send(parts, swap)
            changed += [chosen[at[reply]] for (_, at), reply in zip(parts, replies, strict=True)]
        return np.sort(np.concatenate(changed))

    def _checked_rows(self, keys: np.ndarray, rows: Any) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.shape != (len(keys), self.row_bytes) or rows.dtype != np.uint8:
            raise ValueError(
                f"rows must be ({len(keys)}, {self.row_bytes}) of uint8, a row for each key. "
                f"Received: {rows.shape} of {rows.dtype}."
            )
        return rows

    def _values(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows (n, row_bytes) as bytes, (n,) of objects."""
        return _objects(np.ascontiguousarray(rows), self.row_bytes)

    def _joined(self, values: list[bytes]) -> np.ndarray:
        """Returns values of Redis as rows (n, row_bytes)."""
        data = b"".join(values)
        if len(data) != len(values) * self.row_bytes:
            raise ValueError(
                f"Table {self.name!r} has rows of another length than {self.row_bytes} bytes: "
                "another program wrote them. Clear the table, or use another name."
            )
        return np.frombuffer(data, np.uint8).reshape(-1, self.row_bytes)


def _checked_keys(keys: Any) -> np.ndarray:
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise ValueError(f"keys must be (n,) of int64. Received: {keys.shape} of {keys.dtype}.")
    return keys


def _fields(keys: np.ndarray) -> np.ndarray:
    """Returns keys as Redis has them, (n,) of objects."""
    return _objects(np.ascontiguousarray(keys.astype("<i8", copy=False)), 8)


def _objects(array: np.ndarray, width: int) -> np.ndarray:
    # Not NumPy's own bytes, which lose trailing zeros.
    return np.array(array.reshape(-1).view(f"V{width}").tolist(), object)


def _chosen(objects: np.ndarray, at: np.ndarray) -> list[Any]:
    return objects[at].tolist()
