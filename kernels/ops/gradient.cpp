// The gradient of a pooled lookup of one rank, without Python.
//
// Keys are not compared: the lookup has left their row numbers, and of items that have one equal
// row numbers are equal keys. That holds whatever has become of the rows since. Items of equal keys
// are numbered by first occurrence, and listed, by one thread for each table; kernels sum their
// gradients.
//
// Where something is not as it is in most steps, Python does the whole.
#include "ops/gradient.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>

#include "ops/launch.h"

namespace sok {
namespace {

// What a lookup leaves before the rows of weighted items: OF_CONTEXT of
// sok_lite/bridge/lookup_gradient.py.
constexpr int64_t kOfContext = 4;

// Items of one key that are summed one by one (pooling.cuh).
constexpr int64_t kPiece = 32;

// The most items of a table: their numbers have 32 bits.
constexpr int64_t kMostItems = int64_t{1} << 30;

// A table of more items that has most of a call's is for Python: its kernels group the items of one
// table by several threads.
constexpr int64_t kLong = int64_t{1} << 17;

// How far ahead of an item memory is asked for.
constexpr int64_t kAhead = 16;

// The items of a launch that are a thread's: the first member of every kernel's arguments.
struct Share {
  int64_t from, to, of;
};
using Run = void (*)(const Share* share, const int64_t* words);

// Memory for a whole call. It is counted before it is had: threads of a launch must not fail.
class Scratch {
 public:
  template <class T>
  void Want(T** memory, int64_t count) {
    wanted_.push_back({reinterpret_cast<void**>(memory), size_});
    size_ += (count * static_cast<int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
  }

  void Get() {
    memory_.reset(new char[size_ + kLine]);
    char* first = memory_.get() + kLine - reinterpret_cast<intptr_t>(memory_.get()) % kLine;
    for (const Wanted& each : wanted_) *each.memory = first + each.offset;
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Wanted {
    void** memory;
    int64_t offset;
  };
  std::vector<Wanted> wanted_;
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// The mixer of splitmix64.
uint64_t Mixed(uint64_t number) {
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9u;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBu;
  return number ^ (number >> 31);
}

// One table of a call: its items, and which of them have equal keys.
struct Items {
  Given its;
  const uint32_t* rows = nullptr;
  int64_t row_length = 0, combiner = 0;
  // Whoever sends requests chooses keys, and which rows come together: where they meet in `slots`
  // depends on these.
  uint64_t seed = 0, factor = 1;
  Run combine_items = nullptr;

  // In the order of first occurrence: of each key its row and, of one without, the key itself.
  uint32_t* rows_of_keys = nullptr;
  int64_t* keys = nullptr;
  int64_t num_keys = 0, most_items = 0;  // of one key
  // As of `group_items` (segments.cu), of this table alone.
  int32_t *labels = nullptr, *order = nullptr;
  int64_t* offsets = nullptr;
  // Of each item its row of the batch and its factor; null: item i has row i, and all are 1.
  int32_t* index = nullptr;
  float* factors = nullptr;
  int64_t* splits = nullptr;  // of rows that are equally long, where they are needed
  uint32_t* slots = nullptr;
  int64_t num_slots = 0;

  bool HasFactors() const {
    const bool is_sum = combiner == 0;
    return its.weights || (!is_sum && !IsOneEach());
  }
  bool HasIndex() const { return its.weights || !IsOneEach(); }

  void Want(Scratch* scratch) {
    const int64_t n = its.num_keys;
    for (num_slots = 2; num_slots < 2 * n;) num_slots *= 2;
    scratch->Want(&slots, num_slots);
    scratch->Want(&labels, n);
    scratch->Want(&order, n);
    scratch->Want(&offsets, n + 1);
    if (HasIndex()) scratch->Want(&index, n);
    if (HasFactors()) scratch->Want(&factors, n);
    if (its.weights && !its.splits) scratch->Want(&splits, its.num_rows + 1);
    if (rows_of_keys) return;  // they are noted
    scratch->Want(&rows_of_keys, n);
    scratch->Want(&keys, n);
  }

  void Group() {
    Number();
    List();
    Combine();
  }

  // Copies the keys with these numbers.
  template <class T>
  void GiveKeys(int64_t from, int64_t to, T* out) const {
    for (int64_t key = from; key < to; ++key) {
      out[key] = static_cast<T>(its.keys[order[offsets[key]]]);
    }
  }

 private:
  // Whether every row of the batch is one item.
  bool IsOneEach() const { return !its.splits && row_length == 1; }

  uint64_t SlotOf(int64_t item, int shift) const {
    uint64_t number = rows[item];
    if (number == kNoRow) number = Mixed(static_cast<uint64_t>(its.keys[item]) ^ seed);
    return (number * factor) >> shift;
  }

  // Numbers keys by first occurrence, and counts the items of each.
  void Number() {
    constexpr uint32_t kEmpty = 0xFFFFFFFFu;
    const int64_t n = its.num_keys;
    std::memset(slots, 0xFF, num_slots * sizeof(uint32_t));
    const int shift = 64 - __builtin_ctzll(num_slots);
    num_keys = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(slots + SlotOf(i + kAhead, shift));
      const uint32_t row = rows[i];
      uint64_t slot = SlotOf(i, shift);
      uint32_t key;
      for (; (key = slots[slot]) != kEmpty; slot = (slot + 1) & (num_slots - 1)) {
        if (rows_of_keys[key] == row && (row != kNoRow || keys[key] == its.keys[i])) break;
      }
      if (key == kEmpty) {
        slots[slot] = key = static_cast<uint32_t>(num_keys++);
        rows_of_keys[key] = row;
        keys[key] = its.keys[i];
        offsets[key + 1] = 0;
      }
      labels[i] = static_cast<int32_t>(key);
      ++offsets[key + 1];
    }
  }

  // Lists the items of each key, ascending.
  void List() {
    offsets[0] = 0;
    most_items = 0;
    int64_t next = 0;
    for (int64_t key = 1; key <= num_keys; ++key) {  // the place of an item, and then the end
      const int64_t count = offsets[key];
      most_items = std::max(most_items, count);
      offsets[key] = next;
      next += count;
    }
    for (int64_t i = 0; i < its.num_keys; ++i) {
      order[offsets[labels[i] + 1]++] = static_cast<int32_t>(i);
    }
  }

  // Finds what each item is multiplied by: as `coefficients_of`, sok_lite/engine/pooling.py.
  void Combine() {
    if (!HasIndex()) return;
    const int64_t num_rows = its.num_rows;
    if (its.weights || its.splits) {
      for (int64_t b = 0; splits && b <= num_rows; ++b) splits[b] = b * row_length;
      const int64_t words[] = {Word(its.splits ? its.splits : splits),
                               Word(its.weights),
                               combiner,
                               Word(index),
                               Word(factors),
                               num_rows};
      const Share whole{0, num_rows, num_rows};
      if (num_rows) combine_items(&whole, words);
      return;
    }
    for (int64_t b = 0, i = 0; b < num_rows; ++b) {
      for (const int64_t end = i + row_length; i < end; ++i) index[i] = static_cast<int32_t>(b);
    }
    if (!factors) return;
    const float length = static_cast<float>(row_length);
    std::fill_n(factors, its.num_keys, 1.0f / (combiner == 1 ? length : std::sqrt(length)));
  }
};

// A table is one thread's, which has its first item.
void Group(const Share* share, const int64_t* words) {
  if (share->from == 0) reinterpret_cast<Items*>(words[0])->Group();
}

// Sums the gradients of keys, and gives the keys.
struct Result {
  const Items* items;
  Run sum;
  void* keys;
  bool is_32;
};
void Sum(const Share* share, const int64_t* words) {
  const auto& result = *reinterpret_cast<const Result*>(words[0]);
  result.sum(share, words + 1);
  const Items& items = *result.items;
  const auto part_of = [&](int64_t at) {
    return static_cast<int64_t>(static_cast<__int128>(items.num_keys) * at / share->of);
  };
  const int64_t from = part_of(share->from), to = part_of(share->to);
  if (result.is_32) {
    items.GiveKeys(from, to, static_cast<int32_t*>(result.keys));
  } else {
    items.GiveKeys(from, to, static_cast<int64_t*>(result.keys));
  }
}

// One gradient of one or more tables.
class GradientOfCall {
 public:
  GradientOfCall(const Plan& plan, const std::vector<Array>& arrays, Outputs* outputs)
      : plan_(plan), arrays_(arrays), outputs_(outputs) {}

  bool Run() { return Read() && Note() && Allocate() && SumAll(); }

 private:
  int64_t Count() const { return static_cast<int64_t>(plan_.parts.size()); }

  // Reads the inputs. Returns whether all is as native code takes it.
  bool Read() {
    const int64_t count = Count(), num_arrays = static_cast<int64_t>(arrays_.size());
    int64_t num_weighted = 0, num_numbers = 1;
    for (const Part& part : plan_.parts) {
      num_weighted += part.weight_rows != Rows::kNone;
      num_numbers += (part.rows == Rows::kSparse) + (part.weight_rows == Rows::kSparse);
    }
    const int64_t sources = num_arrays - num_numbers - num_weighted, context = sources - kOfContext;
    if (!plan_.is_pooled || context < count) return false;
    const Array& told = arrays_.back();
    if (told.type != kInt64 || told.size != 3 * count + 1) return false;
    told_ = static_cast<const int64_t*>(told.data);
    if (told_[3 * count] != 1) return false;  // ranks
    // The rows of weighted items and the context lie between the lookup's inputs and its numbers.
    std::vector<Array> inputs(arrays_.begin() + count, arrays_.begin() + context);
    inputs.insert(inputs.end(), arrays_.end() - num_numbers, arrays_.end() - 1);
    inputs_ = std::move(inputs);
    reader_ = std::make_unique<Inputs>(plan_, inputs_, 0, static_cast<int64_t>(inputs_.size()));
    if (!reader_->Read(&given_)) return false;
    if (IsOneTooLong()) return false;
    return ReadRows(arrays_[context]) && AreGradients() && ReadSources(sources);
  }

  // Whether one thread would group one table while most of the others have nothing to do.
  bool IsOneTooLong() const {
    int64_t all = 0, longest = 0;
    for (const Given& its : given_) {
      all += its.num_keys;
      longest = std::max(longest, its.num_keys);
    }
    return longest > kLong && longest / 2 > all / plan_.driver->num_threads;
  }

  bool ReadRows(const Array& rows) {
    int64_t num_items = 0;
    for (const Given& its : given_) num_items += its.num_keys;
    if (rows.type != kInt64 || rows.size != (num_items + 1) / 2) return false;
    const auto* next = static_cast<const uint32_t*>(rows.data);
    items_.resize(given_.size());
    for (size_t i = 0; i < items_.size(); next += given_[i++].num_keys) {
      if (given_[i].num_keys > kMostItems) return false;
      Items& items = items_[i];
      items.its = given_[i];
      items.rows = next;
      items.row_length = plan_.parts[i].row_length;
      items.combiner = plan_.parts[i].combiner;
      items.seed = static_cast<uint64_t>(plan_.driver->seed);
      items.factor = Mixed(items.seed) | 1;
      items.combine_items = reinterpret_cast<sok::Run>(plan_.driver->combine_items.run);
    }
    return true;
  }

  bool AreGradients() const {
    for (size_t i = 0; i < items_.size(); ++i) {
      const Array& grads = arrays_[i];
      const std::vector<int64_t> dims{given_[i].num_rows, plan_.parts[i].dim};
      if (grads.type != kFloat || grads.dims != dims) return false;
    }
    return true;
  }

  bool ReadSources(int64_t number) {
    for (const Part& part : plan_.parts) {
      if (part.weight_rows == Rows::kNone) continue;
      const Array& source = arrays_[number++];
      const std::vector<int64_t> dims{given_[&part - plan_.parts.data()].num_keys, part.dim};
      if (source.type != part.row_type || source.dims != dims) return false;
      if (!WeightGradientOf(part)) return false;
      sources_.push_back(source.data);
    }
    return true;
  }

  // Finds the distinct keys of each table, which its record keeps for the update that follows.
  bool Note() {
    Held held;
    if (!held.Take(plan_, false, kSokReads)) return false;
    // Of a table that comes several times the last gradient is noted.
    std::vector<int64_t> last(plan_.tables.size());
    for (int64_t i = 0; i < Count(); ++i) last[plan_.parts[i].table] = i;
    for (const int64_t i : last) {
      SokGradientRecord& gradient = plan_.parts[i].record->gradient;
      if (gradient.room < given_[i].num_keys) return false;  // Python makes some
      items_[i].rows_of_keys = gradient.room_rows;
      items_[i].keys = gradient.room_keys;
    }
    for (Items& items : items_) items.Want(&scratch_);
    scratch_.Get();
    const Kernel kernel{reinterpret_cast<void*>(&Group), 1};
    Launch launch(kernel);
    for (Items& items : items_) launch.Add(items.its.num_keys, {Word(&items)});
    for (SokTableRecord* table : plan_.tables) table->gradient.size = -1;
    launch.Run(*plan_.driver);
    for (const int64_t i : last) {
      SokGradientRecord& gradient = plan_.parts[i].record->gradient;
      gradient.keys = gradient.room_keys;
      gradient.rows = gradient.room_rows;
      gradient.row_epoch = told_[i];
      gradient.is_complete = told_[Count() + i] == 0;
      gradient.lookup_number = told_[2 * Count() + i];
      gradient.size = items_[i].num_keys;
    }
    return true;
  }

  bool Allocate() {
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!outputs_->Add(kFloat, {items_[i].num_keys, plan_.parts[i].dim})) return false;
    }
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!outputs_->Add(plan_.parts[i].key_type, {items_[i].num_keys})) return false;
    }
    for (const Given& its : given_) {
      if (its.weights && !outputs_->Add(kFloat, {its.num_keys})) return false;
    }
    return true;
  }

