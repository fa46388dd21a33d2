// Python as operations see it: one function of it, called with a frame, from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/tf_c_api.h"

namespace sok {

// What Python is given of a running operation, and what it keeps of it. Memory that became arrays
// lives as long as they do: Python holds the frame for them, the operation holds it while it runs.
struct Frame {
  explicit Frame(TF_OpKernelContext* running) : context(running) {}

  // Of the running operation; null when it has ended.
  TF_OpKernelContext* context;
  // Inputs and outputs, which have a reference to their memory each.
  std::vector<TF_Tensor*> tensors;
  // Whether each output has its memory.
  std::vector<bool> is_given;
  // What Python reads of it, once: how many words there are, the frame, the number of the call,
  // whether memory is a GPU's, how many inputs at the end are on the host, whether the operation is
  // the gradient of another, and of each input its address, type, number of dimensions and these.
  std::vector<int64_t> words;
  // Of the last output that could not be had.
  int code = 0;
  std::string error;

  void Retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Release() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (TF_Tensor* tensor : tensors) TF_DeleteTensor(tensor);
    delete this;
  }

 private:
  std::atomic<int> references_{1};
};

// Calls Python with a frame, and waits for it. Where Python raises, or cannot be entered any more,
// the operation fails; it is done only where Python has come to its end.
void EnterPython(Frame* frame, int64_t call);

}  // namespace sok
