// The kernels on NumPy arrays, without torch, for the tests: which instruction sets this machine can run, and
// each of them to call. Builds in place have it, wheels don't.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "kernels/mining.h"
#include "kernels/tuples.h"

namespace {

namespace py = pybind11;
using namespace tripletops;
using Integers = py::array_t<int64_t, py::array::c_style>;

Pool thread_pool(int threads) {
  return {threads, [](int count, void (*body)(void*, int), void* context) {
            std::vector<std::thread> threads;
            for (int i = 1; i < count; ++i) threads.emplace_back(body, context, i);
            body(context, 0);
            for (std::thread& thread : threads) thread.join();
          }};
}

template <class T>
const Kernels<T>& kernels_of(const std::string& variant) {
  if constexpr (sizeof(T) == sizeof(float))
    return variant_named(variant).single;
  else
    return variant_named(variant).twice;
}

// uint16 arrays hold bfloat16, which NumPy has no name for.
Rows rows_of(const py::array& array) {
  if (array.ndim() != 2) throw py::value_error("embeddings must have two dimensions");
  if (array.size() > 0 && array.shape(1) > 1 && array.strides(1) != array.itemsize())
    throw py::value_error("the elements of a row must be adjacent");
  Storage storage;
  if (array.dtype().is(py::dtype::of<float>()))
    storage = Storage::float32;
  else if (array.dtype().is(py::dtype::of<double>()))
    storage = Storage::float64;
  else if (array.dtype().is(py::dtype("float16")))
    storage = Storage::float16;
  else if (array.dtype().is(py::dtype::of<uint16_t>()))
    storage = Storage::bfloat16;
  else
    throw py::type_error("embeddings must be float16, float32, float64, or uint16 for bfloat16");
  return {array.data(), array.shape(0), array.shape(1), array.strides(0) / array.itemsize(), storage};
}

void check_length(const Integers& array, int64_t length) {
  if (array.ndim() != 1 || array.shape(0) != length) throw py::value_error("one integer per row is needed");
}

py::array like(const py::array& rows) {
  return py::array(rows.dtype(), std::vector<py::ssize_t>{rows.shape(0), rows.shape(1)});
}

struct Call {
  Batch batch;
  Selection selection;
  Objective objective;
};

template <class T>
py::tuple triplet_typed(const std::string& variant, int threads, const Call& call, const py::array& emb,
                        const std::optional<py::array>& ref_emb) {
  const int64_t count = call.batch.anchors.count;
  py::array_t<int64_t> picks({int64_t(2), count});
  py::array_t<T> terms({int64_t(4), count});
  py::array_t<T> loss(call.objective.reduction == Reduction::none ? count : 1);
  py::array emb_gradient = like(emb), ref_gradient = ref_emb ? like(*ref_emb) : emb_gradient;
  int64_t* picked = picks.mutable_data();
  T* term = terms.mutable_data();
  const Kernels<T>& kernels = kernels_of<T>(variant);
  const std::vector<T> upstream(size_t(std::max<int64_t>(count, 1)), T(1));
  void *anchor_gradient = emb_gradient.mutable_data(), *candidate_gradient = ref_gradient.mutable_data();
  T* losses = loss.mutable_data();
  {
    py::gil_scoped_release release;
    const bool finite = mine<T>(kernels, thread_pool(threads), call.batch, call.selection, picked,
                                picked + count, term, term + count);
    score<T>(call.objective, finite, count, picked, picked + count, term, term + count, losses,
             term + 2 * count, term + 3 * count);
    differentiate<T>(kernels, thread_pool(threads), call.batch.anchors, call.batch.candidates,
                     call.batch.self_mining, call.selection.distance, picked, picked + count, term,
                     term + count, term + 2 * count, term + 3 * count, upstream.data(),
                     call.objective.reduction == Reduction::none, anchor_gradient, candidate_gradient);
  }
  return py::make_tuple(loss, picks, terms, emb_gradient, ref_emb ? py::object(ref_gradient) : py::none());
}

Batch batch_of(const py::array& emb, const Integers& labels, const std::optional<py::array>& ref_emb,
               const std::optional<Integers>& ref_labels, const std::optional<Integers>& self_index,
               std::optional<int64_t> ignore_label) {
  Batch batch;
  batch.anchors = batch.candidates = rows_of(emb);
  check_length(labels, batch.anchors.count);
  batch.anchor_labels = batch.candidate_labels = labels.data();
  batch.self_mining = !ref_emb;
  if (ref_emb) {
    batch.candidates = rows_of(*ref_emb);
    if (!ref_labels) throw py::value_error("ref_emb needs ref_labels");
    if (batch.candidates.width != batch.anchors.width || batch.candidates.storage != batch.anchors.storage)
      throw py::value_error("emb and ref_emb must agree in width and type");
    check_length(*ref_labels, batch.candidates.count);
    batch.candidate_labels = ref_labels->data();
    if (self_index) {
      check_length(*self_index, batch.anchors.count);
      batch.self_index = self_index->data();
    }
  }
  batch.ignoring = ignore_label.has_value();
  batch.ignore_label = ignore_label.value_or(0);
  return batch;
}

template <class Enum>
Enum word(int code, int count) {
  if (code < 0 || code >= count) throw py::value_error("no such word: " + std::to_string(code));
  return Enum(code);
}

py::tuple triplet(const std::string& variant, int threads, const py::array& emb, const Integers& labels,
                  int positive, int negative, int distance, int loss, int reduction, double margin,
                  double temperature, const std::optional<py::array>& ref_emb,
                  const std::optional<Integers>& ref_labels, const std::optional<Integers>& self_index,
                  std::optional<int64_t> ignore_label, uint64_t seed, double cutoff,
                  double nonzero_loss_cutoff) {
  Call call;
  call.batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label);
  call.selection = {
      word<Positive>(positive, 3), word<Negative>(negative, 5), word<Distance>(distance, 3), seed, cutoff,
      nonzero_loss_cutoff};
  call.objective = {word<Loss>(loss, 4), word<Reduction>(reduction, 4), margin, temperature};
  return call.batch.anchors.storage == Storage::float64
             ? triplet_typed<double>(variant, threads, call, emb, ref_emb)
             : triplet_typed<float>(variant, threads, call, emb, ref_emb);
}

