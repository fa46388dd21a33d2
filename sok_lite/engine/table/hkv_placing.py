"""New keys of a "hybrid" table: they get slots first, perhaps those of others, and then rows."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action
from sok_lite.engine.table.hkv_options import STRATEGIES
from sok_lite.engine.table.index import Index


class Placed(NamedTuple):
    """The slots of keys that were inserted, and what they have evicted.

    Attributes:
      slots: (n,) int64, the address of its slot; 0 for a refused key.
      evicted_keys, evicted_rows, evicted_scores: (n,) int64, uint32, uint64: what was in the slot;
        row NO_ROW where it was free.
    """

    slots: Array
    evicted_keys: Array
    evicted_rows: Array
    evicted_scores: Array


def unplaced(backend: Backend, num_keys: int) -> Placed:
    """Returns memory for what becomes of keys."""
    xp = backend.xp
    return Placed(
        xp.empty(num_keys, np.int64),
        xp.empty(num_keys, np.int64),
        xp.empty(num_keys, np.uint32),
        xp.empty(num_keys, np.uint64),
    )


def plan_reserve(
    index: Index,
    keys: Array,
    lookup_number: int,
    caller_scores: Array | None,
    placed: Placed,
    num_refused: Array,
    *,
    may_evict: bool,
    are_scores: bool = False,
    scores_follow: bool = False,
) -> Action:
    """Prepares to give slots to distinct keys that are not there.

    `plan_commit` gives them row numbers, and the caller changes `size`.

    Args:
      caller_scores: (n,) uint64, increments (kLfu, kEpochLfu) or scores (kCustomized); None: 1 of
        each, or 0 (kCustomized).
      placed: gets what becomes of the keys.
      num_refused: (1,) int64, grows by the keys that are refused.
      may_evict: whether a key takes the place of another where both its buckets are full; else
        it is refused.
      are_scores: whether `caller_scores` are scores, whatever the strategy. Where a program says
        the scores, a key is refused whose score is below all that it could evict.
      scores_follow: whether the program gives keys that come without a score theirs afterwards:
        they are not refused for it.
    """
    n = int(keys.size)
    strategy, epoch = index.score_rule()
    if are_scores and caller_scores is not None:
        strategy = STRATEGIES.index("kCustomized")
    has_score = caller_scores is not None or not scores_follow
    may_refuse = has_score and STRATEGIES[strategy] == "kCustomized"
    return index.prepared(
        *("hkv_insert", n, lookup_number, strategy, epoch, int(may_evict), int(may_refuse)),
        *(caller_scores, keys, *placed, num_refused, n),
    )


def plan_take_back(index: Index, keys: Array, placed: Placed) -> Action:
    """Prepares to undo `plan_reserve` of keys that have evicted none and have no rows yet."""
    n = int(keys.size)
    return index.prepared("hkv_erase", n, keys, placed.slots, n)


def plan_commit(
    backend: Backend, placed: Placed, spare: Array, rows: Array, counts: Array, *, one_each: bool
) -> Action:
    """Prepares to give row numbers to keys that were placed.

    Args:
      spare: (m,) uint32, rows that nobody holds, at least as many as free slots were taken.
      rows: (n,) uint32, gets the row number of each key, or NO_ROW.
      counts: (3,) int64, grow by the spare rows used, the keys placed and those evicted.
      one_each: key i gets spare[i], for m = n keys that have evicted none; else those who need
        one use up the first ones, in no order.
    """
    n = int(rows.size)
    return backend.prepared(
        *("hkv_give_rows", n, placed.slots, placed.evicted_rows),
        *(spare, int(spare.size), int(one_each), rows, counts, n),
    )
