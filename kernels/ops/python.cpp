// Entering Python. Python's functions are given by addresses (sok_lite/native/callbacks.py): all of
// them are of the stable ABI, so one library serves every version, and it is linked with none.
#include "ops/python.h"

#include <algorithm>
#include <cstdio>

namespace sok {
namespace {

using Object = void*;

// The order is that of sok_lite/native/callbacks.py.
struct Functions {
  int (*ensure)();                                          // PyGILState_Ensure
  void (*release)(int);                                     // PyGILState_Release
  int (*is_finalizing)();                                   // Py_IsFinalizing
  void (*decref)(Object);                                   // Py_DecRef
  Object (*capsule)(void*, const char*, void (*)(Object));  // PyCapsule_New
  void* (*pointer)(Object, const char*);                    // PyCapsule_GetPointer
  Object (*integer)(long long);                             // PyLong_FromLongLong
  long (*as_long)(Object);                                  // PyLong_AsLong
  Object (*call)(Object, ...);                              // PyObject_CallFunctionObjArgs
  void (*fetch)(Object*, Object*, Object*);                 // PyErr_Fetch
  void (*normalize)(Object*, Object*, Object*);             // PyErr_NormalizeException
  void (*clear)();                                          // PyErr_Clear
  int (*set_traceback)(Object, Object);                     // PyException_SetTraceback
  int (*set_item)(Object, Object, Object);                  // PyDict_SetItem
  Object (*item)(Object, long);                             // PyTuple_GetItem, borrowed
  char* (*bytes)(Object);                                   // PyBytes_AsString
  void* (*save_thread)();                                   // PyEval_SaveThread
  void (*restore_thread)(void*);                            // PyEval_RestoreThread
};

Functions python;
// Python's own: called with the address of a call's words, a capsule that holds the frame and, if
// the operation is asynchronous, one that lets it run; called with an exception, gives (code,
// bytes); and the exceptions of calls whose caller takes them.
Object entry, describe, raised;

const char kCapsule[] = "sok_lite.frame", kRunning[] = "sok_lite.running";
const char kInterrupted[] = "A call of sok_lite's was interrupted.";

void ReleaseCapsule(Object capsule) {
  static_cast<Frame*>(python.pointer(capsule, kCapsule))->Release();
}

// Nobody can end the operation any more: it has ended, or nobody will.
void ReleaseRunning(Object capsule) {
  auto* frame = static_cast<Frame*>(python.pointer(capsule, kRunning));
  void* thread = python.save_thread();
  frame->Fail(TF_CANCELLED, kInterrupted);
  frame->End();
  frame->Release();
  python.restore_thread(thread);
}

// Returns a capsule that holds a frame, null where Python raises.
Object Hold(Frame* frame, const char* name, void (*release)(Object)) {
  frame->Retain();
  Object capsule = python.capsule(frame, name, release);
  if (!capsule) frame->Release();
  return capsule;
}

// Takes the exception that Python has raised, and fails with what Python says of it.
void FailAsRaised(Frame* frame, int64_t call) {
  Object type = nullptr, value = nullptr, traceback = nullptr;
  python.fetch(&type, &value, &traceback);
  python.normalize(&type, &value, &traceback);
  if (value && traceback) python.set_traceback(value, traceback);
  // An eager call has an odd number: its caller raises the exception itself.
  if (value && call % 2 != 0) {
    Object number = python.integer(call);
    if (number) {
      python.set_item(raised, number, value);
      python.decref(number);
    }
  }
  Object described = value ? python.call(describe, value, nullptr) : nullptr;
  Object text = described ? python.item(described, 1) : nullptr;
  const char* bytes = text ? python.bytes(text) : nullptr;
  if (bytes) {
    frame->Fail(static_cast<int>(python.as_long(python.item(described, 0))), bytes);
  } else {
    frame->Fail(TF_CANCELLED, kInterrupted);
  }
  python.clear();  // of an interrupt that came meanwhile
  for (Object object : {described, type, value, traceback}) {
    if (object) python.decref(object);
  }
}

}  // namespace

void Frame::Fail(int code, const char* text) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!context) return;
  TF_Status* status = TF_NewStatus();
  TF_SetStatus(status, static_cast<TF_Code>(code), text);
  TF_OpKernelContext_Failure(context, status);
  TF_DeleteStatus(status);
}

const Frame::Given* Frame::Allocate(int64_t number, TF_DataType type, const int64_t* dims,
                                    int64_t num_dims, int64_t num_bytes) {
  if (!context || number < 0 || number >= static_cast<int64_t>(outputs.size())) {
    code = TF_INTERNAL;
    error = context ? "there is no such output" : "the operation has ended";
    return nullptr;
  }
  Given& given = outputs[number];
  if (given.is_given && given.num_bytes == num_bytes) return &given;  // by native code
  // TensorFlow ends the process where it cannot count the elements.
  int64_t size = 1;
  for (int64_t i = 0; i < num_dims; ++i) {
    if (!__builtin_mul_overflow(size, dims[i], &size)) continue;
    code = TF_RESOURCE_EXHAUSTED;
    error = "no memory has as many elements";
    return nullptr;
  }
  TF_Status* status = TF_NewStatus();
  TF_Tensor* tensor = TF_AllocateOutput(context, static_cast<int>(number), type, dims,
                                        static_cast<int>(num_dims), num_bytes, status);
  code = TF_GetCode(status);
  if (code != TF_OK) error = TF_Message(status);
  TF_DeleteStatus(status);
  if (code != TF_OK) return nullptr;
  tensors.push_back(tensor);
  given = {TF_TensorData(tensor), num_bytes, true};
  return &given;
}

