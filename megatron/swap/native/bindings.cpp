// The only file that knows both Python and what is below it.
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "operators.h"
#include "storage_access.h"
#include "transfer_queue.h"

namespace py = pybind11;
using namespace megatron_swap;

namespace {

// Steps come as they are declared in base.py, by name: this file imports nothing of ours.
Job to_job(const py::iterable& steps) {
  Job job;
  for (const py::handle step : steps) {
    const auto number = [&](const char* name) { return step.attr(name).cast<std::int64_t>(); };
    const auto pointer = [&](const char* name) {
      return reinterpret_cast<void*>(step.attr(name).cast<std::uintptr_t>());
    };
    const auto size = [&] { return static_cast<std::size_t>(number("num_bytes")); };
    const auto kind = py::type::of(step).attr("__name__").cast<std::string>();
    if (kind == "HostCopy") {
      job.emplace_back(HostCopy{pointer("target"), pointer("source"), size()});
    } else if (kind == "CudaCopy") {
      job.emplace_back(CudaCopy{pointer("target"), pointer("source"), size(), pointer("stream"), pointer("after"),
                                pointer("done"), static_cast<int>(number("device"))});
    } else if (kind == "FileRead") {
      job.emplace_back(FileRead{static_cast<int>(number("file")), number("offset"), pointer("target"), size()});
    } else if (kind == "FileWrite") {
      job.emplace_back(FileWrite{static_cast<int>(number("file")), number("offset"), pointer("source"), size()});
    } else {
      throw py::type_error("not a step: " + kind);
    }
  }
  return job;
}

// Calls, for a storage's address, each of the functions that Python has given, until one says True. Never freed: an
// operator may run while the interpreter ends.
py::dict& bring_back_functions() {
  static auto* functions = new py::dict;
  return *functions;
}

void bring_back(c10::StorageImpl& storage) {
  py::gil_scoped_acquire locked;
  const auto address = reinterpret_cast<std::uintptr_t>(&storage);
  try {
    for (const auto& function : py::list(bring_back_functions().attr("values")())) {
      if (function(address).cast<bool>()) return;
    }
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());  // it goes through a library that may know nothing of Python
  }
}

c10::StorageImpl& storage(std::uintptr_t address) {
  if (address == 0) throw py::value_error("storage_impl=0; it is an untyped_storage()._cdata");
  return *reinterpret_cast<c10::StorageImpl*>(address);
}

}  // namespace

PYBIND11_MODULE(megatron_swap_native, module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;  // every call that takes the queue's lock, or waits

  py::class_<TransferQueue>(module, "Core")
      .def(py::init([](std::string name, std::size_t num_in_flight, const py::object& cuda_library) {
             CudaRuntime cuda;
             if (!cuda_library.is_none()) cuda = CudaRuntime::from_library(cuda_library.cast<std::string>());
             return std::make_unique<TransferQueue>(std::move(name), num_in_flight, cuda);
           }),
           py::arg("name"), py::arg("num_in_flight"), py::arg("cuda_library"))
      .def("start", &TransferQueue::start, Unlocked())
      .def("is_started", &TransferQueue::is_started, Unlocked())
      .def("add",
           [](TransferQueue& queue, const py::iterable& steps, bool at_head) {
             Job job = to_job(steps);
             py::gil_scoped_release unlocked;
             return queue.add(std::move(job), at_head);
           })
      .def("erase", &TransferQueue::erase, Unlocked())
      .def("dequeue", &TransferQueue::dequeue, Unlocked())
      .def("state", [](const TransferQueue& queue, Ticket ticket) { return static_cast<int>(queue.state(ticket)); },
           Unlocked())
      .def("wait",
           [](const TransferQueue& queue, Ticket ticket, int until, double seconds) {
             return static_cast<int>(queue.wait(ticket, static_cast<State>(until), seconds));
           },
           Unlocked())
      .def("wait_all", &TransferQueue::wait_all, Unlocked())
      .def("failure",
           [](TransferQueue& queue, Ticket ticket) {
             Failure failure;
             {
               py::gil_scoped_release unlocked;
               failure = queue.failure(ticket);
             }
             return py::make_tuple(failure.error_number, failure.text);
           })
      .def("first_failure", &TransferQueue::first_failure, Unlocked())
      .def("close", &TransferQueue::close, Unlocked())
      .def("join", &TransferQueue::join, Unlocked())
      .def("abandon", &TransferQueue::abandon, Unlocked())
      .def("num_waiting", &TransferQueue::num_waiting, Unlocked())
      .def("num_under_way", &TransferQueue::num_under_way, Unlocked());

  module.def("refuse", [](std::uintptr_t address, std::string message) { refuse(storage(address), std::move(message)); },
             py::arg("storage_impl"), py::arg("message"));
  module.def("allow", [](std::uintptr_t address) { allow(storage(address)); }, py::arg("storage_impl"));

  set_bring_back(bring_back);
  module.def("add_bring_back", [](py::int_ key, py::function function) { bring_back_functions()[key] = function; },
             py::arg("key"), py::arg("function"));
  module.def("remove_bring_back", [](py::int_ key) { bring_back_functions().attr("pop")(key, py::none()); },
             py::arg("key"));
  module.def("in_use", [](std::uintptr_t address) { return in_use(storage(address)); }, py::arg("storage_impl"));
}
