// How a lookup counts accesses of rows in two tiers: what `RowTiers` of
// sok_lite/engine/rows/tiers.py does in one that moves no row and takes no memory. Who calls this
// has the table's lock.
#ifndef SOK_TABLE_TIERS_H_
#define SOK_TABLE_TIERS_H_

#include "table_record.h"

// As kernels take them: the address of the counts, and whether they are counted now.
struct SokAccesses {
  int64_t counts, is_counting;
};

inline SokAccesses sok_accesses(const SokStoreRecord& store) {
  if (!store.accesses || store.num_far == 0) return {0, 0};
  return {reinterpret_cast<int64_t>(store.accesses->counts), store.accesses->rest <= 0};
}

// Whether each row has a count, if they are counted. If not, Python makes some.
inline bool sok_has_counts(const SokStoreRecord& store) {
  return !store.accesses || store.num_far == 0 || store.accesses->room >= store.num_rows;
}

// Whether rows are to be moved before the next lookup.
inline bool sok_is_pass_due(const SokStoreRecord& store) {
  const SokAccessRecord* its = store.accesses;
  return its && its->lookups >= 8 && 2 * its->looked_up >= store.num_rows;
}

// Adds a lookup that has found so many different rows.
inline void sok_count_lookup(const SokStoreRecord& store, int64_t num_seen) {
  SokAccessRecord* its = store.accesses;
  if (!its) return;
  if (its->rest > 0) {
    its->rest -= num_seen;
  } else if (store.num_far > 0) {
    its->lookups += 1;
    its->looked_up += num_seen;
  }
}

#endif  // SOK_TABLE_TIERS_H_
