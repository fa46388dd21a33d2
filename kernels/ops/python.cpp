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
};

Functions python;
// Python's own: called with the number of a call's words and a capsule that holds the frame; called
// with an exception, gives (code, bytes); and the exceptions of calls whose caller takes them.
Object entry, describe, raised;

const char kCapsule[] = "sok_lite.frame";

void ReleaseCapsule(Object capsule) {
  static_cast<Frame*>(python.pointer(capsule, kCapsule))->Release();
}

void Fail(TF_OpKernelContext* context, int code, const char* text) {
  TF_Status* status = TF_NewStatus();
  TF_SetStatus(status, static_cast<TF_Code>(code), text);
  TF_OpKernelContext_Failure(context, status);
  TF_DeleteStatus(status);
}

// Takes the exception that Python has raised, and fails with what Python says of it.
void FailAsRaised(TF_OpKernelContext* context, int64_t call) {
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
    Fail(context, static_cast<int>(python.as_long(python.item(described, 0))), bytes);
  } else {
    Fail(context, TF_CANCELLED, "A call of sok_lite's was interrupted.");
  }
  python.clear();  // of an interrupt that came meanwhile
  for (Object object : {described, type, value, traceback}) {
    if (object) python.decref(object);
  }
}

}  // namespace

void EnterPython(Frame* frame, int64_t call) {
  if (!entry || python.is_finalizing()) {
    Fail(frame->context, TF_CANCELLED, "Python has ended, and with it the tables of sok_lite.");
    return;
  }
  const int state = python.ensure();
  frame->Retain();
  Object capsule = python.capsule(frame, kCapsule, ReleaseCapsule);
  if (!capsule) frame->Release();
  Object address = python.integer(reinterpret_cast<int64_t>(frame->words.data()));
  Object result = capsule && address ? python.call(entry, address, capsule, nullptr) : nullptr;
  if (result) {
    python.decref(result);
    if (std::find(frame->is_given.begin(), frame->is_given.end(), false) != frame->is_given.end()) {
      Fail(frame->context, TF_INTERNAL, "A call of sok_lite's has left out an output.");
    }
  } else {
    FailAsRaised(frame->context, call);
  }
  if (address) python.decref(address);
  if (capsule) python.decref(capsule);
  python.release(state);
}

}  // namespace sok

extern "C" {

// Tells the library of Python: the addresses of `Functions`, and three objects that live on.
__attribute__((visibility("default"))) void sok_ops_python(const void* const* functions,
                                                           void* entry, void* describe,
                                                           void* raised) {
  static_assert(sizeof(sok::Functions) == 16 * sizeof(void*), "one address each");
  __builtin_memcpy(&sok::python, functions, sizeof(sok::Functions));
  sok::describe = describe;
  sok::raised = raised;
  sok::entry = entry;
}

// Writes the addresses of the memory of some outputs, which follow each other, of a running operation.
// Returns how many are given: fewer than `count` where one cannot be had, and `sok_ops_error` says
// why. All have as many dimensions, which lie one output after another.
__attribute__((visibility("default"))) int64_t sok_ops_allocate(
    sok::Frame* frame, int64_t first, int64_t count, const int64_t* dtypes,
    const int64_t* num_bytes, const int64_t* dims, int64_t num_dims, int64_t* addresses) {
  const int64_t num_outputs = static_cast<int64_t>(frame->is_given.size());
  if (!frame->context || first < 0 || first + count > num_outputs) {
    frame->code = TF_INTERNAL;
    frame->error = frame->context ? "there is no such output" : "the operation has ended";
    return 0;
  }
  TF_Status* status = TF_NewStatus();
  int64_t i = 0;
  for (; i < count; ++i) {
    const int index = static_cast<int>(first + i);
    TF_Tensor* tensor =
        TF_AllocateOutput(frame->context, index, static_cast<TF_DataType>(dtypes[i]),
                          dims + i * num_dims, static_cast<int>(num_dims), num_bytes[i], status);
    if (TF_GetCode(status) != TF_OK) {
      frame->code = TF_GetCode(status);
      frame->error = TF_Message(status);
      break;
    }
    frame->tensors.push_back(tensor);
    frame->is_given[index] = true;
    addresses[i] = reinterpret_cast<int64_t>(TF_TensorData(tensor));
  }
  TF_DeleteStatus(status);
  return i;
}

// Returns the code of the last output that could not be had, and writes the reason.
__attribute__((visibility("default"))) int sok_ops_error(const sok::Frame* frame, char* text,
                                                         int64_t size) {
  std::snprintf(text, size, "%s", frame->error.c_str());
  return frame->code;
}

}  // extern "C"
