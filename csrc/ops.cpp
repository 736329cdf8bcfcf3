// The ops as torch sees them, on its stable ABI. Schemas, fake tensors and autograd are in tripletops/ops.py;
// arguments were checked in tripletops/functional.py, and what is checked again here is only what memory
// safety rests on.
#include <pthread.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "kernels/gradient.h"

namespace {

using namespace tripletops;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A forked child has none of its parent's threads, and the pool does not know it: there everything runs
// serially.
bool forked = false;
const int fork_watch = pthread_atfork(nullptr, nullptr, [] { forked = true; });

Pool torch_pool() {
  Pool pool;
  pool.threads = forked ? 1 : int(torch::stable::get_num_threads());
  pool.run = [](int count, void (*body)(void*, int), void* context) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(context, int(i));
    });
  };
  return pool;
}

template <class T>
constexpr ScalarType kScalarType = sizeof(T) == sizeof(float) ? ScalarType::Float : ScalarType::Double;

Storage storage_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Storage::float32;
    case ScalarType::Double:
      return Storage::float64;
    case ScalarType::Half:
      return Storage::float16;
    case ScalarType::BFloat16:
      return Storage::bfloat16;
    default:
      STD_TORCH_CHECK(false, "embeddings must be float16, bfloat16, float32 or float64");
  }
}

Matrix matrix_of(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 2, "embeddings must have two dimensions");
  STD_TORCH_CHECK(tensor.numel() == 0 || tensor.size(1) == 1 || tensor.stride(1) == 1,
                  "the elements of a row must be adjacent");
  STD_TORCH_CHECK(tensor.size(0) < std::numeric_limits<int32_t>::max(), "too many rows: ", tensor.size(0));
  return {tensor.const_data_ptr(), tensor.size(0), tensor.size(1), tensor.stride(0), storage_of(tensor)};
}

const int64_t* integers(const Tensor& tensor, int64_t count, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() && tensor.numel() == count, name,
      " must be ", count, " contiguous int64 values");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

template <class T>
const T* values(const Tensor& tensor, int64_t count, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == kScalarType<T> && tensor.is_contiguous() && tensor.numel() == count,
                  name, " must be ", count, " contiguous values of the embeddings' compute type");
  return static_cast<const T*>(tensor.const_data_ptr());
}

// The arguments that every op has, by the names of tripletops/_call.py.
struct CallArguments {
  Tensor emb, labels;
  std::optional<Tensor> ref_emb, ref_labels, self_index;
  std::optional<int64_t> ignore_label;
  std::optional<Tensor> seed, learned;
  std::vector<int64_t> codes;
  std::vector<double> numbers;

  bool is_double() const { return emb.scalar_type() == ScalarType::Double; }
};

Batch batch_of(const CallArguments& given) {
  Batch batch;
  batch.anchors = batch.candidates = matrix_of(given.emb);
  batch.anchor_labels = batch.candidate_labels = integers(given.labels, batch.anchors.count, "labels");
  batch.self_mining = !given.ref_emb.has_value();
  if (given.ref_emb) {
    STD_TORCH_CHECK(given.ref_labels.has_value(), "ref_emb needs ref_labels");
    batch.candidates = matrix_of(*given.ref_emb);
    STD_TORCH_CHECK(
        batch.candidates.width == batch.anchors.width && batch.candidates.storage == batch.anchors.storage,
        "emb and ref_emb must agree in width and type");
    batch.candidate_labels = integers(*given.ref_labels, batch.candidates.count, "ref_labels");
    if (given.self_index) batch.self_index = integers(*given.self_index, batch.anchors.count, "self_index");
  }
  batch.ignoring = given.ignore_label.has_value();
  batch.ignore_label = given.ignore_label.value_or(0);
  return batch;
}

// Reads codes one after the other; each has to be that of a word.
class Words {
 public:
  explicit Words(const std::vector<int64_t>& codes) : codes_(codes) {}

  template <class Enum>
  void read(Enum& word) {
    STD_TORCH_CHECK(next_ < codes_.size(), "too few codes: ", int64_t(codes_.size()));
    const int64_t code = codes_[next_++];
    STD_TORCH_CHECK(code >= 0 && code < count_of(Enum()), "no such word: ", code);
    word = Enum(int(code));
  }

 private:
  const std::vector<int64_t>& codes_;
  size_t next_ = 0;
};

