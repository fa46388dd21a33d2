// A simulated GPU: runs one launch at a time, its lanes as fibers of the calling thread.
//
// Several blocks are resident at a time. A lane runs until a switch point: an atomic, a volatile
// access, a vote or a shuffle, and now and then an ordinary access. There the schedule, which a
// seed draws, may go on with any other lane of any warp. Nothing is promised to lanes of a warp but
// what the mask of a vote or a shuffle says: that is the rule of GPUs from sm_70 on.
//
// The memory that lanes of a block share is there from its first use to the end of the block, and
// begins as a pattern.
//
// What a lane has stored may stay unseen by others for a while: in half of all schedules it does,
// in any order, until the lane releases a value, meets others or ends. Where simt_set_stale_loads
// says so, a plain load may give what was there before others have stored, back to the lane's last
// acquire, fence or __syncwarp: a GPU's first cache knows nothing of other multiprocessors.
//
// On demand it is known of a launch which ranges were read and written.
//
// An error ends the launch: it is kept as text and the lanes are dropped where they are.
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

typedef unsigned long long u64;
typedef unsigned int u32;

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

struct SimtIndex {
  u32 x, y, z;
};
SIMT_EXPORT SimtIndex simt_thread, simt_block, simt_block_size, simt_grid_size;
SimtIndex simt_thread, simt_block, simt_block_size, simt_grid_size;

namespace {

constexpr u32 kWarp = 32;
constexpr u32 kMaxThreadsPerBlock = 1024;
constexpr u32 kMaxResidentLanes = 2048;  // as of one multiprocessor
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kArgumentBytes = 64 << 10;  // of a launch
constexpr size_t kMostShared = 48 << 10;     // bytes that the lanes of a block share
constexpr int kPattern = 0xDB;

// Where a lane is: it may run, waits in a call for the lanes of its mask, or has left the kernel.
enum State { kReady, kWaits, kDone };
const char* const kKinds[] = {"__ballot_sync", "__shfl_sync", "__shfl_xor_sync", "__syncwarp",
                              "__syncthreads"};
enum Kind { kBallot, kShuffle, kShuffleXor, kSync, kSyncBlock };

struct Fiber;

// A store of a lane that others need not have seen.
struct Store {
  char* p;
  size_t size;  // up to 8
  u64 before, value;
};

struct Lane {
  u32 block, block_size, thread;
  State state;
  u32 slot;        // in the list of lanes that may run
  Fiber* fiber;    // null before the lane begins and after it is done
  const void* at;  // where in the kernel its last switch point was
  // Of the call it waits in.
  int kind, detail, source;
  u32 mask;
  u64 value;
  std::vector<Store> unseen;  // in the order of the program
  u64 fresh_from;             // its plain loads give older values of stores from then on
};

struct Fiber {
  ucontext_t start;
  jmp_buf context;
  bool has_started;
};

struct Range {
  uintptr_t end;
  std::string what;
  bool is_code;  // of the program, and threadIdx and such: no memory that lanes share
  // What the launch of this number has read [0] and written [1].
  u64 launch;
  uintptr_t low[2], high[2];
};

struct Block {
  u32 number, unfinished, in_sync;
  std::vector<Lane> lanes;                // stay where they are when the block moves
  std::vector<std::vector<char>> shared;  // by the number of the variable
};

std::mutex one_launch;

// Memory that kernels may touch, by its first address.
std::map<uintptr_t, Range> memory;
struct Recent {
  uintptr_t begin, end;
  Range* range;
  bool is_code;
} recent[64];

char* stacks;  // and behind them the arguments of the launch
std::vector<Fiber> fibers(kMaxResidentLanes);
std::vector<Fiber*> free_fibers;

// Of the launch under way.
void (*kernel)(const u64*);
std::vector<u64> arguments;  // their addresses
jmp_buf scheduler;
Lane* now;  // null: the scheduler
std::vector<Block> blocks;
std::vector<Lane*> ready;
std::string fault;

// Its schedule.
bool hides_stores;
enum Order { kAnyLane, kLowestFirst, kHighestFirst, kInTurn } order;
u64 random_state, turn;
u32 switch_one_in;        // switch points
u32 plain_before_switch;  // ordinary accesses, on average
u32 plain_until_switch;   // the rest of them
const Lane* last;         // the lane that ran last
u32 in_a_row;             // switch points that it has come to since
u64 points_without_change, points_of_launch;
u64 idle_limit = 4000000, launch_limit = 400000000;  // of these two

// What is known of the launch when it is over.
u64 launch_number;
bool notes_ranges;
struct Touched {
  uintptr_t begin;
  Range* range;
};
std::vector<Touched> touched;

// Older values: what each word of 8 bytes held before the stores of this launch, the last ones.
struct Older {
  u64 word, time;
  u32 lane;  // that stored
};
constexpr size_t kMostOlder = 8;
u32 stale_one_in;      // schedules; 0: none has stale loads
bool has_stale_loads;  // this one has
bool never_refreshes;  // a plain load always gives the oldest value it may give
u64 store_time;
std::unordered_map<uintptr_t, std::vector<Older>> older_words;
u64 has_older[1024];  // a bit for each word that may be in `older_words`
// What is in memory in truth where the running lane is about to load an older value.
struct Truth {
  char* p;
  size_t size;  // up to 8
  u64 value;
};
std::vector<Truth> truths;

u64 draw() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545F4914F6CDD1Dull;
}
u32 draw_below(u32 n) { return (u32)(((draw() >> 32) * n) >> 32); }

