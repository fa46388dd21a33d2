// A kernel with a race on purpose: tests/test_tsan.py proves by it that a race is found.
#include "platform.cuh"

// Counts items in one cell without an atomic.
SOK_KERNEL(racy_count)(i64* count, i64 n) {
  SOK_FOR_EACH(i, n) { *count += 1; }
}
SOK_EXPORT(racy_count)
