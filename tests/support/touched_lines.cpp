// Notes which lines of 64 bytes the kernels of the simulated GPU read and write.
//
// It stands between them and scheduler.cpp: a library that is loaded before them for everybody gets
// their calls, and passes them on. touched_lines.py says what is memory of the device and when a
// launch begins.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include <map>
#include <unordered_set>

typedef unsigned long long u64;
typedef unsigned int u32;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr uintptr_t kLine = 64;

void* scheduler;
std::map<uintptr_t, uintptr_t> memory;  // of the device: where each array begins and ends
uintptr_t begin, end;                   // of the array that was touched last
std::unordered_set<uintptr_t> lines[2];
uintptr_t last[2];

bool is_of_device(uintptr_t p) {
  if (p - begin < end - begin) return true;
  auto next = memory.upper_bound(p);
  if (next == memory.begin()) return false;
  --next;
  if (p >= next->second) return false;
  begin = next->first, end = next->second;
  return true;
}

void note(const void* p, size_t size, int is_write) {
  const uintptr_t from = (uintptr_t)p / kLine, to = ((uintptr_t)p + size - 1) / kLine;
  if (from == last[is_write] && to == from) return;
  if (!is_of_device((uintptr_t)p)) return;
  for (uintptr_t line = from; line <= to; ++line) lines[is_write].insert(line);
  last[is_write] = to;
}

template <class Function>
Function real(const char* name) {
  return (Function)dlsym(scheduler, name);
}

}  // namespace

// scheduler: the library of scheduler.cpp, which is loaded already.
EXPORT int touched_open(const char* path) {
  scheduler = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  return scheduler != nullptr;
}
EXPORT void touched_add_memory(uintptr_t address, size_t size) { memory[address] = address + size; }
EXPORT void touched_remove_memory(uintptr_t address) {
  memory.erase(address);
  begin = end = 0;
}
EXPORT void touched_restart() {
  for (int is_write = 0; is_write < 2; ++is_write) lines[is_write].clear(), last[is_write] = 0;
}
EXPORT size_t touched_lines(int is_write) { return lines[is_write].size(); }

#define PASS_ON(name, is_write, size)                      \
  EXPORT void name(void* p) {                              \
    static const auto next = real<void (*)(void*)>(#name); \
    note(p, size, is_write);                               \
    next(p);                                               \
  }
#define PASS_ON_ALL(size)                        \
  PASS_ON(__tsan_read##size, 0, size)            \
  PASS_ON(__tsan_write##size, 1, size)           \
  PASS_ON(__tsan_unaligned_read##size, 0, size)  \
  PASS_ON(__tsan_unaligned_write##size, 1, size) \
  PASS_ON(__tsan_volatile_read##size, 0, size)   \
  PASS_ON(__tsan_volatile_write##size, 1, size)
PASS_ON_ALL(1)
PASS_ON_ALL(2)
PASS_ON_ALL(4)
PASS_ON_ALL(8)
PASS_ON_ALL(16)

#define PASS_ON_RANGE(name, is_write)                              \
  EXPORT void name(void* p, size_t size) {                         \
    static const auto next = real<void (*)(void*, size_t)>(#name); \
    note(p, size, is_write);                                       \
    next(p, size);                                                 \
  }
PASS_ON_RANGE(__tsan_read_range, 0)
PASS_ON_RANGE(__tsan_write_range, 1)

EXPORT void simt_point(const void* p, size_t size, int is_write) {
  static const auto next = real<void (*)(const void*, size_t, int)>("simt_point");
  note(p, size, is_write);
  next(p, size, is_write);
}

// An atomic reads and writes.
#define PASS_ON_ATOMIC(name, type, parameters, ...)           \
  EXPORT type name parameters {                               \
    static const auto next = real<type(*) parameters>(#name); \
    note(p, sizeof(type), 0), note(p, sizeof(type), 1);       \
    return next(__VA_ARGS__);                                 \
  }
PASS_ON_ATOMIC(simt_cas64, u64, (u64 * p, u64 expected, u64 desired), p, expected, desired)
PASS_ON_ATOMIC(simt_cas32, u32, (u32 * p, u32 expected, u32 desired), p, expected, desired)
PASS_ON_ATOMIC(simt_add64, u64, (u64 * p, u64 v), p, v)
PASS_ON_ATOMIC(simt_add32, u32, (u32 * p, u32 v), p, v)
PASS_ON_ATOMIC(simt_min32, int, (int* p, int v), p, v)
PASS_ON_ATOMIC(simt_max32, int, (int* p, int v), p, v)