std::string text(const char* format, ...) {
  char buffer[512];
  va_list list;
  va_start(list, format);
  vsnprintf(buffer, sizeof buffer, format, list);
  va_end(list);
  return buffer;
}

std::string call_of(const Lane* lane) {
  if (lane->kind == kSyncBlock) return text("__syncthreads() at [%p]", lane->at);
  return text("%s(mask 0x%08x) at [%p]", kKinds[lane->kind], lane->mask, lane->at);
}

// "block 2, lanes 0-3,7 of warp 1" and where they are, one line for each place. An address in
// brackets is put into words by runtime.py.
std::string where_lanes_are() {
  std::map<std::string, u32> groups;  // what they do -> lanes of the warp
  std::string all;
  int lines = 0;
  for (const Block& block : blocks) {
    for (u32 first = 0; first < block.lanes.size(); first += kWarp) {
      groups.clear();
      for (u32 i = first; i < first + kWarp && i < block.lanes.size(); ++i) {
        const Lane& lane = block.lanes[i];
        if (lane.state == kDone) continue;
        std::string what;
        if (lane.state == kWaits)
          what = "wait in " + call_of(&lane);
        else if (lane.fiber)
          what = text("run, last at [%p]", lane.at);
        else
          what = "have not begun";
        groups[what] |= 1u << (i - first);
      }
      for (const auto& group : groups) {
        if (++lines > 12) continue;
        std::string lanes;
        for (u32 i = 0; i < kWarp; ++i) {
          if (!(group.second >> i & 1)) continue;
          u32 last = i;
          while (last + 1 < kWarp && (group.second >> (last + 1) & 1)) ++last;
          lanes += lanes.empty() ? "" : ",";
          lanes += last == i ? text("%u", i) : text("%u-%u", i, last);
          i = last;
        }
        all += text("\n  block %u, warp %u, lanes %s %s", block.number, first / kWarp,
                    lanes.c_str(), group.first.c_str());
      }
    }
  }
  if (lines > 12) all += text("\n  and %d more", lines - 12);
  return all;
}

// After the load of an older value: memory is again as it is.
void restore_truth() {
  for (; !truths.empty(); truths.pop_back())
    memcpy(truths.back().p, &truths.back().value, truths.back().size);
}

[[noreturn]] void fail(const std::string& what) {
  restore_truth();
  fault = what;
  if (now)
    fault += text("\n  by block %u, thread %u (warp %u, lane %u)", now->block, now->thread,
                  now->thread / kWarp, now->thread % kWarp);
  _longjmp(scheduler, 1);
}

void make_ready(Lane* lane) {
  lane->state = kReady;
  lane->slot = (u32)ready.size();
  ready.push_back(lane);
}

void remove_ready(Lane* lane) {
  ready[lane->slot] = ready.back();
  ready[lane->slot]->slot = lane->slot;
  ready.pop_back();
}

u32 number_of(const Lane* lane) { return lane->block * kMaxThreadsPerBlock + lane->thread; }
// Where the bit of a word is in `has_older`.
u32 bit_of(uintptr_t word) { return (u32)((word >> 3) * 0x9E3779B1u) >> 16; }