template <class T>
py::tuple tuples_typed(const std::string& variant, int threads, const Batch& batch,
                       const Selection& selection, const TupleObjective& objective,
                       const std::optional<double>& beta, const py::array& emb,
                       const std::optional<py::array>& ref_emb) {
  const int64_t count = batch.anchors.count;
  const bool per_anchor = objective.reduction == Reduction::none;
  py::array_t<int64_t> counts(2), picks({int64_t(2), count});
  py::array_t<T> loss(per_anchor ? count : 1), state({int64_t(4), count}), beta_gradient(count);
  py::array emb_gradient = like(emb), ref_gradient = ref_emb ? like(*ref_emb) : emb_gradient;
  const std::vector<T> betas(size_t(count), T(beta.value_or(0)));
  const std::vector<T> upstream(size_t(std::max<int64_t>(count, 1)), T(1));
  int64_t* picked = picks.mutable_data();
  T* kept = state.mutable_data();
  const TupleState<T> saved = {counts.mutable_data(), picked,           picked + count,  kept,
                               kept + count,          kept + 2 * count, kept + 3 * count};
  const Kernels<T>& kernels = kernels_of<T>(variant);
  const T* given_beta = beta ? betas.data() : nullptr;
  void *anchor_gradient = emb_gradient.mutable_data(), *candidate_gradient = ref_gradient.mutable_data();
  T *losses = loss.mutable_data(), *beta_slopes = beta ? beta_gradient.mutable_data() : nullptr;
  {
    py::gil_scoped_release release;
    tuples_forward<T>(kernels, thread_pool(threads), batch, selection, objective, given_beta, losses, saved);
    tuples_backward<T>(kernels, thread_pool(threads), batch, selection, objective, given_beta, saved,
                       upstream.data(), per_anchor, anchor_gradient, candidate_gradient, beta_slopes);
  }
  return py::make_tuple(loss, counts, emb_gradient, ref_emb ? py::object(ref_gradient) : py::none(),
                        beta ? py::object(beta_gradient) : py::none());
}

