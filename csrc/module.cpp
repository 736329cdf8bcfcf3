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
#include "kernels/certified.h"

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

// uint16 arrays hold bfloat16, which NumPy has no name for.
Matrix matrix_of(const py::array& array) {
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

// What a call is given: codes and numbers in the order of tripletops/_words.py.
struct Given {
  std::string instruction_set;
  int threads;
  py::array emb;
  Integers labels;
  std::vector<int> codes;
  std::vector<double> numbers;
  std::optional<py::array> ref_emb;
  std::optional<Integers> ref_labels, self_index;
  std::optional<int64_t> ignore_label;
  uint64_t seed;
  std::optional<double> learned;  // the same number for every anchor
};

Batch batch_of(const Given& given) {
  Batch batch;
  batch.anchors = batch.candidates = matrix_of(given.emb);
  check_length(given.labels, batch.anchors.count);
  batch.anchor_labels = batch.candidate_labels = given.labels.data();
  batch.self_mining = !given.ref_emb;
  if (given.ref_emb) {
    batch.candidates = matrix_of(*given.ref_emb);
    if (!given.ref_labels) throw py::value_error("ref_emb needs ref_labels");
    if (batch.candidates.width != batch.anchors.width || batch.candidates.storage != batch.anchors.storage)
      throw py::value_error("emb and ref_emb must agree in width and type");
    check_length(*given.ref_labels, batch.candidates.count);
    batch.candidate_labels = given.ref_labels->data();
    if (given.self_index) {
      check_length(*given.self_index, batch.anchors.count);
      batch.self_index = given.self_index->data();
    }
  }
  batch.ignoring = given.ignore_label.has_value();
  batch.ignore_label = given.ignore_label.value_or(0);
  return batch;
}

template <class Enum>
void read(const std::vector<int>& codes, size_t place, Enum& word) {
  if (place >= codes.size() || codes[place] < 0 || codes[place] >= count_of(Enum()))
    throw py::value_error("no such word");
  word = Enum(codes[place]);
}

Call call_of(const Given& given) {
  Call call;
  call.batch = batch_of(given);
  read(given.codes, 0, call.objective);
  read(given.codes, 1, call.positive);
  read(given.codes, 2, call.negative);
  read(given.codes, 3, call.distance);
  read(given.codes, 4, call.loss);
  read(given.codes, 5, call.reduction);
  if (int64_t(given.numbers.size()) != kNumbers) throw py::value_error("a call has all numbers");
  std::copy(given.numbers.begin(), given.numbers.end(), reinterpret_cast<double*>(&call.numbers));
  if (given.learned.has_value() != kLearns[int(call.objective)])
    throw py::value_error("a learned number is for objectives that learn one");
  call.seed = given.seed;
  return call;
}

template <class T>
py::tuple loss_typed(const Given& given) {
  Call call = call_of(given);
  const int64_t count = call.batch.anchors.count;
  const bool per_anchor = call.reduction == Reduction::none;
  py::array_t<T> loss(per_anchor ? count : 1), saved({kSaved[int(call.objective)], count}),
      learned_gradient(count);
  py::array_t<int64_t> picks({int64_t(2), count});
  py::array_t<double> totals(3);
  py::array emb_gradient = like(given.emb),
            ref_gradient = given.ref_emb ? like(*given.ref_emb) : emb_gradient;
  const std::vector<T> learned(size_t(count), T(given.learned.value_or(0)));
  const std::vector<T> upstream(size_t(std::max<int64_t>(count, 1)), T(1));
  if (given.learned) call.learned = learned.data();
  double* total = totals.mutable_data();
  int64_t* picked = picks.mutable_data();
  const Evaluated<T> result = {
      loss.mutable_data(), total, reinterpret_cast<Shares*>(total + 1), picked, picked + count,
      saved.mutable_data()};
  const Gradients<T> wanted = {upstream.data(), per_anchor, emb_gradient.mutable_data(),
                               ref_gradient.mutable_data(),
                               given.learned ? learned_gradient.mutable_data() : nullptr};
  const Functions<T>& functions = functions_of<T>(instruction_set_named(given.instruction_set));
  {
    py::gil_scoped_release release;
    evaluate<T>(functions, thread_pool(given.threads), call, result);
    differentiate<T>(functions, thread_pool(given.threads), call, result, wanted);
  }
  return py::make_tuple(loss, totals, picks, saved, emb_gradient,
                        given.ref_emb ? py::object(ref_gradient) : py::none(),
                        given.learned ? py::object(learned_gradient) : py::none());
}

py::tuple loss(const std::string& instruction_set, int threads, const py::array& emb, const Integers& labels,
               const std::vector<int>& codes, const std::vector<double>& numbers,
               const std::optional<py::array>& ref_emb, const std::optional<Integers>& ref_labels,
               const std::optional<Integers>& self_index, std::optional<int64_t> ignore_label, uint64_t seed,
               const std::optional<double>& learned) {
  const Given given = {instruction_set, threads,    emb,        labels,       codes, numbers,
                       ref_emb,         ref_labels, self_index, ignore_label, seed,  learned};
  return matrix_of(emb).storage == Storage::float64 ? loss_typed<double>(given) : loss_typed<float>(given);
}

py::tuple certified_errors_of(const std::string& instruction_set, const py::array& emb, int distance,
                              bool farthest, int bytes) {
  const std::vector<int64_t> labels(size_t(emb.shape(0)), 0);
  Call call;
  call.batch.anchors = call.batch.candidates = matrix_of(emb);
  call.batch.anchor_labels = call.batch.candidate_labels = labels.data();
  call.distance = Distance(distance);
  const py::ssize_t count = emb.shape(0);
  py::array_t<double> exact({count, count}), approximate({count, count}), bound({count, count});
  if (!certified_errors(functions_of<float>(instruction_set_named(instruction_set)), call,
                        farthest ? Keep::farthest : Keep::nearest, bytes, exact.mutable_data(),
                        approximate.mutable_data(), bound.mutable_data()))
    throw py::value_error(instruction_set + " has no fast products of integers");
  return py::make_tuple(exact, approximate, bound);
}

}  // namespace

PYBIND11_MODULE(_kernels, module, py::mod_gil_not_used()) {
  module.doc() = "The CPU kernels of tripletops on NumPy arrays, one instruction set at a time.";
  module.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const InstructionSet& set : usable_instruction_sets()) names.emplace_back(set.name);
    return names;
  });
  module.def(
      "certified_errors", &certified_errors_of, py::arg("instruction_set"), py::arg("emb"),
      py::arg("distance"), py::arg("farthest"), py::arg("bytes"),
      "Half squared distances of all pairs, exactly and by integers, and the bound on their difference.");
  module.def(
      "use_certified", [](int use) { set_use_of_certified(UseCertified(use)); },
      "0 forbids the certified pass, 1 leaves it to the switching rule, 2 forces it.");
  module.def("selected", [] { return std::string(selected_instruction_set().name); });
  module.def(
      "loss", &loss, py::arg("instruction_set"), py::arg("threads"), py::arg("emb"), py::arg("labels"),
      py::kw_only(), py::arg("codes"), py::arg("numbers"), py::arg("ref_emb") = py::none(),
      py::arg("ref_labels") = py::none(), py::arg("self_index") = py::none(),
      py::arg("ignore_label") = py::none(), py::arg("seed") = 0, py::arg("learned") = py::none(),
      "A loss and its gradients with one instruction set: (loss, totals, picks, saved, gradient of emb, "
      "gradient of ref_emb or None, gradient of learned by anchor or None).");
}