// Keeps what is in memory for stale loads, before a lane stores there.
void keep_older(const Lane* lane, const void* p, size_t size) {
  ++store_time;
  const uintptr_t end = (uintptr_t)p + size;
  for (uintptr_t word = (uintptr_t)p & ~(uintptr_t)7; word < end; word += 8) {
    Older older{0, store_time, number_of(lane)};
    memcpy(&older.word, (const void*)word, 8);
    auto& list = older_words[word];
    // A store that was hidden and comes again: its older value was there until now.
    if (!list.empty() && list.back().lane == older.lane && list.back().word == older.word)
      list.pop_back();
    if (list.size() == kMostOlder) list.erase(list.begin());
    list.push_back(older);
    has_older[bit_of(word) >> 6] |= 1ull << (bit_of(word) & 63);
  }
}

// Everybody sees what the lane has stored, or what it has stored in these bytes.
void show_stores(Lane* lane) { lane->unseen.clear(); }
void show_stores_at(Lane* lane, const void* p, size_t size) {
  auto& stores = lane->unseen;
  for (size_t i = stores.size(); i-- > 0;)
    if (stores[i].p < (const char*)p + size && (const char*)p < stores[i].p + stores[i].size)
      stores.erase(stores.begin() + (long)i);
}

// Puts older values where the running lane is about to load, until its next call. It never loads
// anything older than what it has stored itself.
void may_be_stale(const void* p, size_t size) {
  const uintptr_t begin = (uintptr_t)p, end = begin + size;
  for (uintptr_t word = begin & ~(uintptr_t)7; word < end; word += 8) {
    if (!(has_older[bit_of(word) >> 6] >> (bit_of(word) & 63) & 1)) continue;
    auto found = older_words.find(word);
    if (found == older_words.end()) continue;
    bool is_own = false;
    for (const Store& store : now->unseen)
      is_own |= (uintptr_t)store.p < word + 8 && word < (uintptr_t)store.p + store.size;
    if (is_own) continue;
    const auto& list = found->second;
    size_t first = list.size();
    while (first > 0 && list[first - 1].time > now->fresh_from &&
           list[first - 1].lane != number_of(now))
      --first;
    const u32 count = (u32)(list.size() - first);
    if (count == 0 || (!never_refreshes && draw_below(2))) continue;
    const u64 older = list[first + (never_refreshes ? 0 : draw_below(count))].word;
    const uintptr_t from = begin > word ? begin : word, to = end < word + 8 ? end : word + 8;
    Truth truth{(char*)from, to - from, 0};
    memcpy(&truth.value, truth.p, truth.size);
    memcpy(truth.p, (const char*)&older + (from - word), truth.size);
    truths.push_back(truth);
  }
}

// Whatever the running lane loads from now on is no older.
void refresh() { now->fresh_from = store_time; }

// Remembers what is in memory before the running lane stores there. Its stores in one place keep
// their order: an earlier one is seen from now on.
void will_store(const void* p, size_t size) {
  if (!now) return;
  if (has_stale_loads) keep_older(now, p, size);
  if (!hides_stores) return;
  show_stores_at(now, p, size);
  for (size_t done = 0; done < size; done += 8) {
    Store store{(char*)p + done, size - done < 8 ? size - done : 8, 0, 0};
    memcpy(&store.before, store.p, store.size);
    now->unseen.push_back(store);
  }
}

// Takes the lane's stores out of memory, but for those that come to be seen now.
void hide_stores(Lane* lane) {
  auto& stores = lane->unseen;
  for (size_t i = stores.size(); i-- > 0;) {
    memcpy(&stores[i].value, stores[i].p, stores[i].size);
    memcpy(stores[i].p, &stores[i].before, stores[i].size);
  }
  std::vector<Store> kept;
  for (const Store& store : stores) {
    if (draw_below(2))
      kept.push_back(store);
    else
      memcpy(store.p, &store.value, store.size);
  }
  stores = kept;
}

// Puts them back: for others they come after whatever was stored there in between.
void unhide_stores(Lane* lane) {
  for (Store& store : lane->unseen) {
    if (has_stale_loads) keep_older(lane, store.p, store.size);
    memcpy(&store.before, store.p, store.size);
    memcpy(store.p, &store.value, store.size);
  }
}

// Whatever is hidden comes to be seen in the end: lanes may wait for it.
void show_all_stores() {
  for (Block& block : blocks)
    for (Lane& lane : block.lanes) {
      if (&lane != now) unhide_stores(&lane);
      show_stores(&lane);
    }
}

