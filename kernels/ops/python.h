// Python as operations see it: one function of it, called with a frame, from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/lookup.h"
#include "ops/tf_c_api.h"

namespace sok {

// What Python is given of a running operation, and what it keeps of it. Memory that became arrays
// lives as long as they do: Python holds the frame for them, the operation holds it while it runs.
//
// An operation that is asynchronous goes on when Python has returned, until somebody calls `End`.
struct Frame {
  // The memory of an output, and how large it is.
  struct Given {
    void* data;
    int64_t num_bytes;
    bool is_given;
  };

  explicit Frame(TF_OpKernelContext* running, std::function<void()> when_done = {})
      : is_asynchronous(when_done), context(running), done_(std::move(when_done)) {}

  const bool is_asynchronous;
  bool is_on_gpu = false;                 // whether the operation is
  int64_t num_numbers = 0, num_told = 0;  // inputs and outputs at the end that are on the host
  int64_t num_outputs() const { return static_cast<int64_t>(outputs.size()) - num_told; }
  // Held by whoever uses `context` or `outputs`, which threads of an asynchronous operation share.
  std::mutex mutex;
  // Of the running operation; null when it has ended.
  TF_OpKernelContext* context;
  // Inputs and outputs, which have a reference to their memory each.
  std::vector<TF_Tensor*> tensors;
  int64_t num_inputs = 0;
  // The memory of each output, which it may be asked for again: native code may have begun.
  std::vector<Given> outputs;
  // What native code has done of a lookup: Python goes on with it.
  Held held;
  // What Python reads of it, once: how many words there are, the frame, the number of the call,
  // whether memory is a GPU's, how many inputs at the end are on the host, whether the operation is
  // the gradient of another; if native code has begun, addresses of its counters and row numbers;
  // and of each input its address, type, number of dimensions and these.
  std::vector<int64_t> words;
  // Of the last output that could not be had.
  int code = 0;
  std::string error;

  // Has the operation fail, unless it has ended.
  void Fail(int code, const char* text);
  // Gets memory for an output, as `sok_ops_allocate`; null, and `code` says why, if there is none.
  const Given* Allocate(int64_t number, TF_DataType type, const int64_t* dims, int64_t num_dims,
                        int64_t num_bytes);
  // Gets memory on the operation's device, as long as there is the frame; null: there is none.
  void* Temporary(int64_t num_bytes);
  // Has it fail if an output is left out.
  void RequireOutputs();
  // Ends the operation, once; the caller has none of Python's locks, for what waits for the
  // operation may run here.
  void End();

  void Retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Release() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (TF_Tensor* tensor : tensors) TF_DeleteTensor(tensor);
    delete this;
  }

 private:
  std::function<void()> done_;
  std::atomic<int> references_{1};
};

// Calls Python with a frame, and waits for it. Where Python raises, or cannot be entered any more,
// the operation fails; it is done only where Python has come to its end. One that is asynchronous
// is done where Python says so by `sok_ops_end`, and fails where Python has let go of it before.
void EnterPython(Frame* frame, int64_t call);

}  // namespace sok
