// The two devices that a guard can serve.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "cuda_runtime.h"
#include "guard.h"

namespace megatron_swap {

// An event of the emulated device; it is raised once.
class Flag {
 public:
  void raise();
  void wait();

 private:
  std::mutex mutex_;
  std::condition_variable raised_;
  bool is_raised_ = false;
};

// The emulated device in RAM; events are `Flag`s.
std::unique_ptr<Machine> ram_machine();

// Copies run on `stream`, and `done` is recorded behind them. Only the guard may use the two.
std::unique_ptr<Machine> cuda_machine(const CudaRuntime& cuda, void* stream, void* done);

}  // namespace megatron_swap
