// Shows the operators of this thread to Python, once each has run, below autograd and autocast.
//
// A mode takes the host 5 us for each operator, most of it to make Python objects of arguments, and torch runs other
// operators while one is active. Here they pass the fallback of a dispatch key that lies directly above that of modes,
// and that torch leaves to extensions (`Fake`). Of a run whose operators are known, Python sees the wanted ones alone.
#if __has_include(<ATen/core/NamedTensor.h>)  // torch 2.14 knows no names
#include <ATen/core/NamedTensor.h>
#else
namespace at { struct NoNamesGuard { ~NoNamesGuard() {} }; }
#endif
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace {

using c10::DispatchKey;
using c10::impl::TorchDispatchModeTLS;

constexpr auto KEY = DispatchKey::Fake;
const c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, KEY);
// What the engine runs for itself is seen neither here nor by modes of the user.
const c10::DispatchKeySet UNSEEN{KEY, DispatchKey::Python, DispatchKey::PythonTLSSnapshot};

// A name stands for another operator, maybe, once one was deregistered.
std::atomic<uint64_t> num_deregistered{0};

class Deregistrations : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override { ++num_deregistered; }
};

// Operators in their order. Those at `wanted` positions are reported.
struct Sequence {
  std::vector<c10::OperatorName> names;
  std::vector<bool> wanted;
  const uint64_t num_deregistered_before = num_deregistered;

  Sequence(const std::vector<std::pair<std::string, std::string>>& given, std::vector<bool> wanted)
      : wanted(std::move(wanted)) {
    TORCH_CHECK(this->wanted.size() == given.size(), given.size(), " operators, and ", this->wanted.size(), " flags");
    for (const auto& [name, overload] : given) names.emplace_back(name, overload);
  }

  bool has(size_t position, const c10::OperatorName& name) const {
    return position < names.size() && names[position] == name && num_deregistered_before == num_deregistered;
  }
};

struct Run {
  const Sequence* sequence;  // none: all operators are reported
  py::function report;
  py::function resolve;  // gives the operator of a name and an overload as Python calls it; None: it only makes views
  size_t num_modes = 0;  // at the beginning, as the next two
  int graph_task = 0;
  uint64_t num_strays = 0;
  size_t position = 0;
  bool is_other = false;  // an operator did not fit
  // The layer has modes of its own, behind which arguments may be others; or it takes a gradient, for which torch runs
  // operators by who else holds tensors.
  bool is_unusual = false;
};

thread_local Run* running = nullptr;  // while the layer runs: held by its `Following`
std::atomic<uint64_t> num_strays{0};  // operators in threads to which torch passed the key on: those of backward

// Return what Python calls an operator. It is held, and never freed.
PyObject* resolved(Run& run, const c10::OperatorHandle& handle) {
  thread_local std::unordered_map<c10::OperatorName, PyObject*> known;
  thread_local uint64_t known_since = 0;
  if (known_since != num_deregistered) known.clear();
  known_since = num_deregistered;
  const auto& name = handle.operator_name();
  if (auto found = known.find(name); found != known.end()) return found->second;
  py::gil_scoped_acquire lock;
  return known[name] = run.resolve(name.name, name.overload_name).release().ptr();
}

// Python's operators fill in what is left out, and numbers stand for types of elements, layouts and memory formats.
bool is_default(const c10::Argument& argument, const c10::IValue& value) {
  const auto& otherwise = argument.default_value();
  return otherwise && !value.isTensor() && value.tagKind() == otherwise->tagKind() && value == *otherwise;
}

py::object to_python(const c10::IValue& value) {
  at::NoNamesGuard without_names;  // named tensors are refused otherwise
  return torch::jit::toPyObject(value);
}

void report(Run& run, py::object what, const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given,
            const torch::jit::Stack& stack) {
  py::dict options;
  size_t num_args = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (is_default(argument, given[i])) continue;
    if (argument.kwarg_only()) {
      options[py::str(argument.name())] = to_python(given[i]);
    } else {
      num_args = i + 1;
    }
  }
  py::tuple args(num_args);
  for (size_t i = 0; i < num_args; ++i) args[i] = to_python(given[i]);
  const size_t num_results = schema.returns().size();
  py::tuple results(num_results);
  for (size_t i = 0; i < num_results; ++i) {
    results[i] = to_python(stack[stack.size() - num_results + i]);
  }
  run.report(std::move(what), args, options, num_results == 1 ? py::object(results[0]) : py::object(results));
}

struct Role {
  bool is_expected = false;  // the next of the sequence
  bool is_wanted = false;
  bool is_other = false;
};

