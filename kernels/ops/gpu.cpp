#include "ops/gpu.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>

namespace sok {
namespace {

// CUDA's handle of its null stream that waits for others, CU_STREAM_LEGACY; and flags: of an event,
// that it takes no time, and of memory of the host, that every context may use it.
void* const kNullStream = reinterpret_cast<void*>(1);
constexpr unsigned kNoTiming = 2, kPortable = 1;

void Check(int error) {
  if (error) throw std::runtime_error("a call of CUDA's driver has failed");
}

// What calls have used and others may use again: as many as ever ran at a time. None is freed: CUDA
// may have ended before.
std::mutex free_mutex;
std::vector<GpuCall::Reused> free_ones;

GpuCall::Reused Reuse() {
  const std::lock_guard<std::mutex> lock(free_mutex);
  if (free_ones.empty()) return {};
  GpuCall::Reused last = free_ones.back();
  free_ones.pop_back();
  return last;
}

}  // namespace

GpuCall::GpuCall(const Gpu& gpu, void* operation)
    : gpu_(gpu), stream_(gpu.order == Order::kStream ? gpu.stream_of(operation) : kNullStream) {
  if (!stream_) throw std::runtime_error("the operation has no stream");
  Check(gpu_.push_context(gpu_.context));
  reused_ = Reuse();
}

GpuCall::~GpuCall() {
  if (has_begun_) {
    try {
      End();
    } catch (const std::exception&) {  // Python's next call has the error too
    }
  }
  void* context;
  gpu_.pop_context(&context);
  const std::lock_guard<std::mutex> lock(free_mutex);
  free_ones.push_back(reused_);
}

void* GpuCall::Event() {
  if (!reused_.event) Check(gpu_.new_event(&reused_.event, kNoTiming));
  return reused_.event;
}

void* GpuCall::HostMemory(size_t num_bytes) {
  if (reused_.num_bytes < num_bytes) {
    const size_t room = std::max<size_t>(2 * num_bytes, 4096);
    void* memory = nullptr;
    Check(gpu_.new_host_memory(&memory, room, kPortable));
    reused_.memory = memory;  // a smaller one is not missed
    reused_.num_bytes = room;
  }
  return reused_.memory;
}

void GpuCall::Begin() {
  void* event = Event();
  Check(gpu_.order == Order::kStream ? gpu_.record(event, kNullStream)
                                     : gpu_.record_all(gpu_.context, event));
  Check(gpu_.wait(stream_, event, 0));
  has_begun_ = true;
}

void GpuCall::End() {
  has_begun_ = false;
  void* event = Event();
  Check(gpu_.record(event, stream_));
  Check(gpu_.order == Order::kStream ? gpu_.wait(kNullStream, event, 0)
                                     : gpu_.all_wait(gpu_.context, event));
}

// As `CudaBackend._plan_launch` (sok_lite/backend/cuda.py); kernels/parts.cuh says what words
// are.
void GpuCall::Launch(const GpuKernel& kernel, int64_t num_arguments,
                     const std::vector<int64_t>& begin, const std::vector<int64_t>& words) {
  const int64_t num_parts = static_cast<int64_t>(begin.size()) - 1;
  const int64_t most = gpu_.MostParts(num_arguments);
  std::vector<int64_t> blocks;
  for (int64_t first = 0; first < num_parts; first += most) {
    const int64_t count = std::min(most, num_parts - first);
    if (begin[first + count] == begin[first]) continue;
    const int64_t num_words = 1 + count + count * num_arguments;
    const bool is_wide = num_words > gpu_.words;
    const int64_t max_threads = is_wide ? kernel.max_wide : kernel.max_threads;
    const int64_t threads = std::min(gpu_.threads_per_block, max_threads / 32 * 32);
    blocks.clear();
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t lanes = kernel.lanes ? kernel.lanes : threads;
      blocks.push_back(((begin[i + 1] - begin[i]) * lanes + threads - 1) / threads);
    }
    const int64_t total = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
    if (total > gpu_.max_blocks) {
      const double share = static_cast<double>(gpu_.max_blocks) / static_cast<double>(total);
      for (int64_t& each : blocks) {
        if (each) each = std::max<int64_t>(1, static_cast<int64_t>(share * each));
      }
    }
    words_.resize(
        std::max(gpu_.words, gpu_.wide_words));  // CUDA copies as many as the kernel takes
    words_[0] = 0;
    std::partial_sum(blocks.begin(), blocks.end(), words_.begin() + 1);
    std::copy_n(words.begin() + first * num_arguments, count * num_arguments,
                words_.begin() + count + 1);
    int64_t parts = count;
    void* arguments[] = {words_.data(), &parts};
    Check(gpu_.launch(is_wide ? kernel.wide : kernel.narrow, static_cast<unsigned>(words_[count]),
                      1, 1, static_cast<unsigned>(threads), 1, 1, 0, stream_, arguments, nullptr));
    ++num_launches_;
  }
}

void GpuCall::FillZeros(void* memory, int64_t num_bytes) {
  if (num_bytes) Check(gpu_.fill(reinterpret_cast<uint64_t>(memory), 0, num_bytes, stream_));
}

std::vector<int64_t> GpuCall::Read(const int64_t* numbers, int64_t count) {
  const size_t num_bytes = count * sizeof(int64_t);
  void* memory = HostMemory(num_bytes);
  Check(gpu_.copy_to_host(memory, reinterpret_cast<uint64_t>(numbers), num_bytes, stream_));
  Check(gpu_.synchronize(stream_));
  std::vector<int64_t> read(count);
  std::memcpy(read.data(), memory, num_bytes);
  return read;
}

}  // namespace sok
