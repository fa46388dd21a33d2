// TensorFlow's operations on tables, over its C API: one library for every supported version.
//
// All have one form. `handles`, of most, are the tables' resources, by which TensorFlow orders
// operations and tapes find the tables. `call` is the number by which Python knows what is asked
// for: an input and not an attribute, for TensorFlow keeps an eager kernel for every value of an
// attribute for ever. `inputs` and `outputs` are where the tables are; `numbers` and `told` are on
// the host.
//
// Those of ranks have a second form, "InOrder", whose kernel is asynchronous: Python returns, and
// ends the operation later, when it is the turn of this call. So no thread of TensorFlow's waits
// for it.
#include "ops/gpu.h"
#include "ops/gradient.h"
#include "ops/python.h"
#include "ops/tf_c_api.h"
#include "ops/update.h"
#include "ops/write.h"

namespace {

using sok::Frame;

// Of what Python and the library tell each other; sok_lite/native/library.py has it too.
constexpr int64_t kAbi = 10;

using Native = bool (*)(Frame* frame, int64_t call);
bool LookUp(Frame* frame, int64_t call);
bool Gradient(Frame* frame, int64_t call);
bool Update(Frame* frame, int64_t call);
bool Method(Frame* frame, int64_t call);

// A type of operation.
struct Type {
  const char* name;
  bool has_handles;
  // Whether it is the gradient of another, which it has the call of.
  bool is_gradient;
  // Whether TensorFlow must run it, once for each time that a program asks for it.
  bool is_stateful;
  // Whether ranks may make it together, so that it has a form that waits for its turn.
  bool is_of_ranks;
  // Does it without Python where it can, and returns whether it has; null: it never can.
  Native native = nullptr;
};

constexpr Type kTypes[] = {
    {"SokLookup", true, false, true, true, LookUp},
    // It changes nothing, so that one which nobody uses is left out of a graph. With a resource for
    // an input TensorFlow would take it for stateful.
    {"SokLookupGradient", false, true, false, false, Gradient},
    // Where there may be several ranks, which all have to come to it.
    {"SokLookupGradientOfRanks", false, true, true, true},
    // A lookup of several ranks in tables whose rows TensorFlow keeps: which rows are to be read,
    // and where they are sent.
    {"SokStaticPlaces", false, false, true, true},
    {"SokStaticRows", false, false, true, true},
    {"SokUpdate", true, false, true, false, Update},
    {"SokMethod", true, false, true, false, Method},
    // All rows of a table, with a gradient.
    {"SokValue", true, false, true, false},
    {"SokCollective", false, false, true, true},
};

struct Kernel {
  int64_t num_handles = 0;
  // Inputs at the end that are on the host.
  int64_t num_numbers = 0;
  int64_t num_told = 0;  // outputs at the end that are there
  bool is_on_gpu = false;
  bool is_gradient = false;
  Native native = nullptr;
};

template <bool is_on_gpu, bool is_gradient, Native native = nullptr>
void* Create(TF_OpKernelConstruction* construction) {
  auto* kernel = new Kernel;
  kernel->is_on_gpu = is_on_gpu;
  kernel->is_gradient = is_gradient;
  kernel->native = native;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64(construction, "K", &kernel->num_numbers, status);
  TF_OpKernelConstruction_GetAttrInt64(construction, "J", &kernel->num_told, status);
  TF_OpKernelConstruction_GetAttrInt64(construction, "N", &kernel->num_handles, status);
  if (TF_GetCode(status) != TF_OK) kernel->num_handles = 0;  // it has none
  TF_DeleteStatus(status);
  return kernel;
}

void Destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

// Reads all inputs but the handles, which only TensorFlow needs. Returns the number of the call;
// where that fails, so does the operation.
bool Read(const Kernel* self, TF_OpKernelContext* context, Frame* frame, int64_t* call) {
  TF_Status* status = TF_NewStatus();
  const int first = static_cast<int>(self->num_handles), num_inputs = TF_NumInputs(context);
  frame->tensors.reserve(num_inputs - first + TF_NumOutputs(context));
  for (int i = first; i < num_inputs && TF_GetCode(status) == TF_OK; ++i) {
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context, i, &tensor, status);
    if (TF_GetCode(status) == TF_OK) frame->tensors.push_back(tensor);
  }
  frame->num_inputs = static_cast<int64_t>(frame->tensors.size());
  frame->outputs.resize(TF_NumOutputs(context));
  if (TF_GetCode(status) == TF_OK && TF_NumDims(frame->tensors[0]) != 0) {
    TF_SetStatus(status, TF_INTERNAL, "the number of a call of sok_lite's must be a scalar");
  }
  const bool is_read = TF_GetCode(status) == TF_OK;
  if (is_read) {
    *call = *static_cast<const int64_t*>(TF_TensorData(frame->tensors[0]));
  } else {
    frame->Fail(TF_GetCode(status), TF_Message(status));
  }
  TF_DeleteStatus(status);
  return is_read;
}

