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
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "kernels/mining.h"
#include "kernels/scratch.h"
#include "kernels/tuples.h"

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
const Kernels<T>& kernels() {
  if constexpr (sizeof(T) == sizeof(float))
    return selected_variant().single;
  else
    return selected_variant().twice;
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

Rows rows_of(const Tensor& tensor) {
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

template <class Enum>
Enum word(int64_t code, int64_t count) {
  STD_TORCH_CHECK(code >= 0 && code < count, "no such word: ", code);
  return Enum(int(code));
}

Batch batch_of(const Tensor& emb, const Tensor& labels, const std::optional<Tensor>& ref_emb,
               const std::optional<Tensor>& ref_labels, const std::optional<Tensor>& self_index,
               std::optional<int64_t> ignore_label) {
  Batch batch;
  batch.anchors = rows_of(emb);
  batch.anchor_labels = integers(labels, batch.anchors.count, "labels");
  batch.candidates = batch.anchors;
  batch.candidate_labels = batch.anchor_labels;
  batch.self_mining = !ref_emb.has_value();
  if (ref_emb) {
    STD_TORCH_CHECK(ref_labels.has_value(), "ref_emb needs ref_labels");
    batch.candidates = rows_of(*ref_emb);
    STD_TORCH_CHECK(
        batch.candidates.width == batch.anchors.width && batch.candidates.storage == batch.anchors.storage,
        "emb and ref_emb must agree in width and type");
    batch.candidate_labels = integers(*ref_labels, batch.candidates.count, "ref_labels");
    if (self_index) batch.self_index = integers(*self_index, batch.anchors.count, "self_index");
  }
  batch.ignoring = ignore_label.has_value();
  batch.ignore_label = ignore_label.value_or(0);
  return batch;
}

struct MiningArguments {
  Batch batch;
  Selection selection;

  // `all`: whether the rules may name all candidates.
  MiningArguments(const Tensor& emb, const Tensor& labels, const std::optional<Tensor>& ref_emb,
                  const std::optional<Tensor>& ref_labels, const std::optional<Tensor>& self_index,
                  std::optional<int64_t> ignore_label, const std::optional<Tensor>& seed, int64_t positive,
                  int64_t negative, int64_t distance, double cutoff, double nonzero_loss_cutoff,
                  bool all = false)
      : batch(batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)) {
    selection.positive = word<Positive>(positive, all ? 4 : 3);
    selection.negative = word<Negative>(negative, all ? 6 : 5);
    selection.distance = word<Distance>(distance, 3);
    selection.cutoff = cutoff;
    selection.nonzero_loss_cutoff = nonzero_loss_cutoff;
    const bool random = selection.positive == Positive::random || selection.negative == Negative::random ||
                        selection.negative == Negative::distance;
    STD_TORCH_CHECK(!random || seed.has_value(), "a random rule needs a seed");
    if (random) selection.seed = uint64_t(*integers(*seed, 1, "seed"));
  }
};

template <class T>
bool mine_into(const MiningArguments& arguments, const Tensor& picks, T* distances) {
  const int64_t count = arguments.batch.anchors.count;
  int64_t* picked = static_cast<int64_t*>(picks.mutable_data_ptr());
  return mine<T>(kernels<T>(), torch_pool(), arguments.batch, arguments.selection, picked, picked + count,
                 distances, distances + count);
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
Tensor mine_typed(const MiningArguments& arguments, const Tensor& picks) {
  Tensor distances = empty({2, arguments.batch.anchors.count}, kScalarType<T>);
  mine_into<T>(arguments, picks, static_cast<T*>(distances.mutable_data_ptr()));
  return distances;
}

std::tuple<Tensor, Tensor> mine_op(Tensor emb, Tensor labels, std::optional<Tensor> ref_emb,
                                   std::optional<Tensor> ref_labels, std::optional<Tensor> self_index,
                                   std::optional<int64_t> ignore_label, std::optional<Tensor> seed,
                                   int64_t positive, int64_t negative, int64_t distance, double cutoff,
                                   double nonzero_loss_cutoff) {
  const MiningArguments arguments(emb, labels, ref_emb, ref_labels, self_index, ignore_label, seed, positive,
                                  negative, distance, cutoff, nonzero_loss_cutoff);
  Tensor picks = empty({2, arguments.batch.anchors.count}, ScalarType::Long);
  Tensor distances = arguments.batch.anchors.storage == Storage::float64
                         ? mine_typed<double>(arguments, picks)
                         : mine_typed<float>(arguments, picks);
  return {picks, distances};
}

template <class T>
std::tuple<Tensor, Tensor, Tensor> forward_typed(const MiningArguments& arguments,
                                                 const Objective& objective) {
  const int64_t count = arguments.batch.anchors.count;
  Tensor picks = empty({2, count}, ScalarType::Long);
  Tensor terms = empty({4, count}, kScalarType<T>);  // d_ap, d_an and the slopes of both
  Tensor loss =
      objective.reduction == Reduction::none ? empty({count}, kScalarType<T>) : empty({}, kScalarType<T>);
  T* term = static_cast<T*>(terms.mutable_data_ptr());
  const int64_t* picked = static_cast<const int64_t*>(picks.const_data_ptr());
  const bool finite = mine_into<T>(arguments, picks, term);
  score<T>(objective, finite, count, picked, picked + count, term, term + count,
           static_cast<T*>(loss.mutable_data_ptr()), term + 2 * count, term + 3 * count);
  return {loss, picks, terms};
}

std::tuple<Tensor, Tensor, Tensor> forward_op(Tensor emb, Tensor labels, std::optional<Tensor> ref_emb,
                                              std::optional<Tensor> ref_labels,
                                              std::optional<Tensor> self_index,
                                              std::optional<int64_t> ignore_label, std::optional<Tensor> seed,
                                              int64_t positive, int64_t negative, int64_t distance,
                                              double cutoff, double nonzero_loss_cutoff, int64_t loss,
                                              int64_t reduction, double margin, double temperature) {
  const MiningArguments arguments(emb, labels, ref_emb, ref_labels, self_index, ignore_label, seed, positive,
                                  negative, distance, cutoff, nonzero_loss_cutoff);
  const Objective objective{word<Loss>(loss, 4), word<Reduction>(reduction, 4), margin, temperature};
  return arguments.batch.anchors.storage == Storage::float64 ? forward_typed<double>(arguments, objective)
                                                             : forward_typed<float>(arguments, objective);
}

template <class T>
void backward_typed(const Tensor& grad, const Rows& anchors, const Rows& candidates, bool self_mining,
                    const Tensor& picks, const Tensor& terms, Distance distance, void* anchor_gradient,
                    void* candidate_gradient) {
  const int64_t count = anchors.count;
  const int64_t* picked = integers(picks, 2 * count, "picks");
  for (int64_t i = 0; i < 2 * count; ++i)
    STD_TORCH_CHECK(picked[i] < candidates.count, "picks out of range: ", picked[i]);
  const T* term = values<T>(terms, 4 * count, "terms");
  const bool per_anchor = grad.dim() == 1;
  const T* upstream = values<T>(grad, per_anchor ? count : 1, "grad");
  differentiate<T>(kernels<T>(), torch_pool(), anchors, candidates, self_mining, distance, picked,
                   picked + count, term, term + count, term + 2 * count, term + 3 * count, upstream,
                   per_anchor, anchor_gradient, candidate_gradient);
}

std::tuple<Tensor, Tensor> backward_op(Tensor grad, Tensor emb, std::optional<Tensor> ref_emb, Tensor picks,
                                       Tensor terms, int64_t distance, bool wants_emb, bool wants_ref) {
  const Rows anchors = rows_of(emb);
  const Rows candidates = ref_emb ? rows_of(*ref_emb) : anchors;
  STD_TORCH_CHECK(candidates.width == anchors.width && candidates.storage == anchors.storage,
                  "emb and ref_emb must agree in width and type");
  wants_ref = wants_ref && ref_emb.has_value();
  const ScalarType type = emb.scalar_type();
  Tensor emb_gradient = wants_emb ? empty({anchors.count, anchors.width}, type) : empty({0}, type);
  Tensor ref_gradient = wants_ref ? empty({candidates.count, candidates.width}, type) : empty({0}, type);
  const auto differentiate_as =
      anchors.storage == Storage::float64 ? backward_typed<double> : backward_typed<float>;
  differentiate_as(grad, anchors, candidates, !ref_emb.has_value(), picks, terms, word<Distance>(distance, 3),
                   wants_emb ? emb_gradient.mutable_data_ptr() : nullptr,
                   wants_ref ? ref_gradient.mutable_data_ptr() : nullptr);
  return {emb_gradient, ref_gradient};
}

TupleObjective objective_of(int64_t objective, int64_t reduction, const std::vector<double>& parameters,
                            const std::optional<Tensor>& beta, const Selection& selection) {
  TupleObjective result;
  result.tuples = word<Tuples>(objective, 6);
  result.reduction = word<Reduction>(reduction, 4);
  constexpr size_t wanted[] = {1, 0, 1, 4, 2, 1};
  STD_TORCH_CHECK(parameters.size() == wanted[objective], "objective ", objective, " has ", wanted[objective],
                  " parameters, got ", int64_t(parameters.size()));
  std::copy(parameters.begin(), parameters.end(), result.parameters);
  STD_TORCH_CHECK(beta.has_value() == (result.tuples == Tuples::beta_margin), "beta is beta_margin's");
  STD_TORCH_CHECK(result.tuples != Tuples::multi_similarity || selection.distance == Distance::cosine,
                  "multi_similarity is defined on cosine");
  return result;
}

template <class T>
TupleState<T> state_of(const Tensor& counts, const Tensor& picks, const Tensor& state, int64_t anchors) {
  integers(counts, 2, "active");
  integers(picks, 2 * anchors, "picks");
  values<T>(state, 4 * anchors, "state");
  int64_t* picked = static_cast<int64_t*>(picks.mutable_data_ptr());
  T* kept = static_cast<T*>(state.mutable_data_ptr());
  return {static_cast<int64_t*>(counts.mutable_data_ptr()),
          picked,
          picked + anchors,
          kept,
          kept + anchors,
          kept + 2 * anchors,
          kept + 3 * anchors};
}

template <class T>
const T* beta_of(const std::optional<Tensor>& beta, int64_t anchors) {
  return beta ? values<T>(*beta, anchors, "beta") : nullptr;
}

template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor> tuples_forward_typed(const MiningArguments& arguments,
                                                                const TupleObjective& objective,
                                                                const std::optional<Tensor>& beta) {
  const int64_t count = arguments.batch.anchors.count;
  Tensor loss =
      objective.reduction == Reduction::none ? empty({count}, kScalarType<T>) : empty({}, kScalarType<T>);
  Tensor active = empty({2}, ScalarType::Long), picks = empty({2, count}, ScalarType::Long);
  Tensor state = empty({4, count}, kScalarType<T>);
  tuples_forward<T>(kernels<T>(), torch_pool(), arguments.batch, arguments.selection, objective,
                    beta_of<T>(beta, count), static_cast<T*>(loss.mutable_data_ptr()),
                    state_of<T>(active, picks, state, count));
  return {loss, active, picks, state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> tuples_forward_op(
    Tensor emb, Tensor labels, std::optional<Tensor> ref_emb, std::optional<Tensor> ref_labels,
    std::optional<Tensor> self_index, std::optional<int64_t> ignore_label, std::optional<Tensor> seed,
    int64_t positive, int64_t negative, int64_t distance, double cutoff, double nonzero_loss_cutoff,
    int64_t objective, int64_t reduction, std::vector<double> parameters, std::optional<Tensor> beta) {
  const MiningArguments arguments(emb, labels, ref_emb, ref_labels, self_index, ignore_label, seed, positive,
                                  negative, distance, cutoff, nonzero_loss_cutoff, true);
  const TupleObjective wanted = objective_of(objective, reduction, parameters, beta, arguments.selection);
  return arguments.batch.anchors.storage == Storage::float64
             ? tuples_forward_typed<double>(arguments, wanted, beta)
             : tuples_forward_typed<float>(arguments, wanted, beta);
}

template <class T>
void tuples_backward_typed(const Tensor& grad, const Batch& batch, const Selection& selection,
                           const TupleObjective& objective, const std::optional<Tensor>& beta,
                           const Tensor& active, const Tensor& picks, const Tensor& state,
                           void* anchor_gradient, void* candidate_gradient, void* beta_gradient) {
  const int64_t count = batch.anchors.count;
  const TupleState<T> kept = state_of<T>(active, picks, state, count);
  for (int64_t i = 0; i < 2 * count; ++i)
    STD_TORCH_CHECK(kept.positive[i] < batch.candidates.count, "picks out of range: ", kept.positive[i]);
  const bool per_anchor = grad.dim() == 1;
  tuples_backward<T>(kernels<T>(), torch_pool(), batch, selection, objective, beta_of<T>(beta, count), kept,
                     values<T>(grad, per_anchor ? count : 1, "grad"), per_anchor, anchor_gradient,
                     candidate_gradient, static_cast<T*>(beta_gradient));
}

std::tuple<Tensor, Tensor, Tensor> tuples_backward_op(
    Tensor grad, Tensor emb, Tensor labels, std::optional<Tensor> ref_emb, std::optional<Tensor> ref_labels,
    std::optional<Tensor> self_index, std::optional<int64_t> ignore_label, int64_t positive, int64_t negative,
    int64_t distance, int64_t objective, int64_t reduction, std::vector<double> parameters,
    std::optional<Tensor> beta, Tensor active, Tensor picks, Tensor state, bool wants_emb, bool wants_ref) {
  const Batch batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label);
  Selection selection;
  selection.positive = word<Positive>(positive, 4);
  selection.negative = word<Negative>(negative, 6);
  selection.distance = word<Distance>(distance, 3);
  const TupleObjective wanted = objective_of(objective, reduction, parameters, beta, selection);
  wants_ref = wants_ref && ref_emb.has_value();
  const ScalarType type = emb.scalar_type();
  const bool twice = batch.anchors.storage == Storage::float64;
  Tensor emb_gradient =
      wants_emb ? empty({batch.anchors.count, batch.anchors.width}, type) : empty({0}, type);
  Tensor ref_gradient =
      wants_ref ? empty({batch.candidates.count, batch.candidates.width}, type) : empty({0}, type);
  Tensor beta_gradient =
      empty({beta ? batch.anchors.count : 0}, twice ? ScalarType::Double : ScalarType::Float);
  const auto differentiate_as = twice ? tuples_backward_typed<double> : tuples_backward_typed<float>;
  differentiate_as(grad, batch, selection, wanted, beta, active, picks, state,
                   wants_emb ? emb_gradient.mutable_data_ptr() : nullptr,
                   wants_ref ? ref_gradient.mutable_data_ptr() : nullptr,
                   beta ? beta_gradient.mutable_data_ptr() : nullptr);
  return {emb_gradient, ref_gradient, beta_gradient};
}

}  // namespace

// tripletops/backends/cpu.py calls these through ctypes, so that the library needs nothing of any Python.
// ctypes knows no exceptions: none may get out.
extern "C" {

// The instruction sets that this machine can run, separated by spaces, the best one last.
__attribute__((visibility("default"))) const char* tripletops_isa_variants() noexcept {
  static const std::string names = [] {
    std::string joined;
    for (const Variant* variant : usable_variants())
      joined += (joined.empty() ? "" : " ") + std::string(variant->name);
    return joined;
  }();
  return names.c_str();
}

// The one in use; null where TRIPLETOPS_ISA names one that cannot run here.
__attribute__((visibility("default"))) const char* tripletops_isa() noexcept {
  try {
    return selected_variant().name;
  } catch (const std::invalid_argument&) {
    return nullptr;
  }
}

}  // extern "C"

STABLE_TORCH_LIBRARY_IMPL(tripletops, CPU, library) {
  library.impl("mine", TORCH_BOX(&mine_op));
  library.impl("triplet_forward", TORCH_BOX(&forward_op));
  library.impl("triplet_backward", TORCH_BOX(&backward_op));
  library.impl("tuples_forward", TORCH_BOX(&tuples_forward_op));
  library.impl("tuples_backward", TORCH_BOX(&tuples_backward_op));
}