// Leaves the running lane for the scheduler, and comes back when it is this lane's turn again.
void leave() {
  Lane* lane = now;
  if (!lane->unseen.empty()) hide_stores(lane);
  if (_setjmp(lane->fiber->context) == 0) _longjmp(scheduler, 1);
  lane = now;  // a register may not have lived
  if (!lane->unseen.empty()) unhide_stores(lane);
}

void run_lanes() {  // of one fiber, one after another
  for (;;) {
    kernel(arguments.data());
    restore_truth();
    if (!now->unseen.empty()) leave();  // its last stores are under way for a while, too
    show_stores(now);
    now->state = kDone;
    leave();
  }
}

// Notes what the launch reads or writes of a range.
__attribute__((noinline)) void note(uintptr_t first, Range* range, uintptr_t begin, uintptr_t end,
                                    bool is_write) {
  if (range->launch != launch_number) {
    range->launch = launch_number;
    range->low[0] = range->low[1] = ~(uintptr_t)0;
    range->high[0] = range->high[1] = 0;
    touched.push_back(Touched{first, range});
  }
  if (begin < range->low[is_write]) range->low[is_write] = begin;
  if (end > range->high[is_write]) range->high[is_write] = end;
}

// Looks for the range that an access is in. An error where it is nobody's.
__attribute__((noinline)) Recent found(uintptr_t begin, uintptr_t end, bool is_write,
                                       const void* from) {
  const size_t size = end - begin;
  auto next = memory.upper_bound(begin);
  if (next != memory.begin()) {
    auto range = std::prev(next);
    if (end <= range->second.end)
      return {range->first, range->second.end, &range->second, range->second.is_code};
    if (begin < range->second.end + 4096)
      fail(text("%s of %zu bytes at %p, %td bytes behind the end of %s, at [%p]",
                is_write ? "write" : "read", size, (void*)begin,
                (ptrdiff_t)(begin - range->second.end), range->second.what.c_str(), from));
  }
  fail(text("%s of %zu bytes at %p, which is no memory of the device, at [%p]",
            is_write ? "write" : "read", size, (void*)begin, from));
}

// Whether other lanes see the memory that an access is in. An error where it is nobody's.
inline bool check(const void* p, size_t size, bool is_write, const void* from) {
  uintptr_t begin = (uintptr_t)p, end = begin + size;
  if (begin - (uintptr_t)stacks < kMaxResidentLanes * kStackBytes + kArgumentBytes) return false;
  if (!now) return false;  // no launch: the loader runs a module's constructors
  Recent& seen = recent[(begin >> 9) & 63];
  if (begin < seen.begin || end > seen.end) seen = found(begin, end, is_write, from);
  if (seen.is_code) return false;
  if (notes_ranges) note(seen.begin, seen.range, begin, end, is_write);
  return true;
}

// A place where another lane may go on. kChanged: other lanes may see something new.
void point(const void* from, bool changed) {
  if (has_stale_loads) restore_truth();
  if (!now) return;
  now->at = from;
  ++points_of_launch;
  points_without_change = changed ? 0 : points_without_change + 1;
  if (points_without_change % 4096 == 4095) show_all_stores();
  if (points_without_change > idle_limit || points_of_launch > launch_limit) {
    std::string lanes = where_lanes_are();
    now = nullptr;
    fail(text("no progress: %s for %llu switch points%s",
              points_of_launch > launch_limit ? "lanes run" : "nothing has changed",
              points_of_launch > launch_limit ? points_of_launch : points_without_change,
              lanes.c_str()));
  }
  // Whoever does not give way for long may be spinning on what another lane is to do.
  if (order == kInTurn || ++in_a_row > 200 || draw_below(switch_one_in) == 0) leave();
}

void plain_access(const void* p, size_t size, bool is_write, const void* from) {
  if (has_stale_loads) restore_truth();
  const bool is_shared = check(p, size, is_write, from);
  if (--plain_until_switch == 0 && now) {
    points_of_launch += plain_before_switch;
    plain_until_switch = 1 + draw_below(2 * plain_before_switch);
    point(from, is_write);
  }
  if (!is_shared) return;
  if (is_write)
    will_store(p, size);
  else if (has_stale_loads)
    may_be_stale(p, size);
}

void aligned(const void* p, size_t size, const void* from) {
  if (now && (uintptr_t)p % size)
    fail(text("misaligned access of %zu bytes at %p, at [%p]", size, p, from));
}

Lane* neighbour(Lane* lane, u32 i) {  // lane i of its warp; null: the block is too small
  u32 thread = lane->thread / kWarp * kWarp + i;
  return thread < lane->block_size ? lane - lane->thread + thread : nullptr;
}