// Calls Python with all that was read.
void Enter(const Kernel* self, Frame* frame, int64_t call) {
  std::vector<int64_t>& words = frame->words;
  const bool has_begun = frame->held.has_begun;
  words = {0,
           reinterpret_cast<int64_t>(frame),
           call,
           self->is_on_gpu,
           self->num_numbers,
           self->is_gradient,
           has_begun ? reinterpret_cast<int64_t>(frame->held.counters.data()) : 0,
           has_begun ? reinterpret_cast<int64_t>(frame->held.rows) : 0};
  for (int64_t i = 1; i < frame->num_inputs; ++i) {
    TF_Tensor* tensor = frame->tensors[i];
    const int num_dims = TF_NumDims(tensor);
    words.push_back(reinterpret_cast<int64_t>(TF_TensorData(tensor)));
    words.push_back(TF_TensorType(tensor));
    words.push_back(num_dims);
    for (int dim = 0; dim < num_dims; ++dim) words.push_back(TF_Dim(tensor, dim));
  }
  words[0] = static_cast<int64_t>(words.size());
  sok::EnterPython(frame, call);
}

// The outputs of an operation, as native code gets their memory.
class OutputsOf final : public sok::Outputs {
 public:
  OutputsOf(Frame* frame, const sok::Gpu* gpu) : frame_(frame), gpu_(gpu) {}

  void* Allocate(int64_t number, int64_t type, const std::vector<int64_t>& dims) override {
    int64_t num_bytes = sok::BytesOf(type);
    for (const int64_t dim : dims) num_bytes *= dim;
    const Frame::Given* given =
        frame_->Allocate(number, static_cast<TF_DataType>(type), dims.data(),
                         static_cast<int64_t>(dims.size()), num_bytes);
    if (!given) return nullptr;
    if (number < frame_->num_outputs()) Note(given->data, num_bytes);
    return given->data;
  }

  void* Temporary(int64_t num_bytes) override {
    void* memory = frame_->Temporary(num_bytes);
    if (memory) Note(memory, num_bytes);
    return memory;
  }

  void* operation() const override { return frame_->context; }

 private:
  void Note(const void* memory, int64_t num_bytes) const {
    if (gpu_ && gpu_->note) gpu_->note(memory, num_bytes, false);
  }

  Frame* frame_;
  const sok::Gpu* gpu_;
};

// Whether an operation is where a plan's kernels run.
bool IsThere(const Frame* frame, const sok::Driver& driver) {
  const sok::Gpu* gpu = driver.gpu;
  return gpu ? frame->is_on_gpu || gpu->is_simulated : !frame->is_on_gpu;
}

// The simulated GPU knows an operation's memory as long as there is this.
class Noted {
 public:
  explicit Noted(const sok::Gpu* gpu) : gpu_(gpu) {}
  ~Noted() {
    if (gpu_ && gpu_->forget) gpu_->forget();
  }

 private:
  const sok::Gpu* gpu_;
};

