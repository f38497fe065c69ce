// A wrapper of PyTorch's CUDA allocator: when an allocation fails, a function of ours makes room and the allocation is
// retried. A library of its own, without Python; cuda_allocator.py builds it where there is CUDA.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace megatron_swap {

// Frees memory of `device` for an allocation of `num_bytes`, as requested: torch may need more, since it rounds up and
// allocates whole segments. Returns whether to try again. `seen` is 0 at the first attempt of an allocation, and keeps
// the function's state between attempts. It may be called on any thread, with or without the interpreter's lock, and
// must not throw. Its own allocations are not retried.
using MakeRoom = bool (*)(std::size_t num_bytes, int device, std::uint64_t* seen);

// Writes a description of what the guard holds, at most `size` bytes, for error messages; returns their number.
using Report = std::size_t (*)(char* buffer, std::size_t size);

namespace torch_allocator = c10::cuda::CUDACachingAllocator;

namespace {

// Both are atomic: another thread may allocate while they are replaced. A thread that has read one may still call it,
// so the functions must live as long as the process.
std::atomic<MakeRoom> make_room_function{nullptr};
std::atomic<Report> report_function{nullptr};

// Whether this thread is in one of them: an allocation that fails there must not call them again.
thread_local bool is_in_callback = false;

struct InCallback {
  InCallback() { is_in_callback = true; }
  ~InCallback() { is_in_callback = false; }
};

// Captured work runs later, and several times, without the evictions made during the capture. True also if CUDA
// gives an error (for the default stream while another one is captured), which is cleared so that nobody else finds it.
bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  (void)cudaGetLastError();
  return true;
}

void add_report(c10::OutOfMemoryError& error) {
  const Report report = report_function.load();
  if (report == nullptr) return;
  char buffer[1024];
  std::size_t written;
  {
    InCallback in_callback;
    written = std::min(report(buffer, sizeof buffer), sizeof buffer);
  }
  if (written > 0) error.add_context(std::string(buffer, written));
}

// Calls `allocate` until it succeeds or no room is made. Without `stream` the current one is meant. No lock is held
// meanwhile: torch releases its own before it throws. torch counts each failure and notifies its observers.
template <typename Allocate>
auto with_room(std::size_t num_bytes, std::optional<cudaStream_t> stream, Allocate allocate) {
  std::uint64_t seen = 0;
  for (;;) {
    try {
      return allocate();
    } catch (c10::OutOfMemoryError& error) {
      const MakeRoom make_room = make_room_function.load();
      c10::DeviceIndex device = 0;
      if (make_room == nullptr || is_in_callback || c10::cuda::GetDevice(&device) != cudaSuccess) throw;
      if (is_captured(stream ? *stream : c10::cuda::getCurrentCUDAStream(device).stream())) throw;
      bool again;
      {
        InCallback in_callback;
        again = make_room(num_bytes, device, &seen);
      }
      if (!again) {
        add_report(error);
        throw;
      }
    }
  }
}

}  // namespace

// Forwards everything to `inner`. It overrides every virtual function, those with a default too: a missing one would
// run the default instead of `inner`'s. cuda_allocator.py checks that against torch's headers.
class Guard final : public torch_allocator::CUDAAllocator {
 public:
  explicit Guard(torch_allocator::CUDAAllocator* inner) : inner_(inner) {}

  torch_allocator::CUDAAllocator* inner() const { return inner_; }

  // The three functions that can run out of memory.

  c10::DataPtr allocate(std::size_t n) override {
    return with_room(n, std::nullopt, [&] { return inner_->allocate(n); });
  }
  void* raw_alloc(std::size_t n) override {
    return with_room(n, std::nullopt, [&] { return inner_->raw_alloc(n); });
  }
  void* raw_alloc_with_stream(std::size_t n, cudaStream_t stream) override {
    return with_room(n, stream, [&] { return inner_->raw_alloc_with_stream(n, stream); });
  }

