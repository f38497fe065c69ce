#include "machines.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace megatron_swap {
namespace {

constexpr int kPoison = 0xFF;  // every float made of these bytes is NaN, so a premature read shows
constexpr int kCudaMemcpyDefault = 4;

class RamMachine final : public Machine {
 public:
  void wait(void* event) override { static_cast<Flag*>(event)->wait(); }
  void copy_out(const Piece& target, const char* source) override {
    std::memcpy(target.address, source, target.num_bytes);
  }
  void finish_copies() override {}
  void discard(void* address, std::size_t num_bytes) override { std::memset(address, kPoison, num_bytes); }
  void pin(const Piece&) override {}
  void unpin(const Piece&) override {}
};

class CudaMachine final : public Machine {
 public:
  CudaMachine(const CudaRuntime& cuda, void* stream, void* done) : cuda_(cuda), stream_(stream), done_(done) {}

  void wait(void* event) override { check(cuda_.event_synchronize(event), "cudaEventSynchronize"); }
  void copy_out(const Piece& target, const char* source) override {
    check(cuda_.memcpy_async(target.address, source, target.num_bytes, kCudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  }
  void finish_copies() override {
    check(cuda_.event_record(done_, stream_), "cudaEventRecord");
    wait(done_);
  }
  void discard(void*, std::size_t) override {}
  void pin(const Piece& slab) override {
    check(cuda_.host_register(slab.address, slab.num_bytes, 0), "cudaHostRegister");
  }
  void unpin(const Piece& slab) override {  // at the end: errors are ignored
    if (cuda_.host_unregister(slab.address) != 0) cuda_.get_last_error();
  }

 private:
  void check(int code, const char* what) const {
    if (code == 0) return;
    cuda_.get_last_error();  // clear it: else the next CUDA call elsewhere would report it
    throw std::runtime_error(std::string(what) + ": " + cuda_.get_error_string(code));
  }

  const CudaRuntime cuda_;
  void* const stream_;
  void* const done_;
};

}  // namespace

void Flag::raise() {
  std::lock_guard lock(mutex_);
  is_raised_ = true;
  raised_.notify_all();
}

void Flag::wait() {
  std::unique_lock lock(mutex_);
  raised_.wait(lock, [this] { return is_raised_; });
}

std::unique_ptr<Machine> ram_machine() { return std::make_unique<RamMachine>(); }

std::unique_ptr<Machine> cuda_machine(const CudaRuntime& cuda, void* stream, void* done) {
  return std::make_unique<CudaMachine>(cuda, stream, done);
}

}  // namespace megatron_swap