// Return the role of the operator, which is about to run.
Role role_of(Run& run, const c10::OperatorHandle& handle) {
  if (size_t(TorchDispatchModeTLS::stack_len()) != run.num_modes ||
      torch::autograd::get_current_graph_task_id() != run.graph_task) {
    run.is_other = run.is_unusual = true;
  }
  if (run.is_other) return {};
  if (run.sequence && run.sequence->has(run.position, handle.operator_name())) {
    return {true, run.sequence->wanted[run.position], false};
  }
  const bool makes_views = resolved(run, handle) == Py_None;
  return {false, !run.sequence && !makes_views, run.sequence && !makes_views};
}

void follow(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Neither the operators that this one calls count, nor those of the report.
  c10::impl::ExcludeDispatchKeyGuard once(KEY);
  Run* run = running;
  if (run == nullptr) {
    ++num_strays;
    handle.redispatchBoxed(keys & BELOW, stack);
    return;
  }
  const auto& schema = handle.schema();
  const Role role = role_of(*run, handle);
  std::vector<c10::IValue> given;
  if (role.is_wanted) given.assign(stack->end() - schema.arguments().size(), stack->end());
  handle.redispatchBoxed(keys & BELOW, stack);
  const size_t position = run->position;
  run->position += role.is_expected;  // an operator that fails does not count
  run->is_other |= role.is_other;
  if (!role.is_wanted) return;
  // Below autograd views do not share the version counter, by which Python detects changes in place. What autocast
  // casts is cast already.
  auto local = c10::impl::tls_local_dispatch_key_set();
  local.excluded_ = (local.excluded_ | c10::autocast_dispatch_keyset).remove(DispatchKey::ADInplaceOrView);
  c10::impl::ForceDispatchKeyGuard with_versions(local);
  py::gil_scoped_acquire lock;
  auto what = run->sequence ? py::object(py::int_(position)) : py::reinterpret_borrow<py::object>(resolved(*run, handle));
  report(*run, what, schema, given, *stack);
}

// Follows the operators of this thread from `begin` to `end`. Within another, which sees none of them.
class Following {
 public:
  Following(const Sequence* sequence, py::function report, py::function resolve)
      : run_{sequence, std::move(report), std::move(resolve)} {}
  Following(const Following&) = delete;
  ~Following() { end(); }

  void begin() {
    TORCH_CHECK(!guard_, "it has begun already");
    run_.num_modes = TorchDispatchModeTLS::stack_len();
    run_.graph_task = torch::autograd::get_current_graph_task_id();
    run_.num_strays = num_strays;
    outer_ = running;
    running = &run_;
    guard_.emplace(KEY);
  }

  void end() {
    if (!guard_) return;
    guard_.reset();
    running = outer_;
    saw_all_ = !run_.is_unusual && run_.num_strays == num_strays;
  }

  bool saw_all() const { return saw_all_; }
  bool is_as_expected() const {
    return saw_all_ && !run_.is_other && run_.sequence && run_.position == run_.sequence->names.size();
  }

 private:
  Run run_;
  Run* outer_ = nullptr;
  bool saw_all_ = false;
  std::optional<c10::impl::IncludeDispatchKeyGuard> guard_;
};

// Operators of this thread are seen neither here nor by modes while it lives.
class Unseen {
 public:
  void enter() { guard_.emplace(UNSEEN); }
  void exit(const py::args&) { guard_.reset(); }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

}  // namespace

PYBIND11_MODULE(megatron_swap_operators, module) {
  // Here, since an error in an initializer of the library would end the process: another extension may use the key.
  static torch::Library library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  static auto listening = c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Deregistrations>());
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&follow>());
  module.attr("KEY") = KEY;
  py::class_<Sequence>(module, "Sequence")
      .def(py::init<const std::vector<std::pair<std::string, std::string>>&, std::vector<bool>>());
  auto following = py::class_<Following>(module, "Following");
  following
      .def(py::init<const Sequence*, py::function, py::function>(), py::keep_alive<1, 2>(), py::arg("sequence").none(),
           py::arg("report"), py::arg("resolve"))
      .def("begin", &Following::begin)
      .def("end", &Following::end)
      .def_property_readonly("saw_all", &Following::saw_all)
      .def_property_readonly("is_as_expected", &Following::is_as_expected);
  following.attr("unseen") = py::class_<Unseen>(module, "Unseen")
      .def(py::init<>())
      .def("__enter__", &Unseen::enter)
      .def("__exit__", &Unseen::exit);
}
