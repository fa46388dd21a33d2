// Launches of kernels on a GPU, as native code makes them: on TensorFlow's stream, in order with
// what Python launches.
//
// Tables are used on two streams that do not wait for each other: TensorFlow's, where inputs and
// results are, and CUDA's null stream, where CuPy and Python's launches are. So each call waits on
// the one for what was launched on the other before, and the other waits for what it has launched:
// by events, while the host goes on. Both are done under the locks of the tables. It is right
// whoever comes next, and nothing has to know who came last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sok {

// How the two streams wait for each other.
enum class Order : int64_t {
  // TensorFlow's stream is known, and everything is launched there.
  kStream = 1,
  // It is not: all is launched on the null stream, which waits for all streams of CUDA's context,
  // and these for it.
  kContext = 2
};

// A GPU: functions of CUDA's driver and what they take. Python gives them by their addresses
// (sok_lite/native/gpu.py, in this order), so the library is linked with none of CUDA's, and the
// simulated GPU of the tests takes their place. They return 0, or an error.
struct Gpu {
  int (*launch)(void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned,
                unsigned, unsigned shared_bytes, void* stream, void** arguments, void** extra);
  int (*fill)(uint64_t to, unsigned char value, size_t num_bytes, void* stream);
  int (*copy_to_host)(void* to, uint64_t from, size_t num_bytes, void* stream);
  int (*synchronize)(void* stream);
  int (*new_event)(void** event, unsigned flags);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned flags);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*new_host_memory)(void** to, size_t num_bytes, unsigned flags);
  int (*record_all)(void* context, void* event);  // with `kContext`
  int (*all_wait)(void* context, void* event);
  // Returns the stream of a running operation (ops/stream/stream_of.cpp); with `kStream`.
  void* (*stream_of)(void* operation);
  // Tells the simulated GPU of an operation's memory; null on a real one.
  void (*note)(const void* memory, int64_t num_bytes, int64_t is_input);
  void (*forget)();
  void* context;
  Order order;
  int64_t threads_per_block, max_blocks;
  int64_t words, wide_words;  // that a narrow and a wide launch take; 0: there are no wide ones
  int64_t is_simulated;       // whether memory of TensorFlow's on the host stands for the GPU's

  // The most parts of so many arguments that one launch takes.
  int64_t MostParts(int64_t num_arguments) const {
    return ((words > wide_words ? words : wide_words) - 1) / (1 + num_arguments);
  }
};

// A kernel of a GPU: what `Kernel::run` points to.
struct GpuKernel {
  void *narrow, *wide;            // CUDA's functions
  int64_t lanes;                  // threads that share an item; 0: all of a block
  int64_t max_threads, max_wide;  // of a block
};

// What one call launches on a GPU. Where a function of CUDA's fails it throws: the call is Python's
// then, which has the error of CUDA's again, and says what it is.
class GpuCall {
 public:
  // An event, and memory of the host that a GPU writes.
  struct Reused {
    void* event = nullptr;
    void* memory = nullptr;
    size_t num_bytes = 0;
  };

  GpuCall(const Gpu& gpu, void* operation);
  GpuCall(const GpuCall&) = delete;
  GpuCall& operator=(const GpuCall&) = delete;
  ~GpuCall();

  // Everything that was launched for the tables comes before what this call launches, and so does
  // what TensorFlow's stream still does in memory that it has given: called again after more was
  // had. The call has the tables' locks.
  void Begin();
  // What this call has launched comes before everything that is launched later. It still has the
  // locks.
  void End();

  // begin  (parts + 1,)  the first item of each part, and the number of all
  // words  the arguments of the parts
  void Launch(const GpuKernel& kernel, int64_t num_arguments, const std::vector<int64_t>& begin,
              const std::vector<int64_t>& words);
  void FillZeros(void* memory, int64_t num_bytes);
  // Copies numbers to the host, waits for all that was launched, and returns them.
  std::vector<int64_t> Read(const int64_t* numbers, int64_t count);

  int64_t num_launches() const { return num_launches_; }

 private:
  void* Event();
  void* HostMemory(size_t num_bytes);

  const Gpu& gpu_;
  void* stream_;
  Reused reused_;
  std::vector<int64_t> words_;
  int64_t num_launches_ = 0;
  bool has_begun_ = false;
};

// Something was changed, and then a function of CUDA's has failed: nobody may begin anew.
struct HalfDone {};

}  // namespace sok
