"""Rows by key in Redis, shared by workers.

A table is `num_buckets` Redis hashes, and one more that describes them:

    sok_lite:<model_tag_runtime>:<name>:<bucket>   8 bytes of a key, little-endian -> its row
    sok_lite:<model_tag_runtime>:<name>:form       row_bytes, row_type, num_buckets,
                                                   column:0, column:1, ...

A key's bucket is its hash modulo num_buckets, so no Redis hash becomes huge, and every node of a
cluster holds a part.

Columns, such as optimizer states, follow a row in the same value, so a change of a key is atomic.
Any worker may add columns at any time. A value may end before columns that its writer did not know;
these have their initial values.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sok_lite.dynamic_embedding.redis_settings import CLUSTER, connect
from sok_lite.engine.hashing import hash_keys

# Sets each row that still equals the expected one ('' for none), and returns the others. ARGV: key,
# expected row and new row, of each.
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

# Overwrites the beginning of each value, and keeps the rest. ARGV: key and beginning, of each.
_PUT = """
for i = 1, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1] .. string.sub(old, #ARGV[i + 1] + 1))
end
"""


# ---- the layout of a value: a row and the columns that follow it ---------------------------------


class Column(NamedTuple):
    """A column behind the rows."""

    name: str
    num_bytes: int
    initial: bytes  # repeated to fill the column

    def text(self) -> str:
        """Returns the column in Redis' form."""
        return f"{self.num_bytes}:{self.initial.hex()}:{self.name}"

    @classmethod
    def of(cls, text: str) -> "Column":
        """Parses the Redis form."""
        num_bytes, initial, name = text.split(":", 2)
        return cls(name, int(num_bytes), bytes.fromhex(initial))


class Layout:
    """The layout of a value: a row, then its columns, at `places`; `num_bytes` in all."""

    def __init__(self, row_bytes: int, columns: Iterable[Column] = ()) -> None:
        self.row_bytes = row_bytes
        self.places: dict[Column, slice] = {}
        self._initial = bytes(row_bytes)
        for column in columns:
            start = len(self._initial)
            self.places[column] = slice(start, start + column.num_bytes)
            self._initial += column.initial * (column.num_bytes // len(column.initial))
        self.num_bytes = len(self._initial)

    def rows(self, values: np.ndarray) -> np.ndarray | None:
        """Returns values, (n,) objects (bytes, or None for a row of 0), with all columns.

        They are (n, num_bytes) uint8, or None if a length is invalid.
        """
        lengths = np.array([0 if value is None else len(value) for value in values], np.int64)
        rows = np.tile(np.frombuffer(self._initial, np.uint8), (len(values), 1))
        ends = {0, self.row_bytes, *(place.stop for place in self.places.values())}
        for length in set(lengths.tolist()):
            if length not in ends:
                return None
            at = np.flatnonzero(lengths == length)
            if length:
                data = b"".join(values[at])
                rows[at, :length] = np.frombuffer(data, np.uint8).reshape(-1, length)
        return rows


def fields_of(keys: np.ndarray) -> np.ndarray:
    """Returns keys as Redis fields, (n,) objects."""
    return objects_of(keys.astype("<i8", copy=False)[:, None])


def objects_of(array: np.ndarray) -> np.ndarray:
    """Returns rows as bytes, (n,) objects."""
    # Not NumPy's bytes, which lose trailing zeros.
    width = array.shape[1] * array.itemsize
    return np.array(array.reshape(-1).view(f"V{width}").tolist(), object)


# ---- the store -----------------------------------------------------------------------------------


class RedisStore:
    """Rows of bytes by key in Redis; thread-safe.

    Nothing is sent twice: if an answer is lost, a redis.RedisError is raised, and the command may
    have been executed.

    Args:
      name: of the table. Stores of the same name and model_tag_runtime are one table.
      num_buckets: for a new table; an existing one keeps its own.
      row_type: describes a row, such as "3 x float32".

    Attributes:
      is_new: whether it was just created.

    Raises:
      ConnectionError: no Redis answers.
      ImportError: the package `redis` is not installed.
      ValueError: the table exists with rows of another length or type.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        name: str,
        row_bytes: int,
        num_buckets: int = 256,
        row_type: str = "bytes",
    ) -> None:
        self.name = name
        self.row_bytes = row_bytes
        self._keys_at_a_time = settings["keys_sending_size"]
        self._start = f"sok_lite:{settings['model_tag_runtime']}:{name}"
        self._is_cluster = settings["redis_connection_mode"] == CLUSTER
        self._client = connect(settings)
        self._form = f"{self._start}:form"
        self._layout = Layout(row_bytes)
        self._adding = threading.Lock()
        # The first of several workers decides.
        self._client.hsetnx(self._form, "num_buckets", num_buckets)
        self._client.hsetnx(self._form, "row_type", row_type)
        self.is_new = bool(self._client.hsetnx(self._form, "row_bytes", row_bytes))
        fields = ("row_bytes", "num_buckets", "row_type")
        found, buckets, kind = self._client.hmget(self._form, *fields)
        if (int(found), kind.decode()) != (row_bytes, row_type):
            self.close()
            raise ValueError(
                f"The Redis has a table {name!r} with rows of {int(found)} bytes ({kind.decode()})."
                f" Expected {row_bytes} bytes ({row_type}). Use another name or model_tag_runtime, "
                "or the same length and type of rows."
            )
        self.num_buckets = int(buckets)

    def close(self) -> None:
        """Closes the connections. The rows stay."""
        self._client.close()

    def has_version(self, model_tag: str) -> bool:
        """Returns whether the table exists for another version of the model."""
        return bool(self._client.exists(f"sok_lite:{model_tag}:{self.name}:form"))

    def place_of(self, column: Column) -> slice:
        """Returns the slice of a column in a value, adding a new column."""
        with self._adding:
            while column not in self._layout.places:
                field = f"column:{len(self._layout.places)}"
                self._client.hsetnx(self._form, field, column.text())
                self._note(self._client.hget(self._form, field))
            return self._layout.places[column]

    def place_of_state(self, name: str, dim: int, initial: float) -> slice:
        """Returns the slice of a state: `dim` float32 with an initial number."""
        return self.place_of(Column(name, 4 * dim, np.float32(initial).tobytes()))

    def get(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads the rows of keys (n,) int64.

        Returns:
          ((n,) bool, found; (n, row and column bytes) uint8: a missing row is 0 with initial
          columns).
        """
        values = self._read_values(keys)
        return values != None, self._rows(values)  # noqa: E711

    def _read_values(self, keys: np.ndarray) -> np.ndarray:
        """Returns the values of keys, (n,) objects: bytes, or None if missing."""
        values, fields = np.empty(len(keys), object), fields_of(keys)
        for parts in self._batches(keys):
            replies = self._send(
                parts, lambda pipe, bucket, at: pipe.hmget(bucket, fields[at].tolist())
            )
            for (_, at), reply in zip(parts, replies, strict=True):
                values[at] = reply
        return values

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows of keys (n,) int64; columns stay as they are. The last of a repeated key
        wins.

        Rows are (n, row_bytes) uint8, or wider with the first columns.
        """
        pairs = np.stack([fields_of(keys), objects_of(rows)], axis=1)
        for parts in self._batches(keys):
            # Not `eval`, which a cluster's pipeline lacks.
            self._send(
                parts,
                lambda pipe, bucket, at: pipe.execute_command(
                    "EVAL", _PUT, 1, bucket, *pairs[at].reshape(-1)
                ),
            )

    def update(
        self,
        keys: np.ndarray,
        function: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[Any, Any]],
    ) -> None:
        """Changes rows atomically as a function of their current values, despite other workers.

        A row that another worker changed meanwhile is read and computed again. A repeated key is
        changed that often, in sequence, one round trip each: callers should merge repeats.

        Args:
          function: takes (m,) positions in `keys`, and the results of `get` for them, read-only.
            Returns (m,) bool, which to write, and rows with columns. It is called until all are
            written.
        """
        left = np.arange(len(keys))
        while len(left):
            values = self._read_values(keys[left])
            old = self._rows(values)
            chosen, new = function(left, values != None, old)  # noqa: E711
            left = left[self._swap(keys[left], values, new, np.flatnonzero(chosen))]

    def delete(self, keys: np.ndarray) -> int:
        """Removes keys (n,) int64; returns how many existed."""
        fields = fields_of(keys)
        return sum(
            sum(self._send(parts, lambda pipe, bucket, at: pipe.hdel(bucket, *fields[at].tolist())))
            for parts in self._batches(keys)
        )

    def size(self) -> int:
        """Returns the number of keys."""
        return sum(self._send(self._everything(), lambda pipe, bucket, _: pipe.hlen(bucket)))

    def clear(self) -> None:
        """Removes all keys."""
        self._send(self._everything(), lambda pipe, bucket, _: pipe.unlink(bucket))

    def export(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (keys (m,) int64, rows and columns (m, bytes) uint8), about keys_sending_size at a
        time.

        In no order. Each key appears once; one written or removed meanwhile may be missing.
        """
        for bucket, _ in self._everything():
            seen: set[bytes] = set()
            cursor = -1
            while cursor:
                cursor, part = self._client.hscan(
                    bucket, max(cursor, 0), count=self._keys_at_a_time
                )
                # Redis may return a field twice while a hash grows or shrinks.
                part = {field: row for field, row in part.items() if field not in seen}
                seen.update(part)
                if part:
                    keys = np.frombuffer(b"".join(part), "<i8").astype(np.int64)
                    yield keys, self._rows(np.array(list(part.values()), object))

    def copy_from(self, other: "RedisStore") -> None:
        """Writes all rows and columns of another table into this one, over existing keys."""
        other._catch_up()
        theirs = other._layout
        places = {column: self.place_of(column) for column in theirs.places}
        for keys, rows in other.export():
            values = self._rows(np.full(len(keys), None))
            values[:, : self.row_bytes] = rows[:, : self.row_bytes]
            for column, place in places.items():
                values[:, place] = rows[:, theirs.places[column]]
            self.put(keys, values)

    def _catch_up(self) -> None:
        """Learns the columns that other workers added."""
        with self._adding:
            while text := self._client.hget(self._form, f"column:{len(self._layout.places)}"):
                self._note(text)

    def _note(self, text: bytes) -> None:
        """Adds the next column from Redis."""
        columns = [*self._layout.places, Column.of(text.decode())]
        self._layout = Layout(self.row_bytes, columns)

    def _batches(self, keys: np.ndarray) -> Iterator[list[tuple[str, np.ndarray]]]:
        """Yields positions of keys by bucket, few at a time, in order within a bucket."""
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
        self, parts: list[tuple[str, np.ndarray]], command: Callable[[Any, str, np.ndarray], Any]
    ) -> list[Any]:
        """Sends a command per bucket, all at once, and returns the replies."""
        with self._client.pipeline(transaction=False) as pipe:
            for bucket, at in parts:
                command(pipe, bucket, at)
            return pipe.execute()

    def _swap(
        self, keys: np.ndarray, old: np.ndarray, new: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        """Writes the chosen rows that are unchanged, and returns which are not."""
        keys, old = keys[chosen], old[chosen]
        old[old == None] = b""  # noqa: E711
        triples = np.stack([fields_of(keys), old, objects_of(new[chosen])], axis=1)

        def swap(client: Any, bucket: str, at: np.ndarray) -> Any:
            # Not `eval`, which a cluster's pipeline lacks.
            return client.execute_command("EVAL", _SWAP, 1, bucket, *triples[at].reshape(-1))

        changed = [chosen[:0]]
        for parts in self._batches(keys):
            if self._is_cluster:
                # A cluster's pipeline resends a command without an answer.
                replies = [swap(self._client, bucket, at) for bucket, at in parts]
            else:
                replies = self._send(parts, swap)
            changed += [chosen[at[reply]] for (_, at), reply in zip(parts, replies, strict=True)]
        return np.sort(np.concatenate(changed))

    def _rows(self, values: np.ndarray) -> np.ndarray:
        """Returns Redis values (bytes or None) as rows with all columns, (n, bytes) uint8."""
        rows = self._layout.rows(values)
        if rows is None:
            self._catch_up()
            rows = self._layout.rows(values)
        if rows is None:
            raise ValueError(
                f"Table {self.name!r} has rows of another length than {self.row_bytes} bytes: "
                "another program wrote them. Clear the table, or use another name."
            )
        return rows
