// The Python module. Only this file includes pybind11.
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "guard.h"
#include "machines.h"
#include "operators.h"
#include "ram_allocator.h"
#include "storage_access.h"
#include "transfer_queue.h"

namespace py = pybind11;
using namespace megatron_swap;

namespace {

// Converts steps, which transfer_queue.py declares. They are recognised by the names of their classes: nothing is imported here.
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
    } else {
      throw py::type_error("not a step: " + kind);
    }
  }
  return job;
}

// The functions of `add_reload`. Never freed: an operator may run while the interpreter ends.
py::dict& reload_functions() {
  static auto* functions = new py::dict;
  return *functions;
}

// Calls each of them with the address of `storage` until one returns True.
void reload(c10::StorageImpl& storage) {
  py::gil_scoped_acquire locked;
  const auto address = reinterpret_cast<std::uintptr_t>(&storage);
  try {
    for (const auto& function : py::list(reload_functions().attr("values")())) {
      if (function(address).cast<bool>()) return;
    }
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());  // it passes through a library that may be built without Python
  }
}

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

using Tuples = std::vector<std::pair<std::uintptr_t, std::size_t>>;  // address and size of pieces of host memory

c10::StorageImpl& storage(std::uintptr_t address) {
  if (address == 0) throw py::value_error("storage_impl=0; it is an untyped_storage()._cdata");
  return *reinterpret_cast<c10::StorageImpl*>(address);
}

}  // namespace

PYBIND11_MODULE(megatron_swap_native, module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;  // for every call that takes a lock of ours, or waits

  py::class_<TransferQueue>(module, "Core")
      .def(py::init([](std::string name, std::size_t num_in_flight, const py::object& cuda_library) {
             CudaRuntime cuda;
             if (!cuda_library.is_none()) cuda = CudaRuntime::from_library(cuda_library.cast<std::string>());
             return std::make_unique<TransferQueue>(std::move(name), num_in_flight, cuda);
           }))
      .def("start", &TransferQueue::start, Unlocked())
      .def("is_started", &TransferQueue::is_started, Unlocked())
      .def("add",
           [](TransferQueue& queue, const py::iterable& steps, bool at_head) {
             Job job = to_job(steps);
             py::gil_scoped_release unlocked;
             return queue.add(std::move(job), at_head);
           })
      .def("erase", &TransferQueue::erase, Unlocked())
      .def("state", [](const TransferQueue& queue, Ticket ticket) { return static_cast<int>(queue.state(ticket)); },
           Unlocked())
      .def("wait",
           [](const TransferQueue& queue, Ticket ticket, int until, double seconds) {
             return static_cast<int>(queue.wait(ticket, static_cast<JobState>(until), seconds));
           },
           Unlocked())
      .def("wait_all", &TransferQueue::wait_all, Unlocked())
      .def("failure", &TransferQueue::failure, Unlocked())
      .def("first_failure", &TransferQueue::first_failure, Unlocked())
      .def("close", &TransferQueue::close, Unlocked())
      .def("join", &TransferQueue::join, Unlocked())
      .def("abandon", &TransferQueue::abandon, Unlocked())
      .def("num_waiting", &TransferQueue::num_waiting, Unlocked());

  module.def("refuse", [](std::uintptr_t address, std::string message) { refuse(storage(address), std::move(message)); });
  module.def("allow", [](std::uintptr_t address) { allow(storage(address)); });

  set_reload(reload);
  module.def("add_reload", [](py::int_ key, py::function function) { reload_functions()[key] = function; });
  module.def("remove_reload", [](py::int_ key) { reload_functions().attr("pop")(key, py::none()); });
  py::class_<Flag>(module, "Flag")
      .def(py::init<>())
      .def("raise_", &Flag::raise)
      .def_property_readonly("address", [](Flag& flag) { return reinterpret_cast<std::uintptr_t>(&flag); });

  py::class_<Rescue>(module, "Rescue")
      .def_readonly("wanted_bytes", &Rescue::wanted_bytes)
      .def_readonly("freed_bytes", &Rescue::freed_bytes)
      .def_readonly("copied_bytes", &Rescue::copied_bytes)
      .def_readonly("held_bytes", &Rescue::held_bytes)
      .def_readonly("ms", &Rescue::ms)
      .def_readonly("groups", &Rescue::groups);

  // Never wait for the guard's lock with the interpreter's lock: the thread that holds the guard's may wait for a copy
  // that a Python thread runs.
  set_unlocked([](const std::function<bool()>& call) {
    if (!PyGILState_Check()) return call();
    py::gil_scoped_release unlocked;
    return call();
  });
  py::class_<Guard>(module, "Guard")
      .def(py::init([](std::size_t most_host_bytes) {
             return std::make_unique<Guard>(ram_machine(), kRam, most_host_bytes);
           }))
      .def(py::init([](std::size_t most_host_bytes, const std::string& cuda_library, int device, std::uintptr_t stream,
                       std::uintptr_t done) {
             const auto cuda = CudaRuntime::from_library(cuda_library);
             return std::make_unique<Guard>(cuda_machine(cuda, pointer(stream), pointer(done)), device, most_host_bytes);
           }))
      .def("begin", &Guard::begin, Unlocked())
      .def("end", &Guard::end, Unlocked())
      .def("pause_here", [](Guard&, bool pause) { pause_here(pause); })
      .def("offer",
           [](Guard& guard, Key key, std::uintptr_t address, std::size_t num_bytes, std::size_t num_owners,
              std::int64_t next_use, bool is_copied, std::uintptr_t event, std::int64_t group) {
             guard.offer(key, {&storage(address), num_bytes, num_owners, next_use, is_copied, pointer(event), group});
           },
           Unlocked())
      .def("withdraw",
           [](Guard& guard, Key key) -> std::optional<Tuples> {
             const std::optional<Pieces> pieces = guard.withdraw(key);
             if (!pieces) return std::nullopt;
             Tuples tuples;
             for (const Piece& piece : *pieces) {
               tuples.emplace_back(reinterpret_cast<std::uintptr_t>(piece.address), piece.num_bytes);
             }
             return tuples;
           },
           Unlocked())
      .def("release",
           [](Guard& guard, const Tuples& tuples) {
             Pieces pieces;
             for (const auto& [address, size] : tuples) pieces.push_back({pointer(address), size});
             guard.release(pieces);
           },
           Unlocked())
      .def("take_evicted", &Guard::take_evicted, Unlocked())
      .def("num_evictions", &Guard::num_evictions)
      .def("take_rescues", &Guard::take_rescues, Unlocked())
      .def("set_most_host_bytes", &Guard::set_most_host_bytes, Unlocked())
      .def("mapped_bytes", &Guard::mapped_bytes, Unlocked())
      .def("pin", &Guard::pin, Unlocked())
      .def("report", &Guard::report, Unlocked());

  module.def("make_room_address", [] { return reinterpret_cast<std::uintptr_t>(&make_room); });
  module.def("report_address", [] { return reinterpret_cast<std::uintptr_t>(&report); });
  module.def("is_any_guard_in_force", &is_any_in_force, Unlocked());
  module.def("limit_ram", &limit_ram);
  module.def("unlimit_ram", &unlimit_ram);
  module.def("ram_in_use", &ram_in_use);
  module.def("ram_peak", &ram_peak);

  module.def("in_use", [](std::uintptr_t address) { return in_use(storage(address)); });
}
