// TensorFlow's operations on tables, over its C API: one library for every supported version.
//
// All have one form. `handles` are the tables' resources, by which TensorFlow orders operations and
// tapes find the tables. `call` is the number by which Python knows what is asked for: an input and
// not an attribute, for TensorFlow keeps an eager kernel for every value of an attribute for ever.
// `inputs` and `outputs` are where the tables are; `numbers` and `told` are on the host.
#include "ops/python.h"
#include "ops/tf_c_api.h"

namespace {

using sok::Frame;

// Of what Python and the library tell each other; sok_lite/native/library.py has it too.
constexpr int64_t kAbi = 1;

struct Kernel {
  int64_t num_handles = 0;
  bool is_on_gpu = false;
};

template <bool is_on_gpu>
void* Create(TF_OpKernelConstruction* construction) {
  auto* kernel = new Kernel;
  kernel->is_on_gpu = is_on_gpu;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64(construction, "N", &kernel->num_handles, status);
  TF_DeleteStatus(status);
  return kernel;
}

void Destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

// Calls Python with all inputs but the handles, which only TensorFlow needs.
void Compute(void* kernel, TF_OpKernelContext* context) {
  auto* frame = new Frame(context);
  TF_Status* status = TF_NewStatus();
  const auto* self = static_cast<const Kernel*>(kernel);
  const int first = static_cast<int>(self->num_handles);
  const int num_inputs = TF_NumInputs(context);
  int64_t call = 0;
  std::vector<int64_t>& words = frame->words;
  words = {0, reinterpret_cast<int64_t>(frame), 0, self->is_on_gpu};
  for (int i = first; i < num_inputs && TF_GetCode(status) == TF_OK; ++i) {
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context, i, &tensor, status);
    if (TF_GetCode(status) != TF_OK) break;
    frame->tensors.push_back(tensor);
    if (i == first && TF_NumDims(tensor) != 0) {
      TF_SetStatus(status, TF_INTERNAL, "the number of a call of sok_lite's must be a scalar");
    } else if (i == first) {
      call = *static_cast<const int64_t*>(TF_TensorData(tensor));
    }
    if (i == first) continue;
    const int num_dims = TF_NumDims(tensor);
    words.push_back(reinterpret_cast<int64_t>(TF_TensorData(tensor)));
    words.push_back(TF_TensorType(tensor));
    words.push_back(num_dims);
    for (int dim = 0; dim < num_dims; ++dim) words.push_back(TF_Dim(tensor, dim));
  }
  frame->is_given.resize(TF_NumOutputs(context));
  words[0] = static_cast<int64_t>(words.size());
  words[2] = call;
  if (TF_GetCode(status) == TF_OK) {
    sok::EnterPython(frame, call);
  } else {
    TF_OpKernelContext_Failure(context, status);
  }
  TF_DeleteStatus(status);
  frame->context = nullptr;
  frame->Release();
}

void InferShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);  // Python knows more
}

void RegisterKernel(const char* name, const char* device, void* (*create)(TF_OpKernelConstruction*),
                    TF_Status* status) {
  TF_KernelBuilder* kernel = TF_NewKernelBuilder(name, device, create, Compute, Destroy);
  for (const char* on_host : {"handles", "call", "numbers", "told"}) {
    TF_KernelBuilder_HostMemory(kernel, on_host);
  }
  TF_RegisterKernelBuilder(name, kernel, status);
}

void Register(const char* name, TF_Status* status) {
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(op, "N: int >= 1");
  TF_OpDefinitionBuilderAddAttr(op, "Tin: list(type) >= 0");
  TF_OpDefinitionBuilderAddAttr(op, "K: int >= 0");
  TF_OpDefinitionBuilderAddAttr(op, "Tout: list(type) >= 0");
  TF_OpDefinitionBuilderAddAttr(op, "J: int >= 0");
  // Of the tables, for the gradient.
  TF_OpDefinitionBuilderAddAttr(op, "Tkey: type");
  TF_OpDefinitionBuilderAddAttr(op, "dims: list(int)");
  TF_OpDefinitionBuilderAddAttr(op, "trainable: list(bool)");
  TF_OpDefinitionBuilderAddAttr(op, "names: list(string)");  // in a graph; none in eager mode
  TF_OpDefinitionBuilderAddInput(op, "handles: N * resource");
  TF_OpDefinitionBuilderAddInput(op, "call: int64");
  TF_OpDefinitionBuilderAddInput(op, "inputs: Tin");
  TF_OpDefinitionBuilderAddInput(op, "numbers: K * int64");
  TF_OpDefinitionBuilderAddOutput(op, "outputs: Tout");
  TF_OpDefinitionBuilderAddOutput(op, "told: J * int64");
  TF_OpDefinitionBuilderSetIsStateful(op, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, InferShapes);
  TF_RegisterOpDefinition(op, status);
  RegisterKernel(name, "CPU", Create<false>, status);
  RegisterKernel(name, "GPU", Create<true>, status);
}

void* CreateNothing(TF_OpKernelConstruction*) { return nullptr; }
void ComputeNothing(void*, TF_OpKernelContext*) {}
void DestroyNothing(void*) {}

// An operation that does nothing, but has its place among those of the tables: what has a place
// before it and another behind has its order, though no table is an input of it.
void RegisterPlace(TF_Status* status) {
  const char* name = "SokPlace";
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(op, "N: int >= 1");
  TF_OpDefinitionBuilderAddInput(op, "handles: N * resource");
  TF_OpDefinitionBuilderSetIsStateful(op, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, InferShapes);
  TF_RegisterOpDefinition(op, status);
  for (const char* device : {"CPU", "GPU"}) {
    TF_KernelBuilder* kernel =
        TF_NewKernelBuilder(name, device, CreateNothing, ComputeNothing, DestroyNothing);
    TF_KernelBuilder_HostMemory(kernel, "handles");
    TF_RegisterKernelBuilder(name, kernel, status);
  }
}

bool is_registered = false;

// TensorFlow looks for new operations while it loads a library.
__attribute__((constructor)) void RegisterAll() {
  TF_Status* status = TF_NewStatus();
  for (const char* name : {"SokLookup", "SokMethod"}) Register(name, status);
  RegisterPlace(status);
  is_registered = TF_GetCode(status) == TF_OK;
  TF_DeleteStatus(status);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t sok_ops_abi() {
  return is_registered ? kAbi : -1;
}
