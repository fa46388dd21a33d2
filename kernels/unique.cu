// Distinct keys in the order of their first occurrence, and the items of each group of labels.
//
// unique: keys (n,) -> unique_keys (u,), inverse (n,) with unique_keys[inverse] == keys.
// A scratch hash of item numbers finds equal keys; each slot ends with the smallest item number of
// its key, whatever the order in which threads came, so that the result is always the same.
#include "hash.cuh"

// Finds the scratch slot of every key.
//
// keys    (n,)
// heads   (mask + 1,)  in: -1; out: first item with the slot's key, or -1
// slots   (n,)    out  the slot of keys[i]
SOK_KERNEL(unique_insert)(const SokShare share, const i64* keys, i32* heads, i64 mask, i32* slots,
                          i64 n) {
  SOK_FOR_EACH_BLOCK(first, count, n) {
    i64 start[SOK_BLOCK];
    for (i64 j = 0; j < count; ++j) {
      start[j] = (i64)(sok_hash(keys[first + j]) & (u64)mask);
      sok_prefetch(heads + start[j]);
    }
    for (i64 j = 0; j < count; ++j) {
      i32 item = (i32)(first + j);
      i64 key = keys[item];
      i64 slot = start[j];
      for (;;) {
        i32 head = sok_load(heads + slot);
        if (head < 0) {
          head = sok_cas(heads + slot, (i32)-1, item);
          if (head < 0) break;
        }
        if (keys[head] == key) {
          if (item < head) sok_min(heads + slot, item);
          break;
        }
        slot = (slot + 1) & mask;
      }
      slots[item] = (i32)slot;
    }
  }
}
SOK_EXPORT(unique_insert)

// Counts first occurrences in every block of `block` items.
//
// counts  (ceil(n / block),)  out
SOK_KERNEL(unique_count)(const SokShare share, const i32* slots, const i32* heads, i64* counts,
                         i64 block, i64 n) {
  SOK_FOR_EACH(b, (n + block - 1) / block) {
    i64 end = (b + 1) * block < n ? (b + 1) * block : n;
    i64 count = 0;
    for (i64 i = b * block; i < end; ++i) count += heads[slots[i]] == (i32)i;
    counts[b] = count;
  }
}
SOK_EXPORT(unique_count)

// Numbers the first occurrences and writes their keys.
//
// heads        in: first item of each slot; out: -2 - number of its key, which no item equals
// starts       (ceil(n / block),)  number of the first occurrence that comes first in each block
// unique_keys  (u,)    out
SOK_KERNEL(unique_emit)
(const SokShare share, const i64* keys, const i32* slots, i32* heads, const i64* starts,
 i64* unique_keys, i64 block, i64 n) {
  SOK_FOR_EACH(b, (n + block - 1) / block) {
    i64 end = (b + 1) * block < n ? (b + 1) * block : n;
    i64 number = starts[b];
    for (i64 i = b * block; i < end; ++i) {
      if (sok_load(heads + slots[i]) == (i32)i) {
        unique_keys[number] = keys[i];
        sok_store(heads + slots[i], (i32)(-2 - number));
        ++number;
      }
    }
  }
}
SOK_EXPORT(unique_emit)

// inverse (n,) out: the number of each item's key. May be the same array as slots.
SOK_KERNEL(unique_inverse)(const SokShare share, const i32* slots, const i32* heads, i32* inverse,
                           i64 n) {
  SOK_FOR_EACH(i, n) { inverse[i] = -2 - heads[slots[i]]; }
}
SOK_EXPORT(unique_inverse)

// Counts the items of each group. A worker owns a range of groups and reads every label: no two
// workers write one counter, and the order of items is kept. (The GPU sorts instead.)
//
// labels  (n,)               0 <= label < num_groups
// counts  (num_groups + 1,)  in: zeros; out: counts[g + 1] = items of group g
SOK_KERNEL(group_count)(const SokShare share, const i32* labels, i64* counts, i64 num_groups,
                        i64 n) {
  i64 begin = num_groups, end = 0;
  SOK_FOR_EACH(g, num_groups) {
    if (g < begin) begin = g;
    end = g + 1;
  }
  for (i64 i = 0; i < n; ++i) {
    if (labels[i] >= begin && labels[i] < end) ++counts[labels[i] + 1];
  }
}
SOK_EXPORT(group_count)

// Lists the items of each group, ascending.
//
// cursor  (num_groups,)  in: where each group starts; out: where it ends
// order   (n,)     out   item numbers
SOK_KERNEL(group_fill)(const SokShare share, const i32* labels, i64* cursor, i32* order,
                       i64 num_groups, i64 n) {
  i64 begin = num_groups, end = 0;
  SOK_FOR_EACH(g, num_groups) {
    if (g < begin) begin = g;
    end = g + 1;
  }
  for (i64 i = 0; i < n; ++i) {
    if (labels[i] >= begin && labels[i] < end) order[cursor[labels[i]]++] = (i32)i;
  }
}
SOK_EXPORT(group_fill)

// The last item of each label.
//
// last  (num_labels,)  in: -1; out: the largest item number with that label
SOK_KERNEL(last_occurrence)(const SokShare share, const i32* labels, i32* last, i64 n) {
  SOK_FOR_EACH(i, n) { sok_max(last + labels[i], (i32)i); }
}
SOK_EXPORT(last_occurrence)