  bool SumAll() {
    const Driver& driver = *plan_.driver;
    const size_t count = items_.size();
    std::vector<float*> pieces(count);
    Scratch scratch;
    for (size_t i = 0; i < count; ++i) {
      if (items_[i].most_items <= kPiece) continue;
      scratch.Want(&pieces[i], items_[i].its.num_keys / kPiece * plan_.parts[i].dim);
    }
    scratch.Get();
    std::vector<Result> results(count);
    const Kernel sum{reinterpret_cast<void*>(&Sum), 1 + driver.segment_sums.num_arguments};
    Launch sums(sum), adding(driver.segment_add_pieces);
    for (size_t i = 0; i < count; ++i) {
      const Items& items = items_[i];
      const int64_t n = items.its.num_keys;
      results[i] = {&items, reinterpret_cast<sok::Run>(driver.segment_sums.run),
                    (*outputs_)[count + i], plan_.parts[i].key_type == kInt32};
      const std::array<int64_t, 13> words{Word(arrays_[i].data),
                                          plan_.parts[i].dim,
                                          Word(items.index),
                                          Word(items.factors),
                                          Word(items.offsets),
                                          Word(items.order),
                                          Word(items.labels),
                                          0,
                                          items.num_keys,
                                          0,
                                          n,
                                          Word(pieces[i]),
                                          Word((*outputs_)[i])};
      sums.Add(n, {Word(&results[i])});
      sums.More(words);
      if (!pieces[i]) continue;
      adding.Add(n, {});
      adding.More(words);
    }
    sums.Run(driver);
    adding.Run(driver);
    for (size_t i = 0, number = 0; i < count; ++i) {
      if (items_[i].its.weights) GiveWeightGradient(i, number++);
    }
    return true;
  }