// `draws`: whether a seed is used.
Call call_of(const CallArguments& given, bool draws) {
  Call call;
  call.batch = batch_of(given);
  Words words(given.codes);
  words.read(call.objective);
  words.read(call.positive);
  words.read(call.negative);
  words.read(call.distance);
  words.read(call.loss);
  words.read(call.reduction);
  STD_TORCH_CHECK(int64_t(given.numbers.size()) == kNumbers, "there are ", kNumbers, " numbers, got ",
                  int64_t(given.numbers.size()));
  static_assert(sizeof(Numbers) == kNumbers * sizeof(double));
  std::copy(given.numbers.begin(), given.numbers.end(), reinterpret_cast<double*>(&call.numbers));
  if (draws && (word_draws(call.positive) || word_draws(call.negative))) {
    STD_TORCH_CHECK(given.seed.has_value(), "a random rule needs a seed");
    call.seed = uint64_t(*integers(*given.seed, 1, "seed"));
  }
  STD_TORCH_CHECK(!kCosineOnly[int(call.objective)] || call.distance == Distance::cosine,
                  "the objective is defined on the cosine");
  STD_TORCH_CHECK(given.learned.has_value() == kLearns[int(call.objective)],
                  "a number for each anchor is for objectives that learn one");
  if (given.learned) {
    const int64_t count = call.batch.anchors.count;
    call.learned = given.is_double()
                       ? static_cast<const void*>(values<double>(*given.learned, count, "learned"))
                       : values<float>(*given.learned, count, "learned");
  }
  return call;
}

int32_t shim_type(ScalarType type) {
  switch (type) {
    case ScalarType::Long:
      return aoti_torch_dtype_int64();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Double:
      return aoti_torch_dtype_float64();
    default:
      return aoti_torch_dtype_float32();
  }
}

// Through the shim: torch::stable::empty looks its op up by name, which costs a small batch more than its
// kernels do.
Tensor empty(std::initializer_list<int64_t> shape, ScalarType type) {
  int64_t strides[2] = {1, 1};
  if (shape.size() == 2) strides[0] = std::max<int64_t>(shape.begin()[1], 1);
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(shape.size()), shape.begin(), strides,
                                                         shim_type(type), aoti_torch_device_type_cpu(), 0,
                                                         &handle));
  Tensor tensor(handle);
  poison(tensor.mutable_data_ptr(), size_t(tensor.numel()) * tensor.element_size());
  return tensor;
}

template <class T>
const Functions<T>& functions() {
  return functions_of<T>(selected_instruction_set());
}

template <class T>
Tensor mine_typed(const Call& call, const Tensor& picks) {
  const int64_t count = call.batch.anchors.count;
  Tensor distances = empty({2, count}, kScalarType<T>);
  int64_t* picked = static_cast<int64_t*>(picks.mutable_data_ptr());
  T* measured = static_cast<T*>(distances.mutable_data_ptr());
  mine<T>(functions<T>(), torch_pool(), call, {picked, picked + count, measured, measured + count});
  return distances;
}

std::tuple<Tensor, Tensor> mine_op(Tensor emb, Tensor labels, std::optional<Tensor> ref_emb,
                                   std::optional<Tensor> ref_labels, std::optional<Tensor> self_index,
                                   std::optional<int64_t> ignore_label, std::optional<Tensor> seed,
                                   std::optional<Tensor> learned, std::vector<int64_t> codes,
                                   std::vector<double> numbers) {
  const CallArguments given = {emb,          labels, ref_emb, ref_labels, self_index,
                               ignore_label, seed,   learned, codes,      numbers};
  const Call call = call_of(given, true);
  Tensor picks = empty({2, call.batch.anchors.count}, ScalarType::Long);
  return {picks, given.is_double() ? mine_typed<double>(call, picks) : mine_typed<float>(call, picks)};
}

// What a loss gives back, as tensors and as the kernels take it.
struct Results {
  Tensor loss, totals, picks, saved;

  template <class T>
  Evaluated<T> pointers(int64_t anchors) const {
    double* total = static_cast<double*>(totals.mutable_data_ptr());
    int64_t* picked = static_cast<int64_t*>(picks.mutable_data_ptr());
    static_assert(sizeof(Shares) == 2 * sizeof(double));
    return {static_cast<T*>(loss.mutable_data_ptr()),
            total,
            reinterpret_cast<Shares*>(total + 1),
            picked,
            picked + anchors,
            static_cast<T*>(saved.mutable_data_ptr())};
  }
};

