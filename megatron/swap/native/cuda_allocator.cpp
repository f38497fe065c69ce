// PyTorch's CUDA allocator, with a second chance: where memory runs out, a function of ours makes room, and it tries
// again. A library of its own, without Python: cuda_allocator.py builds it where there is CUDA.
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

// Frees memory of `device`, so that `num_bytes` may fit: the bytes as they were asked for, of which torch makes more
// (it rounds, and takes whole segments). True: try again. `seen` is 0 at the first call of an allocation and then as
// the function left it: what it remembers between the attempts. It may be called from any thread, with the interpreter
// held or not, and must not throw. What it allocates itself gets no second chance.
using MakeRoom = bool (*)(std::size_t num_bytes, int device, std::uint64_t* seen);

// Writes for people, at most `size` bytes, what it is that our guard holds; returns how many it wrote.
using Report = std::size_t (*)(char* buffer, std::size_t size);

namespace torch_allocator = c10::cuda::CUDACachingAllocator;

namespace {

// Atomic each: another thread may allocate while they are replaced. Whoever has just read one still calls it, so the
// functions stay for as long as the process.
std::atomic<MakeRoom> make_room_function{nullptr};
std::atomic<Report> report_function{nullptr};

// This thread is in one of them: an allocation that fails there must not ask them again.
thread_local bool is_asking = false;

struct Asking {
  Asking() { is_asking = true; }
  ~Asking() { is_asking = false; }
};

// Work that is captured runs later and again: what would be evicted meanwhile is part of no graph. Also where CUDA
// will not say, as of the default stream while another one is captured; that is no error for others to find later.
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
    Asking asking;
    written = std::min(report(buffer, sizeof buffer), sizeof buffer);
  }
  if (written > 0) error.add_context(std::string(buffer, written));
}

// `allocate`, again and again while room is made. No stream: the current one. No lock is held: neither torch's, which
// lets go before it throws, nor one of ours. torch has counted the failure and told its observers; that stays.
template <typename Allocate>
auto with_room(std::size_t num_bytes, std::optional<cudaStream_t> stream, Allocate allocate) {
  std::uint64_t seen = 0;
  for (;;) {
    try {
      return allocate();
    } catch (c10::OutOfMemoryError& error) {
      const MakeRoom make_room = make_room_function.load();
      c10::DeviceIndex device = 0;
      if (make_room == nullptr || is_asking || c10::cuda::GetDevice(&device) != cudaSuccess) throw;
      if (is_captured(stream ? *stream : c10::cuda::getCurrentCUDAStream(device).stream())) throw;
      bool again;
      {
        Asking asking;
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

// Stands before `inner` and hands everything on. Every virtual function is here, those with a default too: what is not
// would be answered by the default instead of by `inner`. cuda_allocator.py checks that against torch's headers.
class Guard final : public torch_allocator::CUDAAllocator {
 public:
  explicit Guard(torch_allocator::CUDAAllocator* inner) : inner_(inner) {}

  torch_allocator::CUDAAllocator* inner() const { return inner_; }

  // The three that can run out of memory.

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

// Made once, never destroyed: every storage remembers the allocator that made it and asks that one when it is resized,
// long after another has taken its place.
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
      delete made;  // another thread was faster, and nobody has seen this one
    }
  }
  // Ours would go round whatever somebody has put before the allocator that ours stands before.
  if (current != ours->inner()) return "another CUDA allocator was put in place since the guard was first installed";
  if (torch_allocator::allocator.compare_exchange_strong(current, ours) || current == ours) return nullptr;
  return "another CUDA allocator was put in place at the same moment";
}

}  // namespace
}  // namespace megatron_swap

#define MEGATRON_SWAP_SEEN extern "C" __attribute__((visibility("default")))

// From now on `make_room` is asked where memory runs out, and `report` when it has none; a second call replaces them.
// `report` may be null. Returns null, or why not. A storage from before the first call keeps to the allocator that made
// it: when that one is resized, nobody is asked.
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

// Nobody is asked any more, but for calls under way on other threads. The allocator from before is back, unless
// somebody has put another in place meanwhile: that one may stand before ours, which then only hands on.
MEGATRON_SWAP_SEEN void megatron_swap_cuda_remove() {
  megatron_swap::make_room_function = nullptr;
  megatron_swap::report_function = nullptr;
  megatron_swap::Guard* ours = megatron_swap::guard.load();
  if (ours == nullptr) return;
  c10::cuda::CUDACachingAllocator::CUDAAllocator* current = ours;
  megatron_swap::torch_allocator::allocator.compare_exchange_strong(current, ours->inner());
}
