#include "ram_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <limits>
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
    while (!book(num_bytes)) {
      if (make_room(num_bytes, kRam, &seen)) continue;
      std::array<char, 1024> text{};
      const std::size_t length = report(text.data(), text.size());
      TORCH_CHECK_WITH(OutOfMemoryError, false, "RAM that plays a device is out of memory. Tried to allocate ",
                       num_bytes, " bytes; ", in_use_.load(), " of ", most_.load(), " are in use. ",
                       std::string(text.data(), length));
    }
    c10::DataPtr data = inner_.allocate(num_bytes);
    void* const address = data.get();
    return {address, new Block{*this, num_bytes, std::move(data)}, &free, c10::Device(c10::kCPU)};
  }

  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    inner_.copy_data(target, source, num_bytes);
  }

  std::atomic<std::size_t> most_ = kUnlimited;
  std::atomic<std::size_t> in_use_ = 0;
  std::atomic<std::size_t> peak_ = 0;
  c10::Allocator& inner_;

 private:
  struct Block {
    RamAllocator& allocator;
    std::size_t num_bytes;
    c10::DataPtr data;
  };

  static void free(void* context) {
    auto* const block = static_cast<Block*>(context);
    block->allocator.in_use_ -= block->num_bytes;
    delete block;
  }

  bool book(std::size_t num_bytes) {
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
};

// Never destroyed: tensors that outlive everything else give their memory back to it.
RamAllocator& the_allocator() {
  static auto* allocator = new RamAllocator(*c10::GetCPUAllocator());
  return *allocator;
}

constexpr std::uint8_t kAboveAll = 255;  // torch ignores a lower priority than that of the allocator in place

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

std::size_t ram_in_use() { return the_allocator().in_use_; }
std::size_t ram_peak() { return the_allocator().peak_; }

}  // namespace megatron_swap
