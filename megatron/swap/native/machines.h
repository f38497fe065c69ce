// The two devices that a guard may serve.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
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
  bool is_raised();

 private:
  std::mutex mutex_;
  std::condition_variable raised_;
  bool is_raised_ = false;
};

// RAM plays the device; events are `Flag`s. `holds_up_others`: whether this thread holds what the threads that raise
// flags need (the interpreter's lock): then it must not wait for them.
std::unique_ptr<Machine> ram_machine(std::function<bool()> holds_up_others);

// Copies go by `stream`, and `done` is recorded behind them: both are the guard's alone.
std::unique_ptr<Machine> cuda_machine(const CudaRuntime& cuda, void* stream, void* done);

}  // namespace megatron_swap