// Whether all lanes of the mask are in one call; an error where that can never be.
bool all_have_come(Lane* lane, Lane* (&others)[kWarp]) {
  bool all = true;
  for (u32 i = 0; i < kWarp; ++i) {
    if (!(lane->mask >> i & 1)) continue;
    Lane* other = others[i] = neighbour(lane, i);
    if (!other || other->state == kDone)
      fail(text("%s names lane %u, which %s", call_of(lane).c_str(), i,
                other ? "has left the kernel" : "the block does not have"));
    if (other->state != kWaits) {
      all = false;
      continue;
    }
    bool is_same = other->kind == lane->kind && other->detail == lane->detail &&
                   other->mask == lane->mask && other->at == lane->at;
    if (is_same) continue;
    if (other->mask >> (lane->thread % kWarp) & 1)
      fail(text("%s names lane %u, which is in another call: %s", call_of(lane).c_str(), i,
                call_of(other).c_str()));
    all = false;  // it is with other lanes, and may come yet
  }
  return all;
}

void give_results(const Lane* lane, Lane* (&others)[kWarp]) {
  u64 values[kWarp] = {}, results[kWarp] = {};
  u32 votes = 0;
  for (u32 i = 0; i < kWarp; ++i) {
    if (!others[i]) continue;
    values[i] = others[i]->value;
    votes |= (u32)(others[i]->value != 0) << i;
  }
  for (u32 i = 0; i < kWarp; ++i) {
    if (!others[i]) continue;
    if (lane->kind == kBallot) results[i] = votes;
    if (lane->kind != kShuffle && lane->kind != kShuffleXor) continue;
    u32 width = (u32)lane->detail, part = i / width * width;
    u32 from = lane->kind == kShuffle ? part + ((u32)others[i]->source & (width - 1))
                                      : i ^ (u32)others[i]->source;
    // From beyond its part of the warp a lane gets its own value.
    if (from >= part + width) from = i;
    if (!others[from])
      fail(
          text("%s reads from lane %u, which the mask does not name", call_of(lane).c_str(), from));
    results[i] = values[from];
  }
  for (u32 i = 0; i < kWarp; ++i)
    if (others[i]) others[i]->value = results[i];
}

Block& block_of(const Lane* lane) {
  for (Block& block : blocks)
    if (block.number == lane->block) return block;
  abort();
}

void forget_range(uintptr_t address) {
  for (size_t i = touched.size(); i-- > 0;)
    if (touched[i].begin == address) touched.erase(touched.begin() + (long)i);
  memory.erase(address);
  memset(recent, 0, sizeof recent);
}

void forget_shared(Block& block) {
  for (const std::vector<char>& each : block.shared)
    if (!each.empty()) forget_range((uintptr_t)each.data());
  block.shared.clear();
}

void begin_block(u32 number, u32 block_size) {
  blocks.push_back(Block{number, block_size, 0, std::vector<Lane>(block_size), {}});
  Block& block = blocks.back();
  for (u32 i = 0; i < block_size; ++i) {
    block.lanes[i].block = number;
    block.lanes[i].block_size = block_size;
    block.lanes[i].thread = i;
    make_ready(&block.lanes[i]);
  }
}

Lane* choose() {
  // Now and then any lane, in every order: whoever is waited for gets its turn.
  if (order == kAnyLane || in_a_row > 200 || draw_below(16) == 0)
    return ready[draw_below((u32)ready.size())];
  if (order == kInTurn) return ready[turn++ % ready.size()];
  // The list is not sorted: the best of a few keeps the order roughly, and quickly.
  Lane* best = ready[0];
  for (u32 i = 1; i < 4; ++i) {
    Lane* other = ready[draw_below((u32)ready.size())];
    bool is_lower =
        other->block != best->block ? other->block < best->block : other->thread < best->thread;
    if (is_lower == (order == kLowestFirst)) best = other;
  }
  return best;
}

void make_fiber(Fiber* fiber, char* stack) {
  getcontext(&fiber->start);
  fiber->start.uc_stack.ss_sp = stack;
  fiber->start.uc_stack.ss_size = kStackBytes;
  fiber->start.uc_link = nullptr;
  makecontext(&fiber->start, run_lanes, 0);
  fiber->has_started = false;
}

