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
