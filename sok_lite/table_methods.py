"""What a table can do beyond a variable: remove keys, show scores, export parts, count.

Every method acts on the part of this rank and does not communicate. Those that give tensors work
in eager mode and in graphs.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.engine.table import EmbeddingTable, Entries, Statistics
from sok_lite.engine.table.exclusive import alone
from sok_lite.host_call import host_call, on_device
from sok_lite.local_lookup import checked_keys
from sok_lite.tensor import to_array, to_tensor
from sok_lite.variable_spec import alive

# Which entries to take: keys (n,), rows (n, dimension), scores (n,) uint64, all NumPy -> (n,) bool.
Predicate = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


class TableMethods:
    """The methods of a DynamicVariable that its table has and a tf.Variable has not."""

    name: str
    dtype: tf.DType
    _key_type: tf.DType
    _table: EmbeddingTable

    # ---------------------------------------------------------------- looking

    def statistics(self) -> Statistics:
        """Returns sizes and counters of the table: a NamedTuple of numbers, as of now.

        It looks at the whole index. Not for a tf.function, where it would be called once only.
        """
        if tf.inside_function():
            raise RuntimeError(
                f"statistics() of {self.name!r} gives numbers of the moment: call it outside of "
                "the tf.function."
            )
        return on_device(self._table.backend, self._table.statistics)

    def contains(self, keys: Any) -> tf.Tensor:
        """Returns whether keys have a row. It changes nothing.

        Args:
          keys: integers of any shape.

        Returns:
          bool, of the keys' shape.
        """

        def run(table: EmbeddingTable, keys: Array) -> Array:
            # As numbers: not every TensorFlow takes bits of bool from outside.
            return table.contains(keys.reshape(-1)).view(np.uint8).reshape(keys.shape)

        keys = checked_keys(self, keys)
        (found,) = self._call("contains", run, [keys], [tf.uint8], [keys.shape])
        return tf.cast(found, tf.bool)

    def scores(self, keys: Any) -> tf.Tensor:
        """Returns the scores of keys: the lowest is evicted first. It changes nothing.

        Args:
          keys: integers of any shape.

        Returns:
          uint64, of the keys' shape; 0 for a key that has no row. Of kLru, and of an "hbm" table,
          it is the number of the lookup that last saw the key.
        """

        def run(table: EmbeddingTable, keys: Array) -> Array:
            return table.scores(keys.reshape(-1)).reshape(keys.shape)

        keys = checked_keys(self, keys)
        (scores,) = self._call("scores", run, [keys], [tf.uint64], [keys.shape])
        return scores

    def export_if(
        self, predicate: Predicate | None = None, *, min_score: int | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns some of the keys, ascending, and their rows.

        Args:
          predicate: called with some entries at a time, NumPy arrays keys (n,), rows (n, dimension)
            and scores (n,) uint64; returns (n,) bool.
          min_score: keys of this score and above.

        Returns:
          (indices (n,) of the key type, values (n, dimension) of the rows' dtype).

        Raises:
          ValueError: not exactly one of the two is given, or no bools come back.
        """
        if (predicate is None) == (min_score is None):
            raise ValueError(
                "Give `predicate` or `min_score`, one of them. "
                f"Received: predicate={predicate}, min_score={min_score}."
            )
        if min_score is not None and not 0 <= min_score < 2**64:
            raise ValueError(f"`min_score` must be in [0, 2**64). Received: {min_score}.")

        def has_score(entries: Entries) -> Array:
            return entries.scores >= np.uint64(min_score or 0)

        choose = has_score if predicate is None else self._on_host(predicate)
        indices, values = self._call(
            "export_if",
            lambda table: table.export_if(choose),
            [],
            [self._key_type, self.dtype],
            [[None], [None, self._table.dim]],
        )
        return indices, values

    def export_chunks(
        self, num_slots: int = 1 << 20
    ) -> Iterator[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """Yields the whole table in pieces, in no order. Python only, outside of graphs.

        Args:
          num_slots: places of the index that are looked at together: so many keys at most.

        Yields:
          (indices (n,) of the key type, values (n, dimension) of the rows' dtype, scores (n,)
          uint64); n may be 0.

        Raises:
          RuntimeError: the table has changed between two pieces, so that some keys might be
            missing: keys came or went, or rows moved between tiers.
        """
        if num_slots < 1:
            raise ValueError(f"`num_slots` must be at least 1. Received: {num_slots}.")
        table = self._table
        backend = table.backend
        first, version = 0, None

        def chunk() -> tuple[Any, list[tf.Tensor]]:
            now = (table.generation, table.index.num_rehashes, table.size)
            entries = table.export_chunk(first, num_slots)
            return now, [
                to_tensor(entries.keys, self._key_type, backend),
                to_tensor(entries.values, self.dtype, backend),
                to_tensor(entries.scores, tf.uint64, backend),
            ]

        # Looked at once more at the end: a table that has shrunk ends before its keys do.
        is_more = True
        while is_more:
            is_more = first < table.num_slots
            now, (keys, values, scores) = on_device(backend, alone, table, chunk)
            if now != (version or now):
                raise RuntimeError(
                    f"{self.name!r} has changed during export_chunks(). Export it between two "
                    "steps, under sok.inference_mode() if other threads look keys up."
                )
            version = now
            if is_more:
                yield keys, values, scores
            first += num_slots

    # ---------------------------------------------------------------- removal

    def erase(self, keys: Any) -> tf.Tensor:
        """Removes keys with their rows and optimizer states.

        Args:
          keys: integers of any shape; those without a row are skipped.

        Returns:
          Scalar int64, how many were there.
        """
        keys = checked_keys(self, keys)
        return self._count("erase", lambda table, keys: table.erase(keys.reshape(-1)), [keys])

    def erase_if(self, predicate: Predicate) -> tf.Tensor:
        """Removes the keys that a predicate chooses; returns how many, scalar int64.

        Args:
          predicate: see `export_if`. All entries are asked before the first goes.
        """
        choose = self._on_host(predicate)
        return self._count("erase_if", lambda table: table.erase_if(choose), [])

    def expire(self, *, num_lookups: int | None = None, seconds: float | None = None) -> tf.Tensor:
        """Removes keys that were not seen lately; returns how many, scalar int64.

        Args:
          num_lookups: those that none of the last `num_lookups` lookups of this table asked for.
          seconds: those that no lookup asked for within that time, up to about a second. What came
            from a checkpoint counts as seen when it was restored.

        Raises:
          ValueError: not exactly one of the two is given, or it is negative.
        """
        return self._count(
            "expire", lambda table: table.expire(num_lookups=num_lookups, seconds=seconds), []
        )

    def erase_below(self, cutoff: float) -> tf.Tensor:
        """Removes the keys of whose row every |element| < cutoff; returns how many, scalar int64.

        Raises:
          ValueError: the cutoff is not above 0.
        """
        return self._count("erase_below", lambda table: table.erase_below(cutoff), [])

    def clear(self) -> Any:
        """Removes every key and gives the memory back. Returns the operation in a graph."""
        return self._do("clear", lambda table: table.clear(), [])

    def reserve(self, num_keys: int) -> Any:
        """Makes the index large enough for `num_keys` keys. Returns the operation in a graph."""
        return self._do("reserve", lambda table: table.reserve(num_keys), [])

    # ---------------------------------------------------------------- scores and epochs

    def assign_scores(self, keys: Any, scores: Any) -> Any:
        """Sets the scores of the keys that have a row. Returns the operation in a graph.

        Args:
          keys: (n,) integers; of a repeated key the last score counts.
          scores: (n,) non-negative integers; of kLru, numbers of lookups.

        Raises:
          TypeError, ValueError: types or shapes do not fit, or a score is negative.
        """
        keys, scores = checked_keys(self, keys), checked_scores(self.name, scores)
        return self._do(
            "assign_scores", lambda table, k, s: table.assign_scores(k, s), [keys, scores]
        )

    @property
    def epoch(self) -> int:
        """The epoch of kEpochLru and kEpochLfu: keys of an earlier one are evicted first.

        Set it where a new epoch begins. Raises NotImplementedError for an "hbm" table.
        """
        self._check_evicts("epoch")
        return self._table.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if tf.inside_function():
            raise RuntimeError(
                f"The epoch of {self.name!r} would be set once, while the tf.function is traced. "
                "Set it outside of the function."
            )
        self._check_evicts("epoch")
        on_device(self._table.backend, setattr, self._table, "epoch", epoch)

    # ---------------------------------------------------------------- inside

    def _check_evicts(self, what: str) -> None:
        if self._table.keeps_every_key:
            raise NotImplementedError(
                f"{self.name!r} has var_type={self._table.var_type!r} and no {what}: such a table "
                "keeps every key. Make it with var_type='hybrid'."
            )

    def _on_host(self, predicate: Predicate) -> Callable[[Entries], Array]:
        backend, dtype = self._table.backend, self.dtype

        def choose(entries: Entries) -> Array:
            values = backend.to_host(entries.values)
            if dtype == tf.bfloat16:
                values = values.view(dtype.as_numpy_dtype)
            chosen = predicate(
                backend.to_host(entries.keys), values, backend.to_host(entries.scores)
            )
            return backend.from_host(np.asarray(chosen))

        return choose

    def _count(self, what: str, function: Callable[..., int], inputs: Sequence[Any]) -> tf.Tensor:
        (count,) = self._call(
            what,
            lambda table, *arrays: np.array(function(table, *arrays), np.int64),
            inputs,
            [tf.int64],
            [[]],
        )
        return count

    def _do(self, what: str, function: Callable[..., None], inputs: Sequence[Any]) -> Any:
        done = self._call(what, function, inputs, [], [])
        return None if tf.executing_eagerly() else done

    def _call(
        self,
        what: str,
        function: Callable[..., Any],
        inputs: Sequence[tf.Tensor],
        dtypes: Sequence[tf.DType],
        shapes: Sequence[Any],
    ) -> Any:
        """Calls a function of the table and of arrays, now or as an operation of a graph.

        Args:
          function: gives an array, or a tuple of them, or nothing where `dtypes` is empty.
          dtypes, shapes: of the tensors that are made of them.
        """
        reference = weakref.ref(self)
        backend = self._table.backend

        def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            arrays = [to_array(tensor, backend) for tensor in tensors]
            results = function(alive(reference).table, *arrays)
            if not dtypes:
                return ()
            results = results if isinstance(results, tuple) else (results,)
            return [
                tf.constant(result, dtype)
                if result.ndim == 0
                else to_tensor(result, dtype, backend)
                for result, dtype in zip(results, dtypes, strict=True)
            ]

        outputs = host_call(run, inputs, dtypes, backend, f"{what} of {self.name!r}")
        for output, shape in zip(outputs if dtypes else (), shapes, strict=True):
            output.set_shape(shape)
        return outputs


def checked_scores(name: str, scores: Any) -> tf.Tensor:
    """Returns scores as a tensor of integers, or raises TypeError."""
    scores = tf.convert_to_tensor(scores)
    if not scores.dtype.is_integer:
        raise TypeError(
            f"Scores of {name!r} must be integers. Received: dtype {scores.dtype.name}."
        )
    return scores