void make_fibers() {
  if (!stacks)
    stacks =
        (char*)mmap(nullptr, kMaxResidentLanes * kStackBytes + kArgumentBytes,
                    PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  free_fibers.clear();
  for (u32 i = 0; i < kMaxResidentLanes; ++i) {
    make_fiber(&fibers[i], stacks + i * kStackBytes);
    free_fibers.push_back(&fibers[i]);
  }
}

void copy_arguments(const u64* cells, const u64* sizes, size_t count) {
  char* next = stacks + kMaxResidentLanes * kStackBytes;
  const char* end = next + kArgumentBytes;
  arguments.clear();
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] > (size_t)(end - next)) abort();
    arguments.push_back((u64)memcpy(next, (const void*)cells[i], sizes[i]));
    next += (sizes[i] + 15) / 16 * 16;
  }
}

void draw_schedule(u64 seed) {
  random_state = seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull;
  random_state |= !random_state;
  for (int i = 0; i < 8; ++i) draw();
  order = (Order)draw_below(4);
  hides_stores = draw_below(2);
  const u32 switches[] = {1, 2, 8, 64}, plain[] = {1u << 20, 1u << 20, 512, 32};
  switch_one_in = switches[draw_below(4)];
  plain_before_switch = plain[draw_below(4)];
  plain_until_switch = 1 + draw_below(2 * plain_before_switch);
  turn = in_a_row = 0;
  last = nullptr;
  points_without_change = points_of_launch = 0;
  // Not drawn: the schedules of a seed are the same with and without stale loads.
  const u64 bits = (seed + 1) * 0x9E3779B97F4A7C15ull >> 24;
  has_stale_loads = stale_one_in && (bits >> 1) % stale_one_in == 0;
  never_refreshes = bits & 1;
  if (!older_words.empty()) {
    older_words.clear();
    memset(has_older, 0, sizeof has_older);
  }
  store_time = 0;
}

// Runs a lane until it leaves, and does what follows from it.
void resume(Lane* lane) {
  if (lane != last) in_a_row = 0;
  last = now = lane;
  simt_thread.x = lane->thread;
  simt_block.x = lane->block;
  if (!lane->fiber) {
    lane->fiber = free_fibers.back();
    free_fibers.pop_back();
  }
  if (_setjmp(scheduler) == 0) {
    if (lane->fiber->has_started) _longjmp(lane->fiber->context, 1);
    lane->fiber->has_started = true;
    setcontext(&lane->fiber->start);
  }
}

void finish(Lane* lane) {
  remove_ready(lane);
  free_fibers.push_back(lane->fiber);
  lane->fiber = nullptr;
  points_without_change = 0;
  if (block_of(lane).in_sync) {
    fault = text("__syncthreads() waits for thread %u of block %u, which has left the kernel%s",
                 lane->thread, lane->block, where_lanes_are().c_str());
    return;
  }
  for (u32 i = 0; i < kWarp; ++i) {
    Lane* other = neighbour(lane, i);
    if (other && other->state == kWaits && (other->mask >> (lane->thread % kWarp) & 1)) {
      fault = text("%s names lane %u, which has left the kernel%s", call_of(other).c_str(),
                   lane->thread % kWarp, where_lanes_are().c_str());
      return;
    }
  }
}

void run_launch(u32 grid, u32 block_size) {
  std::vector<u32> numbers(grid);
  for (u32 i = 0; i < grid; ++i) numbers[i] = i;
  for (u32 i = grid; i > 1; --i) std::swap(numbers[i - 1], numbers[draw_below(i)]);
  const u32 resident = 1 + draw_below(kMaxResidentLanes / block_size);
  u32 begun = 0;
  while (fault.empty()) {
    while (begun < grid && blocks.size() < resident) begin_block(numbers[begun++], block_size);
    if (blocks.empty()) return;
    if (ready.empty()) {
      fault = "no progress: every lane waits" + where_lanes_are();
      return;
    }
    resume(choose());
    Lane* lane = now;
    now = nullptr;
    if (!fault.empty()) return;
    if (lane->state != kDone) continue;
    finish(lane);
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i].number != lane->block) continue;
      if (--blocks[i].unfinished == 0) {
        forget_shared(blocks[i]);
        blocks.erase(blocks.begin() + (long)i);
      }
      break;
    }
  }
}

}  // namespace

