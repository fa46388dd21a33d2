"""New keys of a "hybrid" table: they get slots, perhaps those of others, and rows."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.hkv_options import STRATEGIES

if TYPE_CHECKING:
    from sok_lite.engine.table.hkv_index import HkvIndex


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
    index: "HkvIndex",
    keys: Array,
    lookup_number: int,
    caller_scores: Array | None,
    placed: Placed,
    counts: Array,
    claim: Claim | None = None,
    rows: Array | None = None,
    *,
    are_scores: bool = False,
    scores_follow: bool = False,
) -> Action:
    """Prepares to give slots to distinct keys that are not there. The caller changes `size`.

    Args:
      caller_scores: (n,) uint64, increments (kLfu, kEpochLfu) or scores (kCustomized); None: 1 of
        each, or 0 (kCustomized).
      placed: gets what becomes of the keys.
      counts: (4,) int64, grow by the keys that are refused and, with a claim, by its rows that are
        used, the keys placed and those evicted. Without a claim (1,) is enough.
      claim: rows, at least as many as free slots are taken: those who need one use up the first
        ones, in no order. A key then takes the place of another where both its buckets are full.
        None: it is refused there, and none gets a row, so that no search finds it: that comes with
        `store.plan_list` or `plan_give_rows`.
      rows: (n,) uint32, with a claim, gets the row number of each key, or NO_ROW.
      are_scores: whether `caller_scores` are scores, whatever the strategy. Where a program says
        the scores, a key is refused whose score is below all that it could evict.
      scores_follow: whether the program gives keys that come without a score theirs afterwards:
        they are not refused for it.
    """
    n, may_evict = int(keys.size), 0 if claim is None else 1 + index.looks_full
    strategy, epoch = index.score_rule()
    if are_scores and caller_scores is not None:
        strategy = STRATEGIES.index("kCustomized")
    has_score = caller_scores is not None or not scores_follow
    may_refuse = has_score and STRATEGIES[strategy] == "kCustomized"
    claimed = (None, 0, 0, 0, None, 0) if claim is None else claim.words
    return index.prepared(
        *("hkv_insert", n, lookup_number, strategy, epoch, may_evict, int(may_refuse)),
        *(caller_scores, keys, *placed, *claimed, rows, counts, n),
    )


def plan_take_back(index: "HkvIndex", keys: Array, placed: Placed) -> Action:
    """Prepares to undo `plan_reserve` of keys that have evicted none and have no rows yet."""
    n = int(keys.size)
    return index.prepared("hkv_erase", n, keys, placed.slots, n)
