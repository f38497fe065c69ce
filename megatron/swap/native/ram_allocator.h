// A memory limit for the emulated device: an allocation in RAM that exceeds it fails as it would on a GPU.
#pragma once

#include <cstddef>
#include <functional>

namespace megatron_swap {

// Limits torch's CPU tensors to `num_bytes` more than they have now. The guard in force is asked before an allocation
// fails with c10::OutOfMemoryError. A second call sets another limit.
void limit_ram(std::size_t num_bytes);
void unlimit_ram();
// Calls the guard without the interpreter's lock, which the threads of the emulated device need: releases it, if this
// thread has it, calls, and takes it again.
using WithoutLock = std::function<bool(const std::function<bool()>&)>;
void set_unlocked(WithoutLock unlocked);
// Bytes of the live tensors that were made under a limit, and the most since `limit_ram`.
std::size_t ram_in_use();
std::size_t ram_peak();

constexpr int kRam = -1;  // the index of that device

}  // namespace megatron_swap
