// RAM as a device with so much memory: an allocation that exceeds it fails as it would on a GPU.
#pragma once

#include <cstddef>
#include <functional>

namespace megatron_swap {

// From now on torch's tensors on the CPU may take so much, besides what they have; the guard in force is asked before
// an allocation fails with c10::OutOfMemoryError. Again: another limit.
void limit_ram(std::size_t num_bytes);
void unlimit_ram();
// Around every wait for the guard: lets go of what the threads that play a device need (the interpreter's lock), if this
// thread has it, calls, and takes it again.
using WithoutLock = std::function<bool(const std::function<bool()>&)>;
void set_unlocked(WithoutLock unlocked);
// Bytes of tensors made under a limit that are there, and the most that were since `limit_ram`.
std::size_t ram_in_use();
std::size_t ram_peak();

constexpr int kRam = -1;  // the index of that device

}  // namespace megatron_swap