// Returns the inputs but the call. The last ones are on the host.
std::vector<sok::Array> InputsOf(const Frame* frame, const sok::Gpu* gpu) {
  std::vector<sok::Array> inputs;
  inputs.reserve(frame->num_inputs - 1);
  for (int64_t i = 1; i < frame->num_inputs; ++i) {
    const TF_Tensor* tensor = frame->tensors[i];
    sok::Array input{TF_TensorData(tensor), TF_TensorType(tensor), {}, 1};
    for (int dim = 0, num_dims = TF_NumDims(tensor); dim < num_dims; ++dim) {
      input.dims.push_back(TF_Dim(tensor, dim));
      input.size *= input.dims.back();
    }
    const bool is_on_host = i >= frame->num_inputs - frame->num_numbers;
    if (gpu && gpu->note && !is_on_host) {
      gpu->note(input.data, input.size * sok::BytesOf(input.type), true);
    }
    inputs.push_back(std::move(input));
  }
  return inputs;
}

bool LookUp(Frame* frame, int64_t call) {
  const std::shared_ptr<const sok::Plan> plan = sok::PlanOf(call);
  if (!plan || !IsThere(frame, *plan->driver)) return false;
  const sok::Gpu* gpu = plan->driver->gpu;
  const Noted noted(gpu);
  OutputsOf outputs(frame, gpu);
  try {
    return sok::LookUp(*plan, InputsOf(frame, gpu), &outputs, &frame->held);
  } catch (const sok::HalfDone&) {
    frame->Fail(TF_INTERNAL,
                "Memory has run out, or a launch on the GPU has failed, while new keys got their "
                "rows: some may have none. Load the last checkpoint. CUDA_LAUNCH_BLOCKING=1 says "
                "which launch.");
    return true;
  }
}

// The gradient has the call of its lookup, or another one with the same plan.
bool Gradient(Frame* frame, int64_t call) {
  const std::shared_ptr<const sok::Plan> plan = sok::PlanOf(call);
  if (!plan || !IsThere(frame, *plan->driver)) return false;
  const sok::Gpu* gpu = plan->driver->gpu;
  const Noted noted(gpu);
  OutputsOf outputs(frame, gpu);
  return sok::Gradient(*plan, InputsOf(frame, gpu), &outputs);
}

// An eager update tells whether native code has done it, or would.
bool Update(Frame* frame, int64_t call) {
  const std::shared_ptr<const sok::UpdatePlan> plan = sok::UpdatePlanOf(call);
  if (!plan || !IsThere(frame, *plan->driver)) return false;
  const sok::Gpu* gpu = plan->driver->gpu;
  const Noted noted(gpu);
  OutputsOf outputs(frame, gpu);
  const bool tells = !frame->outputs.empty();
  if (tells && !outputs.Add(sok::kInt64, {1})) return false;
  bool is_done = true;
  try {
    is_done = sok::Update(*plan, InputsOf(frame, gpu), &outputs);
  } catch (const sok::HalfDone&) {
    frame->Fail(
        TF_INTERNAL,
        "A launch on the GPU has failed in the midst of an update: some tables have its step "
        "and others have not. Load the last checkpoint. CUDA_LAUNCH_BLOCKING=1 says which.");
  }
  if (tells) *static_cast<int64_t*>(outputs.last()) = is_done;
  return is_done;
}

// Of the methods of a table, reads and some writes are native.
bool Method(Frame* frame, int64_t call) {
  if (!frame->outputs.empty()) return LookUp(frame, call);
  const std::shared_ptr<const sok::WritePlan> plan = sok::WritePlanOf(call);
  return plan && !frame->is_on_gpu && !plan->driver->gpu &&
         sok::Write(*plan, InputsOf(frame, nullptr));
}

void Compute(void* kernel, TF_OpKernelContext* context) {
  const auto* self = static_cast<const Kernel*>(kernel);
  auto* frame = new Frame(context);
  frame->is_on_gpu = self->is_on_gpu;
  frame->num_numbers = self->num_numbers;
  frame->num_told = self->num_told;
  int64_t call = 0;
  if (!Read(self, context, frame, &call) || (self->native && self->native(frame, call))) {
    frame->End();
  } else {
    Enter(self, frame, call);
    frame->held.Release();
  }
  frame->Release();
}