template <class T>
Results loss_typed(const Call& call) {
  const int64_t count = call.batch.anchors.count;
  const Results results = {
      call.reduction == Reduction::none ? empty({count}, kScalarType<T>) : empty({}, kScalarType<T>),
      empty({3}, ScalarType::Double), empty({2, count}, ScalarType::Long),
      empty({kSaved[int(call.objective)], count}, kScalarType<T>)};
  evaluate<T>(functions<T>(), torch_pool(), call, results.pointers<T>(count));
  return results;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> loss_op(Tensor emb, Tensor labels, std::optional<Tensor> ref_emb,
                                                   std::optional<Tensor> ref_labels,
                                                   std::optional<Tensor> self_index,
                                                   std::optional<int64_t> ignore_label,
                                                   std::optional<Tensor> seed, std::optional<Tensor> learned,
                                                   std::vector<int64_t> codes, std::vector<double> numbers) {
  const CallArguments given = {emb,          labels, ref_emb, ref_labels, self_index,
                               ignore_label, seed,   learned, codes,      numbers};
  const Call call = call_of(given, true);
  const Results results = given.is_double() ? loss_typed<double>(call) : loss_typed<float>(call);
  return {results.loss, results.totals, results.picks, results.saved};
}

template <class T>
void gradient_typed(const Call& call, const Results& results, const Tensor& grad, void* anchors,
                    void* candidates, void* learned) {
  const int64_t count = call.batch.anchors.count;
  values<double>(results.totals, 3, "totals");
  const int64_t* picked = integers(results.picks, 2 * count, "picks");
  for (int64_t i = 0; i < 2 * count; ++i)
    STD_TORCH_CHECK(picked[i] < call.batch.candidates.count, "picks out of range: ", picked[i]);
  values<T>(results.saved, kSaved[int(call.objective)] * count, "saved");
  const bool per_anchor = grad.dim() == 1;
  const T* upstream = values<T>(grad, per_anchor ? count : 1, "grad");
  differentiate<T>(functions<T>(), torch_pool(), call, results.pointers<T>(count),
                   {upstream, per_anchor, anchors, candidates, static_cast<T*>(learned)});
}

std::tuple<Tensor, Tensor, Tensor> gradient_op(
    Tensor grad, Tensor emb, Tensor labels, std::optional<Tensor> ref_emb, std::optional<Tensor> ref_labels,
    std::optional<Tensor> self_index, std::optional<int64_t> ignore_label, std::optional<Tensor> learned,
    std::vector<int64_t> codes, std::vector<double> numbers, Tensor totals, Tensor picks, Tensor saved,
    bool wants_emb, bool wants_ref) {
  const CallArguments given = {emb,          labels, ref_emb, ref_labels, self_index,
                               ignore_label, {},     learned, codes,      numbers};
  const Call call = call_of(given, false);
  const Matrix &anchors = call.batch.anchors, &candidates = call.batch.candidates;
  wants_ref = wants_ref && ref_emb.has_value();
  const ScalarType type = emb.scalar_type();
  Tensor emb_gradient = wants_emb ? empty({anchors.count, anchors.width}, type) : empty({0}, type);
  Tensor ref_gradient = wants_ref ? empty({candidates.count, candidates.width}, type) : empty({0}, type);
  Tensor learned_gradient =
      empty({learned ? anchors.count : 0}, given.is_double() ? ScalarType::Double : ScalarType::Float);
  const auto differentiate_as = given.is_double() ? gradient_typed<double> : gradient_typed<float>;
  differentiate_as(call, {grad, totals, picks, saved}, grad,
                   wants_emb ? emb_gradient.mutable_data_ptr() : nullptr,
                   wants_ref ? ref_gradient.mutable_data_ptr() : nullptr,
                   learned ? learned_gradient.mutable_data_ptr() : nullptr);
  return {emb_gradient, ref_gradient, learned_gradient};
}

// What a loss gives back, where nobody but the kernels wants to see it.
template <class T>
class Memory {
 public:
  explicit Memory(const Call& call) : Memory(call.batch.anchors.count, kSaved[int(call.objective)]) {}

  Evaluated<T> pointers(T* loss) {
    return {loss, &active_, &shares_, picks_.get(), picks_.get() + count_, saved_.get()};
  }

 private:
  Memory(int64_t count, int64_t saved)
      : count_(count), picks_(new int64_t[size_t(2 * count)]), saved_(new T[size_t(saved * count)]) {
    poison(saved_.get(), size_t(saved * count) * sizeof(T));
  }

  const int64_t count_;
  double active_ = 0;
  Shares shares_;
  const std::unique_ptr<int64_t[]> picks_;
  const std::unique_ptr<T[]> saved_;
};

template <class T>
std::tuple<Tensor, std::vector<Tensor>> loss_with_gradients_typed(const Call& call, bool wants_emb,
                                                                  bool wants_ref, bool wants_learned) {
  const Matrix &anchors = call.batch.anchors, &candidates = call.batch.candidates;
  Tensor loss = empty({}, kScalarType<T>);
  std::vector<Tensor> gradients;
  const auto gradient = [&](std::initializer_list<int64_t> shape) {
    gradients.push_back(empty(shape, kScalarType<T>));
    return static_cast<T*>(gradients.back().mutable_data_ptr());
  };
  const T one = 1;
  Gradients<T> wanted = {&one, false, nullptr, nullptr, nullptr, true};
  if (wants_emb) wanted.anchors = gradient({anchors.count, anchors.width});
  if (wants_ref) wanted.candidates = gradient({candidates.count, candidates.width});
  if (wants_learned) wanted.learned = gradient({anchors.count});
  Memory<T> memory(call);
  evaluate_and_differentiate<T>(functions<T>(), torch_pool(), call,
                                memory.pointers(static_cast<T*>(loss.mutable_data_ptr())), wanted);
  return {loss, gradients};
}

// The gradients are those that are wanted, in the compute type. Codes and numbers come in one tensor, and
// after what every call has: lists, and arguments that are left out, take a µs longer.
std::tuple<Tensor, std::vector<Tensor>> loss_with_gradients_op(
    Tensor emb, Tensor labels, Tensor settings, bool wants_emb, bool wants_ref, bool wants_learned,
    std::optional<Tensor> ref_emb, std::optional<Tensor> ref_labels, std::optional<Tensor> self_index,
    std::optional<int64_t> ignore_label, std::optional<Tensor> seed, std::optional<Tensor> learned) {
  const double* setting = values<double>(settings, kCodes + kNumbers, "settings");
  const CallArguments given = {emb,
                               labels,
                               ref_emb,
                               ref_labels,
                               self_index,
                               ignore_label,
                               seed,
                               learned,
                               {setting, setting + kCodes},
                               {setting + kCodes, setting + kCodes + kNumbers}};
  const Call call = call_of(given, true);
  STD_TORCH_CHECK(call.reduction != Reduction::none, "the gradient of a vector of losses needs its own");
  STD_TORCH_CHECK((ref_emb || !wants_ref) && (learned || !wants_learned),
                  "a gradient of what is not there is wanted");
  return given.is_double() ? loss_with_gradients_typed<double>(call, wants_emb, wants_ref, wants_learned)
                           : loss_with_gradients_typed<float>(call, wants_emb, wants_ref, wants_learned);
}

template <class T>
Tensor scaled_typed(const Tensor& gradient, const Tensor& factor) {
  const int64_t rows = gradient.size(0), count = gradient.numel();
  Tensor scaled =
      gradient.dim() == 2 ? empty({rows, gradient.size(1)}, kScalarType<T>) : empty({rows}, kScalarType<T>);
  const bool exact =
      scale_gradient(values<T>(gradient, count, "gradient"), count, *values<T>(factor, 1, "factor"),
                     static_cast<T*>(scaled.mutable_data_ptr()));
  return exact ? scaled : empty({0}, kScalarType<T>);
}

// (0,) where the gradient has to be computed anew.
Tensor scaled_op(Tensor gradient, Tensor factor) {
  STD_TORCH_CHECK(gradient.dim() == 1 || gradient.dim() == 2, "a gradient has one or two dimensions");
  return gradient.scalar_type() == ScalarType::Double ? scaled_typed<double>(gradient, factor)
                                                      : scaled_typed<float>(gradient, factor);
}

}  // namespace

