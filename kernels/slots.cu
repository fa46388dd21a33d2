// Passes over all slots of an index, for both kinds.
#include "rows.cuh"
#include "slots.cuh"

// Writes the row numbers of keys that have got slots, which no search finds before.
//
// placed  (n,)  address of the slot of each key; 0: it has none
// rows    (n,)
SOK_KERNEL(slots_give_rows)(const SokShare share, const i64* placed, const u32* rows, i64 n) {
  SOK_FOR_EACH(i, n) {
    if (placed[i]) ((Slot*)placed[i])->row = rows[i];
  }
}
SOK_EXPORT(slots_give_rows)

// Lists the rows that are claimed and, for as many keys, writes their row numbers as
// slots_give_rows does.
//
// near, ..., take_far  see ClaimedRows
// placed  (n,)         address of the slot of each key, none is 0; null: there are no keys yet
// rows    (n,)  out    all that are claimed
SOK_KERNEL(slots_claim_rows)
(const SokShare share, const u32* near, i64 take_near, i64 first_new, i64 take_new, const u32* far,
 i64 take_far, const i64* placed, u32* rows, i64 n) {
  const ClaimedRows claimed{near, take_near, first_new, take_new, far, take_far};
  SOK_FOR_EACH(i, n) {
    const u32 row = sok_claimed_row(claimed, i);
    rows[i] = row;
    if (placed) ((Slot*)placed[i])->row = row;
  }
}
SOK_EXPORT(slots_claim_rows)

// Tells items the rows of keys that were inserted by the launch before.
//
// placed  (n,)  address of the slot of an item's key; 0: the item keeps its row
// rows    (n,)  out
SOK_KERNEL(slots_tell_rows)(const SokShare share, const i64* placed, u32* rows, i64 n) {
  // Without a branch, which a CPU could not predict.
  SOK_FOR_EACH(i, n) { rows[i] = *(placed[i] ? &((const Slot*)placed[i])->row : rows + i); }
}
SOK_EXPORT(slots_tell_rows)

// Halves the number of every lookup, so that counting can go on.
//
// slots   (n,)
// scores  (n,)  whose low half is the number of a lookup; null: there are none
SOK_KERNEL(slots_age)(const SokShare share, i64* slots, u64* scores, i64 n) {
  Slot* table = (Slot*)slots;
  SOK_FOR_EACH(i, n) {
    table[i].stamp >>= 1;
    if (scores) scores[i] = (scores[i] & ~0xFFFFFFFFull) | ((scores[i] & 0xFFFFFFFFull) >> 1);
  }
}
SOK_EXPORT(slots_age)

// Multiplies counts by a factor, and rounds them down.
//
// scores      (n,)
// has_epochs  whether a count is the low half of a score (kEpochLfu), and not all of it
SOK_KERNEL(scores_decay)(const SokShare share, u64* scores, i64 has_epochs, f32 factor, i64 n) {
  const u64 epoch = has_epochs ? ~0xFFFFFFFFull : 0;
  SOK_FOR_EACH(i, n) {
    const u64 count = scores[i] & ~epoch;
    scores[i] = (scores[i] & epoch) | (u64)((f64)count * (f64)factor);
  }
}
SOK_EXPORT(scores_decay)
