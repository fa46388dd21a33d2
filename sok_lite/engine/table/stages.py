"""Changes of several tables at once, each in stages.

What is inserted into a table may have to wait for what a kernel counts: whether all keys found a
place, say. So an insertion is a generator: it yields what is to be done next and is sent what was
counted. Tables that are in the same stage go on together, so that launches are made, and the device
is waited for, as often for a thousand tables as for one.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish


class NewKeys(NamedTuple):
    """Keys that are to be inserted.

    Attributes:
      keys: (n,) int64, distinct and missing.
      lookup_number: number of the lookup that they come with.
      scores: (n,) uint64, what the caller gave for them; None: nothing.
      are_scores: whether those are the scores to have, whatever the strategy.
      values: (m, dim) storage, what their rows begin with; None: the initial values of the keys.
      source: (n,) int32, which of `values` each key has; None: key i the i-th.
      refused_values: (n, dim) storage, without `values`: gets the initial values of keys that are
        refused; None: nobody wants them.
      are_updated: whether they come with an update, which leaves out those that are refused.
    """

    keys: Array
    lookup_number: int
    scores: Array | None = None
    are_scores: bool = False
    values: Array | None = None
    source: Array | None = None
    refused_values: Array | None = None
    are_updated: bool = False


class Admission(NamedTuple):
    """How it is decided which of some new keys get a row now.

    Attributes:
      actions: write which, and count them.
      plan_note: of what was counted, prepares to note what was seen, along with the insertion.
    """

    actions: list[Action]
    plan_note: Callable[[list[int]], list[Action]]


# Prepares what is to follow when new keys have their rows, (n,) uint32.
WithRows = Callable[[Array], list[Action]]


# Settles an insertion of items: takes what was counted, and whether it stays. Without arguments the
# former is read, and it stays if all keys have found slots. It can be done again.
Settle: TypeAlias = Callable[..., None]


class Stage(NamedTuple):
    """The next stage of an insertion.

    Attributes:
      number: the tables with the lowest number go first.
      actions: to be taken together with those of the other tables.
      is_counted: whether what was counted by then is wanted.
    """

    number: int
    actions: list[Action]
    is_counted: bool = False


# The stages of an insertion. Before COMMIT nothing has changed that an exception does not undo.
RESERVE, COMMIT = 0, 1

# It yields stages, and after one with `is_counted` receives the counters of its table.
Stages: TypeAlias = Generator[Stage, list[int], None]


def run(
    backend: Backend,
    counters: Array,
    changes: Mapping[int, Stages],
    extra_actions: Sequence[Sequence[Action]] = (),
) -> dict[int, list[int]]:
    """Makes changes of different tables.

    Args:
      backend: of all of them.
      counters: (num_tables, len(Count)) int64; see engine/table/counters.py.
      changes: by the number of the table. Each gives rows once, all of them at the same time.
      extra_actions: lists of actions to be taken at that time.

    Returns:
      The counters of those tables whose last stage has `is_counted`.

    Raises:
      Whatever a change raises while it prepares. None of those that were to be made at once with
      it is made.
    """
    waiting = {i: next(change) for i, change in changes.items()}
    last: dict[int, list[int]] = {}
    while waiting:
        number = min(stage.number for stage in waiting.values())
        now = {i: stage for i, stage in waiting.items() if stage.number == number}
        others = extra_actions if number == COMMIT else ()
        publish(*(stage.actions for stage in now.values()), *others)
        counted: list[list[int]] = []
        if any(stage.is_counted for stage in now.values()):
            counted = backend.to_host(counters).tolist()
        for i, stage in now.items():
            del waiting[i]
            last.pop(i, None)
            if stage.is_counted:
                last[i] = counted[i]
            try:
                waiting[i] = changes[i].send(last.get(i, []))
            except StopIteration:
                continue
    return last