// What the lanes of a mask do together; comes back when all of them have come.
SIMT_EXPORT u64 simt_together(int kind, int detail, u32 mask, u64 value, int source) {
  restore_truth();
  Lane* lane = now;
  if (kind == kSync) show_stores(lane);  // votes and shuffles order no memory
  lane->at = __builtin_return_address(0);
  lane->kind = kind;
  lane->detail = detail;
  lane->mask = mask;
  lane->value = value;
  lane->source = source;
  if (!(mask >> (lane->thread % kWarp) & 1))
    fail(text("%s does not name its own lane", call_of(lane).c_str()));
  remove_ready(lane);
  lane->state = kWaits;
  Lane* others[kWarp] = {};
  if (all_have_come(lane, others)) {
    give_results(lane, others);
    points_without_change = 0;
    for (Lane* other : others)
      if (other) make_ready(other);
  }
  leave();
  if (kind == kSync) refresh();
  return lane->value;
}

// What the lanes of a block do together.
SIMT_EXPORT void simt_sync_block() {
  restore_truth();
  Lane* lane = now;
  Block& block = block_of(lane);
  show_stores(lane);
  lane->at = __builtin_return_address(0);
  lane->kind = kSyncBlock;
  lane->mask = 0;
  remove_ready(lane);
  lane->state = kWaits;
  if (block.unfinished < block.lanes.size())
    fail(text("%s, where lanes have left the kernel", call_of(lane).c_str()));
  for (const Lane& other : block.lanes)
    if (block.in_sync && other.state == kWaits && other.kind == kSyncBlock && other.at != lane->at)
      fail(text("%s, where thread %u is in another: %s", call_of(lane).c_str(), other.thread,
                call_of(&other).c_str()));
  if (++block.in_sync == block.lanes.size()) {
    block.in_sync = 0;
    points_without_change = 0;
    for (Lane& other : block.lanes) make_ready(&other);
  }
  leave();
  refresh();
}

// Where a variable is that the lanes of a block share; `number` says which one of the program.
SIMT_EXPORT void* simt_shared(u32 number, size_t size) {
  Block& block = block_of(now);
  if (block.shared.size() <= number) block.shared.resize(number + 1);
  std::vector<char>& variable = block.shared[number];
  if (variable.empty()) {
    size_t all = size;
    for (const auto& each : block.shared) all += each.size();
    if (all > kMostShared) fail(text("%zu bytes of shared memory: a block has 48 KiB", all));
    variable.assign(size, (char)kPattern);
    memory[(uintptr_t)variable.data()] = Range{(uintptr_t)variable.data() + size,
                                               text("what block %u shares", block.number),
                                               false,
                                               0,
                                               {},
                                               {}};
    memset(recent, 0, sizeof recent);
  }
  return variable.data();
}

#define SIMT_ATOMIC(name, type, parameters, next)          \
  SIMT_EXPORT type name parameters {                       \
    const void* from = __builtin_return_address(0);        \
    point(from, false);                                    \
    aligned(p, sizeof(type), from);                        \
    check(p, sizeof(type), true, from);                    \
    show_stores_at(now, p, sizeof(type));                  \
    if (has_stale_loads) keep_older(now, p, sizeof(type)); \
    const type old = *p;                                   \
    *p = next;                                             \
    if (*p != old) points_without_change = 0;              \
    return old;                                            \
  }
SIMT_ATOMIC(simt_cas64, u64, (u64 * p, u64 expected, u64 desired), old == expected ? desired : old)
SIMT_ATOMIC(simt_cas32, u32, (u32 * p, u32 expected, u32 desired), old == expected ? desired : old)
SIMT_ATOMIC(simt_add64, u64, (u64 * p, u64 v), old + v)
SIMT_ATOMIC(simt_add32, u32, (u32 * p, u32 v), old + v)
SIMT_ATOMIC(simt_min32, int, (int* p, int v), v < old ? v : old)
SIMT_ATOMIC(simt_max32, int, (int* p, int v), v > old ? v : old)

// Before a release; the store itself follows.
SIMT_EXPORT void simt_release(const void* p, size_t size) {
  const void* from = __builtin_return_address(0);
  show_stores(now);
  point(from, true);
  aligned(p, size, from);
  check(p, size, true, from);
}

SIMT_EXPORT u64 simt_acquire64(const u64* p) {
  const void* from = __builtin_return_address(0);
  point(from, false);
  aligned(p, sizeof *p, from);
  check(p, sizeof *p, false, from);
  refresh();
  return *p;
}

SIMT_EXPORT void simt_fence() {
  restore_truth();
  show_stores(now);
  refresh();
}

