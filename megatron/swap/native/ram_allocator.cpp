#include "ram_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "guard.h"

namespace megatron_swap {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

class RamAllocator final : public c10::Allocator {
 public:
  explicit RamAllocator(c10::Allocator& inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t num_bytes) override {
    std::uint64_t seen = 0;
    while (!reserve(num_bytes)) {
      if (unlocked_([&] { return make_room(num_bytes, kRam, &seen); })) continue;
      std::array<char, 1024> text{};
      std::size_t length = 0;
      unlocked_([&] { return (length = report(text.data(), text.size())) > 0; });
      TORCH_CHECK_WITH(OutOfMemoryError, false, "The emulated device is out of memory. Tried to allocate ",
                       num_bytes, " bytes; ", in_use_.load(), " of ", most_.load(), " are in use. ",
                       std::string(text.data(), length));
    }
    void* const address = inner_.raw_allocate(num_bytes);
    if (address == nullptr) {  // `num_bytes` is 0
      in_use_ -= num_bytes;
      return {nullptr, c10::Device(c10::kCPU)};
    }
    {
      std::lock_guard lock(mutex_);
      // An entry is stale if its memory was freed by address alone while there was no limit.
      in_use_ -= std::exchange(sizes_[address], num_bytes);
    }
    return {address, address, &free, c10::Device(c10::kCPU)};
  }

  // Some kernels allocate without a DataPtr, and free by the address alone.
  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    inner_.copy_data(target, source, num_bytes);
  }

  std::atomic<std::size_t> most_ = kUnlimited;
  std::atomic<std::size_t> in_use_ = 0;
  std::atomic<std::size_t> peak_ = 0;
  c10::Allocator& inner_;
  WithoutLock unlocked_ = [](const std::function<bool()>& call) { return call(); };

 private:
  static void free(void* address);

  bool reserve(std::size_t num_bytes) {
    std::size_t before = in_use_;
    do {
      if (num_bytes > most_ || before > most_ - num_bytes) return false;
    } while (!in_use_.compare_exchange_weak(before, before + num_bytes));
    const std::size_t now = before + num_bytes;
    std::size_t peak = peak_;
    while (peak < now && !peak_.compare_exchange_weak(peak, now)) {
    }
    return true;
  }

  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;  // of the allocations in use
};

// Never destroyed: the last tensors free their memory with it.
RamAllocator& the_allocator() {
  static auto* allocator = new RamAllocator(*c10::GetCPUAllocator());
  return *allocator;
}

void RamAllocator::free(void* address) {
  RamAllocator& allocator = the_allocator();
  {
    std::lock_guard lock(allocator.mutex_);
    const auto found = allocator.sizes_.find(address);
    if (found != allocator.sizes_.end()) {  // else it was allocated before the limit was set
      allocator.in_use_ -= found->second;
      allocator.sizes_.erase(found);
    }
  }
  allocator.inner_.raw_deallocate(address);
}

constexpr std::uint8_t kAboveAll = 255;  // torch ignores an allocator of lower priority than the current one's

}  // namespace

void limit_ram(std::size_t num_bytes) {
  RamAllocator& allocator = the_allocator();
  allocator.most_ = allocator.in_use_ + num_bytes;
  allocator.peak_ = allocator.in_use_.load();
  c10::SetCPUAllocator(&allocator, kAboveAll);
}

void unlimit_ram() {
  RamAllocator& allocator = the_allocator();
  allocator.most_ = kUnlimited;
  c10::SetCPUAllocator(&allocator.inner_, kAboveAll);
}

void set_unlocked(WithoutLock unlocked) { the_allocator().unlocked_ = std::move(unlocked); }

std::size_t ram_in_use() { return the_allocator().in_use_; }
std::size_t ram_peak() { return the_allocator().peak_; }

}  // namespace megatron_swap