// `done` is the address of an argument of TensorFlow's, a std::function that is gone when this has
// returned: the C API has a way to call it, and none to keep it. So it is copied here. All of
// TensorFlow's wheels for Linux are of libstdc++, which has one form of it for ever.
void ComputeInOrder(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto* self = static_cast<const Kernel*>(kernel);
  auto* frame = new Frame(context, *reinterpret_cast<const std::function<void()>*>(done));
  int64_t call = 0;
  if (Read(self, context, frame, &call)) {
    Enter(self, frame, call);
  } else {
    frame->End();
  }
  frame->Release();
}

void InferShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);  // Python knows more
}

template <bool is_on_gpu>
void* (*CreateOf(const Type& type))(TF_OpKernelConstruction*) {
  return type.native == LookUp     ? Create<is_on_gpu, false, LookUp>
         : type.native == Gradient ? Create<is_on_gpu, true, Gradient>
         : type.native == Update   ? Create<is_on_gpu, false, Update>
         : type.native == Method   ? Create<is_on_gpu, false, Method>
         : type.is_gradient        ? Create<is_on_gpu, true>
                                   : Create<is_on_gpu, false>;
}

void RegisterKernel(const Type& type, const char* name, bool in_order, bool is_on_gpu,
                    TF_Status* status) {
  const char* device = is_on_gpu ? "GPU" : "CPU";
  void* (*create)(TF_OpKernelConstruction*) =
      is_on_gpu ? CreateOf<true>(type) : CreateOf<false>(type);
  TF_KernelBuilder* kernel =
      in_order ? TF_NewAsyncKernelBuilder(name, device, create, ComputeInOrder, Destroy)
               : TF_NewKernelBuilder(name, device, create, Compute, Destroy);
  if (type.has_handles) TF_KernelBuilder_HostMemory(kernel, "handles");
  for (const char* on_host : {"call", "numbers", "told"}) {
    TF_KernelBuilder_HostMemory(kernel, on_host);
  }
  TF_RegisterKernelBuilder(name, kernel, status);
}

void Register(const Type& type, bool in_order, TF_Status* status) {
  const std::string full_name = std::string(type.name) + (in_order ? "InOrder" : "");
  const char* name = full_name.c_str();
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  if (type.has_handles) {
    TF_OpDefinitionBuilderAddAttr(op, "N: int >= 0");
    TF_OpDefinitionBuilderAddInput(op, "handles: N * resource");
  }
  TF_OpDefinitionBuilderAddAttr(op, "Tin: list(type) >= 0");
  TF_OpDefinitionBuilderAddAttr(op, "K: int >= 0");
  TF_OpDefinitionBuilderAddAttr(op, "Tout: list(type) >= 0");
  TF_OpDefinitionBuilderAddAttr(op, "J: int >= 0");
  // Of each table, for the gradient.
  TF_OpDefinitionBuilderAddAttr(op, "Tkeys: list(type)");
  TF_OpDefinitionBuilderAddAttr(op, "dims: list(int)");
  TF_OpDefinitionBuilderAddAttr(op, "handles_of: list(int)");
  TF_OpDefinitionBuilderAddAttr(op, "trainable: list(bool)");
  TF_OpDefinitionBuilderAddAttr(op, "names: list(string)");  // in a graph; none in eager mode
  TF_OpDefinitionBuilderAddInput(op, "call: int64");
  TF_OpDefinitionBuilderAddInput(op, "inputs: Tin");
  TF_OpDefinitionBuilderAddInput(op, "numbers: K * int64");
  TF_OpDefinitionBuilderAddOutput(op, "outputs: Tout");
  TF_OpDefinitionBuilderAddOutput(op, "told: J * int64");
  // It makes it stateful, whatever it is told (tensorflow/c/ops.cc).
  if (type.is_stateful) TF_OpDefinitionBuilderSetIsStateful(op, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, InferShapes);
  TF_RegisterOpDefinition(op, status);
  for (const bool is_on_gpu : {false, true}) {
    RegisterKernel(type, name, in_order, is_on_gpu, status);
  }
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
  for (const Type& type : kTypes) {
    Register(type, false, status);
    if (type.is_of_ranks) Register(type, true, status);
  }
  RegisterPlace(status);
  is_registered = TF_GetCode(status) == TF_OK;
  TF_DeleteStatus(status);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t sok_ops_abi() {
  return is_registered ? kAbi : -1;
}
