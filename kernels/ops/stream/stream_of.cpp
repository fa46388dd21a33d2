// CUDA's stream of a running operation, which TensorFlow's C API has no function for: TF_GetStream
// knows the streams of pluggable devices only. This is C++ of TensorFlow's, so it is no part of the
// library of operations: sok_lite/native/stream.py compiles it for the installed TensorFlow.
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

// Takes the TF_OpKernelContext of an operation that is running, which is its OpKernelContext.
// Returns null where its device has no stream: on a CPU.
extern "C" __attribute__((visibility("default"))) void* sok_stream_of(void* context) {
  const auto* device = static_cast<tensorflow::OpKernelContext*>(context)->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return nullptr;
  return device->stream()->platform_specific_handle().stream;
}
