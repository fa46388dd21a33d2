"""Memory for the results of all parts of a call: one array, of which each part has a piece."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, overload

import numpy as np

from sok_lite.backend import Array, Backend

Shape = tuple[int, ...]
# Gives (size,) float32, not initialised.
Room = Callable[[int], Array]

# Elements of 4 bytes in a line of memory: each piece begins on one.
LINE = 16


def up_to_line(size: Any) -> Any:
    """Returns how many elements a piece of `size` takes; also of arrays and tensors."""
    return -(-size // LINE) * LINE


class Places(NamedTuple):
    """Where results lie in one array.

    Attributes:
      shapes: of the results.
      starts: where each begins, in elements.
      size: of all of them.
    """

    shapes: Sequence[Shape]
    starts: list[int]
    size: int


def places_of(shapes: Sequence[Shape]) -> Places:
    """Returns the places of results that lie one after the other."""
    sizes = [up_to_line(math.prod(shape)) for shape in shapes]
    *starts, size = accumulate(sizes, initial=0)
    return Places(shapes, starts, size)


class Pieces(Sequence[Array]):
    """Results that lie in one array, cut out of it when they are asked for.

    Attributes:
      whole: (n,) float32, C-contiguous.
      shapes: of the pieces.
      starts: where each begins, in elements.
    """

    def __init__(self, backend: Backend, places: Places, room: Room | None) -> None:
        """Args:
        places: where the pieces lie.
        room: gives the memory; None: the backend.
        """
        self.shapes, self.starts, size = places
        self.whole = backend.xp.empty(size, np.float32) if room is None else room(size)

    def __len__(self) -> int:
        return len(self.shapes)

    @overload
    def __getitem__(self, i: int) -> Array: ...
    @overload
    def __getitem__(self, i: slice) -> list[Array]: ...
    def __getitem__(self, i: int | slice) -> Array | list[Array]:
        if isinstance(i, slice):
            return [self[number] for number in range(*i.indices(len(self)))]
        start, shape = self.starts[i], self.shapes[i]
        return self.whole[start : start + math.prod(shape)].reshape(shape)