  // c10::Allocator

  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return inner_->is_simple_data_ptr(data); }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* target, const void* source, std::size_t n) const override {
    inner_->copy_data(target, source, n);
  }

  // c10::DeviceAllocator

  bool initialized() override { return inner_->initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { inner_->emptyCache(pool); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { inner_->recordStream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return inner_->getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { inner_->resetAccumulatedStats(device); }
  void resetPeakStats(c10::DeviceIndex device) override { inner_->resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return inner_->getMemoryInfo(device);
  }

  // CUDAAllocator

  void raw_delete(void* address) override { inner_->raw_delete(address); }
  void init(int num_devices) override { inner_->init(num_devices); }
  double getMemoryFraction(c10::DeviceIndex device) override { return inner_->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    inner_->setMemoryFraction(fraction, device);
  }
  std::vector<torch_allocator::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override {
    return inner_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { inner_->enable(value); }
  bool isEnabled() const override { return inner_->isEnabled(); }
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override { inner_->cacheInfo(device, largest); }
  void* getBaseAllocation(void* address, std::size_t* size) override {
    return inner_->getBaseAllocation(address, size);
  }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    inner_->recordStream(data, stream);
  }
  torch_allocator::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override {
    return inner_->snapshot(pool, include_traces);
  }
  void beginAllocateToPool(
      c10::DeviceIndex device, c10::MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    inner_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    inner_->endAllocateToPool(device, pool);
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override { inner_->releasePool(device, pool); }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return inner_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(
      c10::DeviceIndex device, c10::MempoolId_t pool,
      std::shared_ptr<torch_allocator::CUDAAllocator> allocator) override {
    inner_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use) override {
    inner_->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override { inner_->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(
      c10::DeviceIndex device, c10::MempoolId_t pool, const std::unordered_set<void*>& expected) override {
    return inner_->checkPoolLiveAllocations(device, pool, expected);
  }
  torch_allocator::ShareableHandle shareIpcHandle(void* address) override { return inner_->shareIpcHandle(address); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return inner_->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return inner_->isHistoryEnabled(); }
  void recordHistory(
      bool enabled, torch_allocator::CreateContextFn context, std::size_t num_entries,
      torch_allocator::RecordContext when, bool clear, const std::vector<std::string>& skipped) override {
    inner_->recordHistory(enabled, context, num_entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) override {
    inner_->recordAnnotation(annotation);
  }
  void pushCompileContext(std::string& context) override { inner_->pushCompileContext(context); }
  void popCompileContext() override { inner_->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { inner_->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return inner_->getUserMetadata(); }
  void attachOutOfMemoryObserver(torch_allocator::OutOfMemoryObserver observer) override {
    inner_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(torch_allocator::AllocatorTraceTracker tracker) override {
    inner_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex from, c10::DeviceIndex to) override { inner_->enablePeerAccess(from, to); }
  cudaError_t memcpyAsync(
      void* target, int target_device, const void* source, int source_device, std::size_t n, cudaStream_t stream,
      bool by_peer_access) override {
    return inner_->memcpyAsync(target, target_device, source, source_device, n, stream, by_peer_access);
  }
  std::shared_ptr<torch_allocator::AllocatorState> getCheckpointState(
      c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return inner_->getCheckpointState(device, pool);
  }
  torch_allocator::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<torch_allocator::AllocatorState> state) override {
    return inner_->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return inner_->name(); }

 private:
  torch_allocator::CUDAAllocator* const inner_;
};

namespace {

// Made once, never destroyed: a storage keeps a pointer to the allocator that made it, and uses that one when it is
// resized, even if another is in place by then.
std::atomic<Guard*> guard{nullptr};

const char* put_in_place() {
  auto* current = torch_allocator::allocator.load();
  Guard* ours = guard.load();
  if (ours != nullptr && current == ours) return nullptr;
  if (current == nullptr || !current->initialized()) return "CUDA is not initialised yet (torch.cuda.init())";
  if (current->name() != "native") return "torch uses another CUDA allocator than its native one";
  if (ours == nullptr) {
    auto* made = new Guard(current);
    if (guard.compare_exchange_strong(ours, made)) {
      ours = made;
    } else {
      delete made;  // another thread was faster, and nothing refers to this one
    }
  }
  // Ours forwards to `inner`, and would bypass an allocator that was put in place since.
  if (current != ours->inner()) return "another CUDA allocator was put in place since the guard was first installed";
  if (torch_allocator::allocator.compare_exchange_strong(current, ours) || current == ours) return nullptr;
  return "another CUDA allocator was put in place at the same moment";
}

}  // namespace
}  // namespace megatron_swap

#define MEGATRON_SWAP_SEEN extern "C" __attribute__((visibility("default")))

// Installs `make_room`, which is called when an allocation fails, and `report`, called when no room can be made; it may
// be null. A second call replaces them. Returns null, or why nothing was installed. Storages from before the first call
// keep the allocator that made them: no function is called when they are resized.
MEGATRON_SWAP_SEEN const char* megatron_swap_cuda_install(
    megatron_swap::MakeRoom make_room, megatron_swap::Report report) {
  try {
    if (const char* why_not = megatron_swap::put_in_place()) return why_not;
  } catch (...) {
    return "the CUDA allocator that is in place failed when it was asked for its name";
  }
  megatron_swap::report_function = report;
  megatron_swap::make_room_function = make_room;
  return nullptr;
}

// Removes both functions; calls under way on other threads go on. Restores the allocator from before, unless another
// one was put in place since: that one may forward to ours, which then only forwards too.
MEGATRON_SWAP_SEEN void megatron_swap_cuda_remove() {
  megatron_swap::make_room_function = nullptr;
  megatron_swap::report_function = nullptr;
  megatron_swap::Guard* ours = megatron_swap::guard.load();
  if (ours == nullptr) return;
  c10::cuda::CUDACachingAllocator::CUDAAllocator* current = ours;
  megatron_swap::torch_allocator::allocator.compare_exchange_strong(current, ours->inner());
}
