"""The methods of a table, whatever its index, on one page.

A lookup searches first. Only missing keys are then deduplicated, admitted, given rows and inserted,
so that index and rows grow by what is new, and a lookup of known keys writes nothing but when they
were last seen.

A change checks its arguments and allocates all memory that it needs; then it changes index, rows
and counters, while Ctrl-C waits. So a call that raises leaves the table as before the call, or as
after it. Two exceptions: the table may have grown, and keys that it has may count as seen.
"""

from sok_lite.engine.table import export as exports
from sok_lite.engine.table import find as finding
from sok_lite.engine.table import history, remove, write
from sok_lite.engine.table import summary as summaries
from sok_lite.engine.table.base import TableBase


class EmbeddingTable(TableBase):
    """Rows by key. Every method may be called from several threads; calls are serialized.

    Keys are integer arrays (n,) of the table's key type, or anything NumPy makes such an array of;
    they may repeat and every value of the type is legal. Methods return arrays of the backend. A
    method that raises or is interrupted has done nothing or everything.
    """

    @property
    def num_slots(self) -> int:
        """Number of slots that `export_chunk` can read. It changes when the table grows."""
        return self.index.num_slots

    # ---------------------------------------------------------------- lookups

    find = finding.find
    contains = finding.contains
    scores = finding.scores
    read_state = finding.read_state
    mark_seen_search = finding.mark_seen_search
    find_or_insert = finding.find_or_insert
    lookup = finding.lookup
    lookup_and_evict = finding.lookup_and_evict

    # ---------------------------------------------------------------- writes

    insert_or_assign = write.insert_or_assign
    assign = write.assign
    assign_state = write.assign_state
    accumulate = write.accumulate
    accum_or_assign = write.accum_or_assign
    assign_scores = write.assign_scores
    decay_scores = write.decay_scores
    reserve = write.reserve

    # ---------------------------------------------------------------- content

    export_chunk = exports.export_chunk
    chunks = exports.chunks
    export_rows = exports.export_rows
    export = exports.export
    export_if = exports.export_if
    num_zero_rows = exports.num_zero_rows
    shrunk_keys = exports.shrunk_keys
    summary = summaries.summary
    facts = summaries.facts
    statistics = summaries.statistics
    totals = summaries.totals
    seen_lately = summaries.seen_lately

    # ---------------------------------------------------------------- history of keys

    counts = history.counts
    times = history.times
    pending_keys = history.pending_keys
    changed_since = history.changed_since
    export_since = history.export_since
    log_removals = history.log_removals
    removed_since = history.removed_since
    first_removal_since = history.first_removal_since
    forget_removals = history.forget_removals

    # ---------------------------------------------------------------- removals

    erase = remove.erase
    erase_if = remove.erase_if
    expire = remove.expire
    erase_below = remove.erase_below
    clear = remove.clear