  // Returns the kernel of rows of a type; null: there is none.
  const Kernel* WeightGradientOf(const Part& part) const {
    const Kernel* kernels = plan_.driver->weight_grad;
    switch (part.row_type) {
      case kFloat:
        return kernels;
      case kHalf:
        return kernels + 1;
      case kBfloat16:
        return kernels + 2;
      case kDouble:
        return kernels + 3;
      default:
        return nullptr;
    }
  }

  void GiveWeightGradient(size_t i, size_t number) const {
    const Items& items = items_[i];
    const Part& part = plan_.parts[i];
    Launch launch(*WeightGradientOf(part));
    const int64_t* splits = items.its.splits ? items.its.splits : items.splits;
    launch.Add(items.its.num_rows,
               {Word(arrays_[i].data), Word(sources_[number]), part.dim, 0, 0, Word(splits),
                Word(items.its.weights), part.combiner,
                Word((*outputs_)[2 * items_.size() + number]), items.its.num_rows});
    launch.Run(*plan_.driver);
  }

  const Plan& plan_;
  const std::vector<Array>& arrays_;
  Outputs* outputs_;
  std::vector<Array> inputs_;
  std::unique_ptr<Inputs> reader_;  // what it has converted is read until the end
  std::vector<Given> given_;
  std::vector<Items> items_;
  std::vector<const void*> sources_;  // of each table with weights
  const int64_t* told_ = nullptr;
  Scratch scratch_;
};

}  // namespace

bool Gradient(const Plan& plan, const std::vector<Array>& inputs, Outputs* outputs) {
  return Counted(plan.gradient_work, [&] { return GradientOfCall(plan, inputs, outputs).Run(); });
}

}  // namespace sok
