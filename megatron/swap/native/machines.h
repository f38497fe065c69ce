// The two devices that a guard may serve.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "cuda_runtime.h"
#include "guard.h"

namespace megatron_swap {

// An event of a device that threads play: raised once.
class Flag {
 public:
  void raise();
  void wait();

 private:
  std::mutex mutex_;
  std::condition_variable raised_;
  bool is_raised_ = false;
};

// RAM plays the device; events are `Flag`s.
std::unique_ptr<Machine> ram_machine();

// Copies go by `stream`, and `done` is recorded behind them: both are the guard's alone.
std::unique_ptr<Machine> cuda_machine(const CudaRuntime& cuda, void* stream, void* done);

}  // namespace megatron_swap