void* Frame::Temporary(int64_t num_bytes) {
  constexpr TF_DataType kBytes = 4;  // uint8
  TF_AllocatorAttributes on_device{sizeof on_device, 0};
  TF_Status* status = TF_NewStatus();
  TF_Tensor* tensor = TF_AllocateTemp(context, kBytes, &num_bytes, 1, &on_device, status);
  const bool is_given = TF_GetCode(status) == TF_OK;
  TF_DeleteStatus(status);
  if (!is_given) return nullptr;
  tensors.push_back(tensor);
  return TF_TensorData(tensor);
}

void Frame::RequireOutputs() {
  mutex.lock();
  const bool is_complete =
      std::all_of(outputs.begin(), outputs.end(), [](const Given& each) { return each.is_given; });
  mutex.unlock();
  if (!is_complete) Fail(TF_INTERNAL, "A call of sok_lite's has left out an output.");
}

void Frame::End() {
  std::function<void()> done;
  mutex.lock();
  context = nullptr;
  done.swap(done_);
  mutex.unlock();
  if (done) done();
}

std::atomic<int64_t> entries{0};

void EnterPython(Frame* frame, int64_t call) {
  entries.fetch_add(1, std::memory_order_relaxed);
  if (!entry || python.is_finalizing()) {
    frame->Fail(TF_CANCELLED, "Python has ended, and with it the tables of sok_lite.");
    frame->End();
    return;
  }
  const int state = python.ensure();
  Object capsule = Hold(frame, kCapsule, ReleaseCapsule);
  Object running =
      capsule && frame->is_asynchronous ? Hold(frame, kRunning, ReleaseRunning) : nullptr;
  Object address = python.integer(reinterpret_cast<int64_t>(frame->words.data()));
  const bool is_ready = capsule && address && (running || !frame->is_asynchronous);
  // The first null ends the arguments.
  Object result = is_ready ? python.call(entry, address, capsule, running, nullptr) : nullptr;
  const bool has_returned = result;
  if (!has_returned) {
    FailAsRaised(frame, call);
  } else if (!frame->is_asynchronous) {
    frame->RequireOutputs();
  }
  for (Object object : {result, address, capsule, running}) {
    if (object) python.decref(object);
  }
  python.release(state);
  if (!has_returned || !frame->is_asynchronous) frame->End();
}

}  // namespace sok

extern "C" {

// Tells the library of Python: the addresses of `Functions`, and three objects that live on.
__attribute__((visibility("default"))) void sok_ops_python(const void* const* functions,
                                                           void* entry, void* describe,
                                                           void* raised) {
  static_assert(sizeof(sok::Functions) == 18 * sizeof(void*), "one address each");
  __builtin_memcpy(&sok::python, functions, sizeof(sok::Functions));
  sok::describe = describe;
  sok::raised = raised;
  sok::entry = entry;
}

// Writes the addresses of the memory of some outputs, which follow each other, of a running
// operation. Returns how many are given: fewer than `count` where one cannot be had, and
// `sok_ops_error` says why. All have as many dimensions, which lie one output after another.
__attribute__((visibility("default"))) int64_t sok_ops_allocate(
    sok::Frame* frame, int64_t first, int64_t count, const int64_t* dtypes,
    const int64_t* num_bytes, const int64_t* dims, int64_t num_dims, int64_t* addresses) {
  const std::lock_guard<std::mutex> lock(frame->mutex);
  int64_t i = 0;
  for (; i < count; ++i) {
    const sok::Frame::Given* given = frame->Allocate(first + i, static_cast<TF_DataType>(dtypes[i]),
                                                     dims + i * num_dims, num_dims, num_bytes[i]);
    if (!given) break;
    addresses[i] = reinterpret_cast<int64_t>(given->data);
  }
  return i;
}

// Returns how often operations have entered Python.
__attribute__((visibility("default"))) int64_t sok_ops_entries() { return sok::entries; }

// Returns the TF_OpKernelContext of a running operation; null when it has ended.
__attribute__((visibility("default"))) void* sok_ops_context(sok::Frame* frame) {
  const std::lock_guard<std::mutex> lock(frame->mutex);
  return frame->context;
}

// Ends an asynchronous operation: as done, or failed where `code` is not 0. Only the first call of
// a frame does something. What waits for the operation may run here.
__attribute__((visibility("default"))) void sok_ops_end(sok::Frame* frame, int code,
                                                        const char* text) {
  if (code != TF_OK) {
    frame->Fail(code, text);
  } else {
    frame->RequireOutputs();
  }
  frame->End();
}

// Returns the code of the last output that could not be had, and writes the reason.
__attribute__((visibility("default"))) int sok_ops_error(const sok::Frame* frame, char* text,
                                                         int64_t size) {
  std::snprintf(text, size, "%s", frame->error.c_str());
  return frame->code;
}

}  // extern "C"
