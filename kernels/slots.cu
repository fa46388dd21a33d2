// Passes over all slots of an index, for both kinds.
#include "slots.cuh"

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
