"""One table of several of the same name: of a key that more than one has, the last one counts."""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from sok_lite.cli.buckets import Buckets, firsts
from sok_lite.cli.errors import WrongUse
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import SIGHTED, Source
from sok_lite.engine.table.joined import joined_facts, joined_states

_RECORD = np.dtype([("key", np.int64), ("place", np.int64)])


class MergedSource(Source):
    """Several sources as one. Keep its Buckets open while it is read.

    It has the states of all; a row of a source without one has its initial value. Stamps and scores
    are kept where all have them, scores only of one strategy: those of two cannot be compared.
    Times are those of the source with most lookups, options those of the last one.

    Args:
      sources: of one name, at least one; the later ones win.

    Raises:
      WrongUse: they differ in dim, dtype or key type. OSError, ValueError: the keys cannot be read,
        or kept in a temporary file.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        last = sources[-1]
        for source in sources:
            _check_alike(source, last)
        self._sources = list(sources)
        self.name, self.dim, self.dtype = last.name, last.dim, last.dtype
        self.key_type = last.key_type
        self._states = {
            f"states.{i}.{state.name}": state
            for i, state in enumerate(joined_states([source.states for source in sources]))
        }
        self.states = tuple(
            StateFacts(tensor, state.name, state.dim, state.initial, state.group)
            for tensor, state in self._states.items()
        )
        strategies = {source.about.facts.get("strategy") for source in sources}
        kept = ("stamps", "scores") if len(strategies) == 1 else ("stamps",)
        self.columns = tuple(
            name for name in kept if all(name in source.columns for source in sources)
        )
        num_rows = [source.num_keys for source in sources]
        num_sighted = [source.about.num_sighted for source in sources]
        total = sum(num_rows) + sum(num_sighted)
        self._buckets = Buckets([_RECORD], [total])
        try:
            path = os.path.join(self._buckets.folder, "kept")
            # A byte of a file for each key: pages that the system may take back.
            self._kept = np.memmap(path, bool, "w+", shape=(max(1, total),))
            self._mark(sum(num_rows))
        except BaseException:
            self.close()
            raise
        self._begins = dict(
            zip(("keys", "sighted_keys"), _begins(num_rows, num_sighted), strict=True)
        )
        self.num_keys = int(np.count_nonzero(self._kept[: sum(num_rows)]))
        facts = joined_facts([dict(source.about.facts) for source in sources])
        sighted = int(np.count_nonzero(self._kept[sum(num_rows) :]))
        self.about = last.about._replace(facts=facts, num_sighted=sighted)

    def close(self) -> None:
        """Removes the temporary files."""
        self._buckets.__exit__(None, None, None)

    def _mark(self, num_rows: int) -> None:
        """Finds out which rows and sightings count: the last row of a key, else its last sighting.

        Args:
          num_rows: keys at places below have a row.
        """
        place, kind = 0, key_dtype(self.key_type)
        for column in ("keys", "sighted_keys"):
            for source in self._sources:
                if column == "sighted_keys" and not source.about.num_sighted:
                    continue
                for keys in source.read(column):
                    records = np.empty(keys.size, _RECORD)
                    records["key"] = kind.to_int64(np, keys)
                    records["place"] = np.arange(place, place + keys.size)
                    self._buckets.add(0, records)
                    place += keys.size
        for (records,) in self._buckets:
            # A key's sightings, then its rows, each as they came: the last one of all counts.
            order = np.lexsort((records["place"], records["place"] < num_rows, records["key"]))
            records = records[order]
            is_last = firsts(records["key"][::-1])[::-1]
            self._kept[records["place"][is_last]] = True

    def read(self, column: str) -> Iterator[np.ndarray]:
        key_column = "sighted_keys" if column in SIGHTED else "keys"
        for i, source in enumerate(self._sources):
            if key_column == "sighted_keys" and not source.about.num_sighted:
                continue
            place = self._begins[key_column][i]
            for piece in self._read(i, source, column):
                kept = self._kept[place : place + len(piece)]
                place += len(piece)
                yield piece[kept]

    def _read(self, i: int, source: Source, column: str) -> Iterator[np.ndarray]:
        state = self._states.get(column)
        if state is None:
            yield from source.read(column)
        elif i in state.tensors:
            yield from source.read(state.tensors[i])
        else:
            for keys in source.read("keys"):
                yield np.full((keys.size, state.dim), state.initial, np.float32)


def _begins(num_rows: list[int], num_sighted: list[int]) -> tuple[list[int], list[int]]:
    """Returns where the rows, and the sightings, of each source begin."""
    begins = np.cumsum([0, *num_rows, *num_sighted]).tolist()
    return begins[: len(num_rows)], begins[len(num_rows) : -1]


def _check_alike(source: Source, last: Source) -> None:
    mine, theirs = (f"{one.key_type} keys, rows of {one.dim} {one.dtype}" for one in (source, last))
    if mine != theirs:
        raise WrongUse(f"tables named {last.name!r} cannot be merged: {mine}, and {theirs}")
