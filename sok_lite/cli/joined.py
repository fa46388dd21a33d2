"""One table of several sources, one after the other."""

from collections.abc import Iterator, Sequence

import numpy as np

from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import PENDING_COLUMNS, Source
from sok_lite.engine.table.joined import joined_facts, joined_states


class JoinedSource(Source):
    """Several sources as one: the keys of the first come first, and so on.

    It has the states of all; a row of a source without one has its initial value. Stamps and scores
    are kept where all have them, scores only of one strategy: those of two cannot be compared.
    Times are those of the source with most lookups, options those of the last one.

    Args:
      sources: of one dim, dtype and key type, at least one. Their keys differ.

    Attributes:
      keys_of_parts: keys of each source.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        last = sources[-1]
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
        self.keys_of_parts = tuple(source.num_keys for source in sources)
        self.num_keys = sum(self.keys_of_parts)
        facts = joined_facts([dict(source.about.facts) for source in sources])
        num_pending = sum(source.about.num_pending for source in sources)
        self.about = last.about._replace(facts=facts, num_pending=num_pending)

    def read(self, column: str) -> Iterator[np.ndarray]:
        for i, source in enumerate(self._sources):
            if column not in PENDING_COLUMNS or source.about.num_pending:
                yield from self._read(i, source, column)

    def texts(self) -> dict[int, bytes]:
        return {key: text for source in self._sources for key, text in source.texts().items()}

    def _read(self, i: int, source: Source, column: str) -> Iterator[np.ndarray]:
        state = self._states.get(column)
        if state is None:
            yield from source.read(column)
        elif i in state.tensors:
            yield from source.read(state.tensors[i])
        else:
            for keys in source.read("keys"):
                yield np.full((keys.size, state.dim), state.initial, np.float32)
