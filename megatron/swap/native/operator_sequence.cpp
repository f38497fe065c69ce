// Follows the operators that a layer runs along those that it ran before, without Python but for a few of them.
//
// A mode of torch (`torch_dispatch`) sees the same operators, but takes the host 5 us for each. Here they pass the
// fallback of a dispatch key that lies directly above that of modes, and that torch leaves to extensions (`Fake`).
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace {

constexpr auto KEY = c10::DispatchKey::Fake;
const c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, KEY);

// An operator, by the address of its schema in the dispatcher's table, where it stays while it is registered.
using Operator = const c10::FunctionSchema*;

// Operators in their order. Those at `wanted` positions are reported.
class Sequence {
 public:
  Sequence(const std::vector<std::pair<std::string, std::string>>& names, std::vector<bool> wanted)
      : wanted_(std::move(wanted)) {
    TORCH_CHECK(wanted_.size() == names.size(), names.size(), " operators, and ", wanted_.size(), " flags");
    for (const auto& [name, overload] : names) {
      auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
      operators_.push_back(&handle.schema());
    }
  }

  size_t size() const { return operators_.size(); }
  bool has(size_t position, Operator op) const { return position < size() && operators_[position] == op; }
  bool wants(size_t position) const { return wanted_[position]; }

 private:
  std::vector<Operator> operators_;
  std::vector<bool> wanted_;
};

// A run along a sequence. `report(position, args, options, result)` is called with each wanted operator, once it has
// run; `is_ignored(name, overload)` says whether an operator may run between those of the sequence.
struct Run {
  const Sequence& sequence;
  py::function report;
  py::function is_ignored;
  std::unordered_map<Operator, bool> ignored = {};
  size_t position = 0;
  bool is_other = false;  // an operator did not fit: no more are reported
};

thread_local Run* running = nullptr;  // while the layer runs: held by the `Following`

bool ignores(Run& run, Operator op) {
  auto [entry, is_new] = run.ignored.try_emplace(op, false);
  if (is_new) {
    py::gil_scoped_acquire lock;
    entry->second = run.is_ignored(op->name(), op->overload_name()).cast<bool>();
  }
  return entry->second;
}

// Python's operators fill in what is left out, and numbers stand for types of elements, layouts and memory formats.
bool is_default(const c10::Argument& argument, const c10::IValue& value) {
  const auto& otherwise = argument.default_value();
  return otherwise && !value.isTensor() && value.tagKind() == otherwise->tagKind() && value == *otherwise;
}

void report(Run& run, size_t position, const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given,
            const torch::jit::Stack& stack) {
  py::gil_scoped_acquire lock;
  py::dict options;
  size_t num_args = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (is_default(argument, given[i])) continue;
    if (argument.kwarg_only()) {
      options[py::str(argument.name())] = torch::jit::toPyObject(given[i]);
    } else {
      num_args = i + 1;
    }
  }
  py::tuple args(num_args);
  for (size_t i = 0; i < num_args; ++i) args[i] = torch::jit::toPyObject(given[i]);
  const size_t num_results = schema.returns().size();
  py::tuple results(num_results);
  for (size_t i = 0; i < num_results; ++i) {
    results[i] = torch::jit::toPyObject(stack[stack.size() - num_results + i]);
  }
  run.report(position, args, options, num_results == 1 ? py::object(results[0]) : py::object(results));
}

void follow(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Neither the operators that this one calls count, nor those of `report`.
  c10::impl::ExcludeDispatchKeyGuard once(KEY);
  const auto& schema = handle.schema();
  Run* run = running;  // none in other threads, to which torch passes the key on
  std::optional<size_t> wanted;
  if (run != nullptr && !run->is_other) {
    if (run->sequence.has(run->position, &schema)) {
      if (run->sequence.wants(run->position)) wanted = run->position;
      ++run->position;
    } else if (!ignores(*run, &schema)) {
      run->is_other = true;
    }
  }
  if (!wanted) {
    handle.redispatchBoxed(keys & BELOW, stack);
    return;
  }
  std::vector<c10::IValue> given(stack->end() - schema.arguments().size(), stack->end());
  handle.redispatchBoxed(keys & BELOW, stack);
  report(*run, *wanted, schema, given, *stack);
}

// Follows the operators of this thread from `begin` to `end`. Within another, which sees none of them.
class Following {
 public:
  Following(const Sequence& sequence, py::function report, py::function is_ignored)
      : run_{sequence, std::move(report), std::move(is_ignored)} {}
  Following(const Following&) = delete;
  ~Following() { end(); }

  void begin() {
    TORCH_CHECK(!guard_, "it has begun already");
    outer_ = running;
    running = &run_;
    guard_.emplace(KEY);
  }

  void end() {
    if (!guard_) return;
    guard_.reset();
    running = outer_;
  }

  bool is_as_expected() const { return !run_.is_other && run_.position == run_.sequence.size(); }

 private:
  Run run_;
  Run* outer_ = nullptr;
  std::optional<c10::impl::IncludeDispatchKeyGuard> guard_;
};

// Operators of this thread are not followed while it lives.
class Unfollowed {
 public:
  void enter() { guard_.emplace(KEY); }
  void exit(const py::args&) { guard_.reset(); }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

}  // namespace

PYBIND11_MODULE(megatron_swap_operators, module) {
  // Here, since an error in an initializer of the library would end the process: another extension may use the key.
  static torch::Library library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&follow>());
  py::class_<Sequence>(module, "Sequence")
      .def(py::init<const std::vector<std::pair<std::string, std::string>>&, std::vector<bool>>());
  py::class_<Following>(module, "Following")
      .def(py::init<const Sequence&, py::function, py::function>(), py::keep_alive<1, 2>())
      .def("begin", &Following::begin)
      .def("end", &Following::end)
      .def_property_readonly("is_as_expected", &Following::is_as_expected);
  py::class_<Unfollowed>(module, "Unfollowed")
      .def(py::init<>())
      .def("__enter__", &Unfollowed::enter)
      .def("__exit__", &Unfollowed::exit);
}
