"""Changes of several tables at once, each in stages.

What is inserted into a table may have to wait for what a kernel counts: whether all keys found a
place, say. So an insertion is a generator: it yields what is to be done next and is sent what was
counted. Tables that are in the same stage go on together, so that launches are made, and the device
is waited for, as often for a thousand tables as for one.
"""

from collections.abc import Generator, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish


class Count(IntEnum):
    """What the kernels of an insertion count, by its place among the counters of a table."""

    ADMITTED = 0  # new keys that may have a row
    FIRST_SEEN = 1  # new keys whose sightings are counted from now on
    REFUSED = 2  # keys that found no slot, whenever they looked for one
    USED = 3  # rows that were taken of those claimed
    PLACED = 4  # keys that got a slot
    EVICTED = 5  # keys that lost theirs
    FORGOTTEN = 6  # keys whose sightings are counted no more
    ABSENT = 7  # items of the call whose keys have no row


class Stage(NamedTuple):
    """What is to be done next.

    Attributes:
      number: the tables with the lowest number go first.
      actions: to be taken together with those of the other tables.
      is_counted: whether what was counted by then is wanted.
    """

    number: int
    actions: list[Action]
    is_counted: bool = False


# What an insertion may come to. Before `GIVE` nothing has changed that an exception does not undo.
PLACE, GIVE = 0, 1

# Is sent the counters of its table where it has asked for them.
Stages: TypeAlias = Generator[Stage, list[int], None]


def new_counters(backend: Backend, num_tables: int) -> Array:
    """Returns counters for `run`: (num_tables, len(Count)) int64, zeros."""
    return backend.xp.zeros((num_tables, len(Count)), int)


def counter(counters: Array, first: Count, last: Count | None = None) -> Array:
    """Returns one of the counters (len(Count),) of a table, or several, as kernels take them."""
    return counters[first : (first if last is None else last) + 1]


def run(backend: Backend, counters: Array, changes: Sequence[Stages]) -> None:
    """Makes changes of different tables.

    Args:
      backend: of all of them.
      counters: (len(changes), len(Count)) int64, from `new_counters`.

    Raises:
      Whatever a change raises while it prepares. None of those that were to be made at once with
      it is made.
    """
    waiting = {i: next(change) for i, change in enumerate(changes)}
    while waiting:
        number = min(stage.number for stage in waiting.values())
        now = {i: stage for i, stage in waiting.items() if stage.number == number}
        publish(*(stage.actions for stage in now.values()))
        counted: list[list[int]] = []
        if any(stage.is_counted for stage in now.values()):
            counted = backend.to_host(counters).tolist()
        for i in now:
            del waiting[i]
        for i, stage in now.items():
            try:
                waiting[i] = changes[i].send(counted[i] if stage.is_counted else [])
            except StopIteration:
                continue
