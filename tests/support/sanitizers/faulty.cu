// Kernels with a fault on purpose: test_sanitizers.py proves by them that faults are found.
#include "platform.cuh"

// Counts items in one cell without an atomic.
SOK_KERNEL(faulty_count)(const SokShare share, i64* count, i64 n) {
  SOK_FOR_EACH(i, n) { *count += 1; }
}
SOK_EXPORT(faulty_count)

// Writes one item too many.
SOK_KERNEL(faulty_end)(const SokShare share, i64* items, i64 n) {
  SOK_FOR_EACH(i, n) { items[i + 1] = i; }
}
SOK_EXPORT(faulty_end)

// Shifts by as many bits as there are.
SOK_KERNEL(faulty_shift)(const SokShare share, i64* items, i64 n) {
  SOK_FOR_EACH(i, n) { items[i] = (i64)1 << (n + 62); }
}
SOK_EXPORT(faulty_shift)
