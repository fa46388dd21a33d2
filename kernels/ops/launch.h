// Launches of kernels, as native code makes them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <utility>
#include <vector>

#include "ops/gpu.h"
#include "ops/plan.h"

namespace sok {

template <class T>
int64_t Word(T* address) {
  return reinterpret_cast<int64_t>(address);
}

// Returns a number as a kernel takes it, which has an i64 or an f32.
inline int64_t WordOf(double value, bool is_integer) {
  if (is_integer) return static_cast<int64_t>(value);
  const float rounded = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
}

// A launch: the members of SokLaunch (cpu_runtime.cpp).
class Launch {
 public:
  explicit Launch(const Kernel& kernel) : kernel_(kernel) {}

  void Add(int64_t num_items, std::initializer_list<int64_t> words) {
    begin_.push_back(begin_.back() + num_items);
    words_.insert(words_.end(), words);
  }

  // Adds words to the last part.
  template <class Words>
  void More(const Words& words) {
    words_.insert(words_.end(), std::begin(words), std::end(words));
  }

  // gpu  what launches on a GPU; null: the kernel is one of a CPU
  void Run(const Driver& driver, GpuCall* gpu = nullptr) const {
    const int64_t total = begin_.back(), grain = driver.grain;
    if (total == 0) return;  // there may be no kernel
    if (gpu) {
      const auto& its = *static_cast<const GpuKernel*>(kernel_.run);
      return gpu->Launch(its, kernel_.num_arguments, begin_, words_);
    }
    const int64_t workers = std::clamp<int64_t>(total / grain, 1, driver.num_threads);
    const int64_t pieces = std::clamp<int64_t>(total / workers / grain, 1, driver.pieces);
    const int64_t launch[] = {Word(kernel_.run),
                              Word(begin_.data()),
                              Word(words_.data()),
                              static_cast<int64_t>(begin_.size()) - 1,
                              kernel_.num_arguments,
                              workers,
                              pieces,
                              grain < 64 ? 0 : grain,
                              driver.may_spin};
    driver.launch(launch);
  }

 private:
  const Kernel& kernel_;
  std::vector<int64_t> begin_{0}, words_;
};

// Launches of several kernels, in the order in which these come first.
class Launches {
 public:
  Launch& Of(const Kernel& kernel) {
    for (auto& [run, launch] : all_) {
      if (run == kernel.run) return launch;
    }
    return all_.emplace_back(kernel.run, Launch(kernel)).second;
  }
  void Run(const Driver& driver, GpuCall* gpu) const {
    for (const auto& [run, launch] : all_) launch.Run(driver, gpu);
  }

 private:
  std::vector<std::pair<void*, Launch>> all_;
};

// Where an index is, as searches take it.
inline std::array<int64_t, 7> PlaceOf(const SokIndexRecord& index) {
  return {index.directory, index.hashing,   index.side,       index.is_scored,
          index.bucket,    index.empty_key, index.reclaim_key};
}

}  // namespace sok