// tripletops/backends/cpu.py calls these through ctypes, so that the library needs nothing of any Python.
// ctypes knows no exceptions: none may get out.
extern "C" {

// The instruction sets that this machine can run, separated by spaces, the best one last.
__attribute__((visibility("default"))) const char* tripletops_instruction_sets() noexcept {
  static const std::string names = [] {
    std::string joined;
    for (const InstructionSet& set : usable_instruction_sets())
      joined += (joined.empty() ? "" : " ") + std::string(set.name);
    return joined;
  }();
  return names.c_str();
}

// The one in use; null where TRIPLETOPS_ISA names one that cannot run here.
__attribute__((visibility("default"))) const char* tripletops_isa() noexcept {
  try {
    return selected_instruction_set().name;
  } catch (const std::invalid_argument&) {
    return nullptr;
  }
}

// False where the machine has no such instruction set.
__attribute__((visibility("default"))) bool tripletops_select_isa(const char* name) noexcept {
  try {
    select_instruction_set(name);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

// When the certified pass is tried: a number of UseCertified.
__attribute__((visibility("default"))) int tripletops_certified() noexcept { return int(use_of_certified()); }
__attribute__((visibility("default"))) void tripletops_use_certified(int use) noexcept {
  set_use_of_certified(UseCertified(use));
}

// The words that the library was built with.
__attribute__((visibility("default"))) const char* tripletops_fingerprint() noexcept { return kFingerprint; }

}  // extern "C"

STABLE_TORCH_LIBRARY_IMPL(tripletops, CPU, library) {
  library.impl("mine", TORCH_BOX(&mine_op));
  library.impl("loss", TORCH_BOX(&loss_op));
  library.impl("gradient", TORCH_BOX(&gradient_op));
  library.impl("loss_with_gradients", TORCH_BOX(&loss_with_gradients_op));
  library.impl("scaled", TORCH_BOX(&scaled_op));
}