// What g++ puts before every access under -fsanitize=thread.
#define SIMT_ACCESS(size)                                                       \
  SIMT_EXPORT void __tsan_read##size(void* p) {                                 \
    aligned(p, size, __builtin_return_address(0));                              \
    plain_access(p, size, false, __builtin_return_address(0));                  \
  }                                                                             \
  SIMT_EXPORT void __tsan_write##size(void* p) {                                \
    aligned(p, size, __builtin_return_address(0));                              \
    plain_access(p, size, true, __builtin_return_address(0));                   \
  }                                                                             \
  SIMT_EXPORT void __tsan_unaligned_read##size(void* p) {                       \
    plain_access(p, size, false, __builtin_return_address(0));                  \
  }                                                                             \
  SIMT_EXPORT void __tsan_unaligned_write##size(void* p) {                      \
    plain_access(p, size, true, __builtin_return_address(0));                   \
  }                                                                             \
  SIMT_EXPORT void __tsan_volatile_read##size(void* p) {                        \
    point(__builtin_return_address(0), false);                                  \
    aligned(p, size, __builtin_return_address(0));                              \
    check(p, size, false, __builtin_return_address(0));                         \
  }                                                                             \
  SIMT_EXPORT void __tsan_volatile_write##size(void* p) {                       \
    point(__builtin_return_address(0), true);                                   \
    aligned(p, size, __builtin_return_address(0));                              \
    if (check(p, size, true, __builtin_return_address(0))) will_store(p, size); \
  }
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
SIMT_EXPORT void __tsan_read_range(void* p, size_t size) {
  plain_access(p, size, false, __builtin_return_address(0));
}
SIMT_EXPORT void __tsan_write_range(void* p, size_t size) {
  plain_access(p, size, true, __builtin_return_address(0));
}
SIMT_EXPORT void __tsan_init() {}

SIMT_EXPORT void simt_add_memory(uintptr_t address, size_t size, const char* what, int is_code) {
  std::lock_guard<std::mutex> lock(one_launch);
  memory[address] = Range{address + size, what, is_code != 0, 0, {}, {}};
}

SIMT_EXPORT void simt_remove_memory(uintptr_t address) {
  std::lock_guard<std::mutex> lock(one_launch);
  forget_range(address);
}

SIMT_EXPORT void simt_set_limits(u64 idle, u64 launch) {
  idle_limit = idle;
  launch_limit = launch;
}

// In one of how many schedules plain loads may give older values; 0: in none.
SIMT_EXPORT void simt_set_stale_loads(u32 one_in) {
  std::lock_guard<std::mutex> lock(one_launch);
  stale_one_in = one_in;
}

SIMT_EXPORT void simt_note_ranges(int is_wanted) {
  std::lock_guard<std::mutex> lock(one_launch);
  notes_ranges = is_wanted != 0;
}

// What the last launch has touched, where that is noted: for each range its address, and first and
// last address + 1 that were read and written; the last two are 0 where nothing was. Returns how
// many there are, of which up to `most` are written.
SIMT_EXPORT size_t simt_touched(u64 (*out)[5], size_t most) {
  std::lock_guard<std::mutex> lock(one_launch);
  for (size_t i = 0; i < touched.size() && i < most; ++i) {
    const Range& range = *touched[i].range;
    out[i][0] = touched[i].begin;
    for (int k = 0; k < 2; ++k) {
      out[i][1 + 2 * k] = range.high[k] ? range.low[k] : 0;
      out[i][2 + 2 * k] = range.high[k];
    }
  }
  return touched.size();
}

// Runs a launch with arguments of these addresses and sizes. Returns 0, or the length of what went
// wrong, which is written to `error`.
SIMT_EXPORT size_t simt_launch(void (*call)(const u64*), const u64* cells, const u64* sizes,
                               size_t num_arguments, u32 grid, u32 block_size, u64 seed,
                               char* error, size_t error_size) {
  std::lock_guard<std::mutex> lock(one_launch);
  if (!stacks) make_fibers();
  kernel = call;
  copy_arguments(cells, sizes, num_arguments);
  fault.clear();
  touched.clear();
  ++launch_number;
  simt_block_size = {block_size, 1, 1};
  simt_grid_size = {grid, 1, 1};
  draw_schedule(seed);
  run_launch(grid, block_size);
  for (Block& block : blocks) forget_shared(block);
  blocks.clear();
  ready.clear();
  if (fault.empty()) return 0;
  make_fibers();  // lanes were dropped where they were
  snprintf(error, error_size, "%s", fault.c_str());
  return fault.size();
}
