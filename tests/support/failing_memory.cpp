// Preloaded into a process: memory runs out when a test says so.
//
// sok_fail_memory(at, for_good, least): from now on the allocation number `at`, of those of `least`
// bytes and more, fails; with for_good != 0 all later ones fail too.
// sok_spare_memory(): none fails any more; returns how many there were.
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <atomic>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

std::atomic<long> fail_at{0};
std::atomic<long> calls{0};
std::atomic<size_t> least_bytes{0};
std::atomic<bool> is_for_good{false};

bool fails(size_t num_bytes) {
  const long at = fail_at.load();
  if (at == 0 || num_bytes < least_bytes.load()) return false;
  const long call = ++calls;
  if (call != at && !(is_for_good.load() && call > at)) return false;
  errno = ENOMEM;
  return true;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

void sok_fail_memory(long at, int for_good, size_t least) {
  calls = 0;
  is_for_good = for_good != 0;
  least_bytes = least;
  fail_at = at;
}

long sok_spare_memory() {
  fail_at = 0;
  return calls;
}

void* malloc(size_t size) { return fails(size) ? nullptr : __libc_malloc(size); }

void* calloc(size_t count, size_t size) {
  return fails(count * size) ? nullptr : __libc_calloc(count, size);
}

void* realloc(void* old, size_t size) { return fails(size) ? nullptr : __libc_realloc(old, size); }

void* aligned_alloc(size_t alignment, size_t size) {
  return fails(size) ? nullptr : __libc_memalign(alignment, size);
}

int posix_memalign(void** memory, size_t alignment, size_t size) {
  if (fails(size)) return ENOMEM;
  *memory = __libc_memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}

void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  using Map = void* (*)(void*, size_t, int, int, int, off_t);
  static const Map map = next<Map>("mmap");
  return fails(size) ? MAP_FAILED : map(address, size, protection, flags, fd, offset);
}

void* mmap64(void* address, size_t size, int protection, int flags, int fd, off64_t offset) {
  return mmap(address, size, protection, flags, fd, offset);
}

int posix_fallocate(int fd, off_t offset, off_t size) {
  using Allocate = int (*)(int, off_t, off_t);
  static const Allocate allocate = next<Allocate>("posix_fallocate");
  return fails(size) ? ENOSPC : allocate(fd, offset, size);
}

int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  return posix_fallocate(fd, offset, size);
}
}