py::tuple tuples(const std::string& variant, int threads, const py::array& emb, const Integers& labels,
                 int objective, const std::vector<double>& parameters, int positive, int negative,
                 int distance, int reduction, const std::optional<double>& beta,
                 const std::optional<py::array>& ref_emb, const std::optional<Integers>& ref_labels,
                 const std::optional<Integers>& self_index, std::optional<int64_t> ignore_label,
                 uint64_t seed) {
  const Batch batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label);
  Selection selection;
  selection.positive = word<Positive>(positive, 4);
  selection.negative = word<Negative>(negative, 6);
  selection.distance = word<Distance>(distance, 3);
  selection.seed = seed;
  TupleObjective wanted;
  wanted.tuples = word<Tuples>(objective, 6);
  wanted.reduction = word<Reduction>(reduction, 4);
  if (parameters.size() > 4) throw py::value_error("an objective has four parameters at most");
  if (beta.has_value() != (wanted.tuples == Tuples::beta_margin))
    throw py::value_error("beta is beta_margin's");
  std::copy(parameters.begin(), parameters.end(), wanted.parameters);
  const auto run = batch.anchors.storage == Storage::float64 ? tuples_typed<double> : tuples_typed<float>;
  return run(variant, threads, batch, selection, wanted, beta, emb, ref_emb);
}

}  // namespace

PYBIND11_MODULE(_kernels, module, py::mod_gil_not_used()) {
  module.doc() = "The CPU kernels of tripletops on NumPy arrays, one instruction set at a time.";
  module.def("variants", [] {
    std::vector<std::string> names;
    for (const Variant* variant : usable_variants()) names.emplace_back(variant->name);
    return names;
  });
  module.def("selected", [] { return std::string(selected_variant().name); });
  module.def("triplet", &triplet, py::arg("variant"), py::arg("threads"), py::arg("emb"), py::arg("labels"),
             py::kw_only(), py::arg("positive"), py::arg("negative"), py::arg("distance"),
             py::arg("loss") = 0, py::arg("reduction") = 0, py::arg("margin") = 0.2,
             py::arg("temperature") = 1.0, py::arg("ref_emb") = py::none(),
             py::arg("ref_labels") = py::none(), py::arg("self_index") = py::none(),
             py::arg("ignore_label") = py::none(), py::arg("seed") = 0, py::arg("cutoff") = 0.5,
             py::arg("nonzero_loss_cutoff") = 1.4,
             "Mine, score and differentiate one triplet per anchor with one variant: (loss, picks, terms, "
             "gradient of emb, gradient of ref_emb or None).");
  module.def("tuples", &tuples, py::arg("variant"), py::arg("threads"), py::arg("emb"), py::arg("labels"),
             py::kw_only(), py::arg("objective"), py::arg("parameters"), py::arg("positive") = 3,
             py::arg("negative") = 5, py::arg("distance") = 0, py::arg("reduction") = 0,
             py::arg("beta") = py::none(), py::arg("ref_emb") = py::none(),
             py::arg("ref_labels") = py::none(), py::arg("self_index") = py::none(),
             py::arg("ignore_label") = py::none(), py::arg("seed") = 0,
             "An objective over many tuples and its gradients with one variant: (loss, counts, gradient of "
             "emb, gradient of ref_emb or None, gradient of beta by anchor or None).");
}
