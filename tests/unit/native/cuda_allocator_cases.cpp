// Drives cuda_allocator.cpp without a GPU: with an allocator in place of torch's, and with the functions of the CUDA
// runtime that the allocator calls (the dynamic linker prefers a program's own functions to a library's).
// The argument names a case. test_cuda_allocator.py compares the output.
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace cuda = c10::cuda::CUDACachingAllocator;
using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;
using cuda::CUDAAllocator;
using MakeRoom = bool (*)(std::size_t, int, std::uint64_t*);
using Report = std::size_t (*)(char*, std::size_t);

namespace {

enum { not_captured, captured, unknown } capture = not_captured;
constexpr int device = 1;
const cudaStream_t stream = reinterpret_cast<cudaStream_t>(77);

}  // namespace

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, cudaSuccess; }
cudaError_t cudaGetDevice(int* current) { return *current = device, cudaSuccess; }
cudaError_t cudaGetLastError() { return std::puts("last error cleared"), cudaSuccess; }
cudaError_t cudaMemGetInfo(std::size_t*, std::size_t*) { return std::abort(), cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -1, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t asked, cudaStreamCaptureStatus* status) {
  if (asked != nullptr) std::printf("asked about stream %zu\n", reinterpret_cast<std::size_t>(asked));
  *status = capture == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return capture == unknown ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}
}

namespace {

int failures = 0;
std::size_t bytes[8];  // what addresses point at

void fail_or(const char* function, std::size_t n) {
  std::printf("%s %zu\n", function, n);
  TORCH_CHECK_WITH(OutOfMemoryError, failures-- <= 0, "no room for ", n);
}

// Prints the arguments of each call, with another text for each function. Returns values that differ from all defaults.
struct Fake : CUDAAllocator {
  const char* called = "native";
  bool ready = true;

  DataPtr allocate(std::size_t n) override {
    fail_or("allocate", n);
    return {&bytes, c10::Device(c10::DeviceType::CUDA, device)};
  }
  void* raw_alloc(std::size_t n) override { return fail_or("raw_alloc", n), &bytes[1]; }
  void* raw_alloc_with_stream(std::size_t n, cudaStream_t) override {
    return fail_or("raw_alloc_with_stream", n), &bytes[2];
  }
  bool is_simple_data_ptr(const DataPtr&) const override { return std::puts("is_simple_data_ptr"), false; }
  c10::DeleterFnPtr raw_deleter() const override { return std::puts("raw_deleter"), &std::free; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::printf("copy_data %d %zu\n", to == &bytes[3] && from == &bytes[4], n);
  }
  bool initialized() override { return std::puts("initialized"), ready; }
  void emptyCache(MempoolId_t id) override { std::printf("emptyCache %llu\n", id.second); }
  void recordStream(const DataPtr&, c10::Stream) override { std::puts("recordStream"); }
  void recordStream(const DataPtr&, c10::cuda::CUDAStream) override { std::puts("recordStream of CUDA"); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::printf("getDeviceStats %d\n", d);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.num_ooms = 7;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex d) override { std::printf("resetAccumulatedStats %d\n", d); }
  void resetPeakStats(DeviceIndex d) override { std::printf("resetPeakStats %d\n", d); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex d) override {
    return std::printf("getMemoryInfo %d\n", d), std::pair<std::size_t, std::size_t>{1, 2};
  }
  void raw_delete(void* address) override { std::printf("raw_delete %d\n", address == &bytes[3]); }
  void init(int n) override { std::printf("init %d\n", n); }
  double getMemoryFraction(DeviceIndex d) override { return std::printf("getMemoryFraction %d\n", d), 0.5; }
  void setMemoryFraction(double f, DeviceIndex d) override { std::printf("setMemoryFraction %g %d\n", f, d); }
  std::vector<cuda::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex d) override {
    return std::printf("getExpandableSegmentSizes %d\n", d), std::vector<cuda::StreamSegmentSize>{{stream, true, 5}};
  }
  void enable(bool value) override { std::printf("enable %d\n", value); }
  bool isEnabled() const override { return std::puts("isEnabled"), true; }
  void cacheInfo(DeviceIndex d, std::size_t* largest) override { std::printf("cacheInfo %d\n", d), *largest = 9; }
  void* getBaseAllocation(void*, std::size_t* size) override {
    return std::puts("getBaseAllocation"), *size = 10, &bytes[5];
  }
  cuda::SnapshotInfo snapshot(MempoolId_t id, bool traces) override {
    std::printf("snapshot %llu %d\n", id.second, traces);
    cuda::SnapshotInfo info{};
    info.config_metadata.max_split_size = 11;
    return info;
  }
  void beginAllocateToPool(DeviceIndex d, MempoolId_t id, std::function<bool(cudaStream_t)> filter) override {
    std::printf("beginAllocateToPool %d %llu %d\n", d, id.second, filter(stream));
  }
  void endAllocateToPool(DeviceIndex d, MempoolId_t id) override {
    std::printf("endAllocateToPool %d %llu\n", d, id.second);
  }
  void releasePool(DeviceIndex d, MempoolId_t id) override { std::printf("releasePool %d %llu\n", d, id.second); }
  int getPoolUseCount(DeviceIndex d, MempoolId_t id) override {
    return std::printf("getPoolUseCount %d %llu\n", d, id.second), 12;
  }
  void createOrIncrefPool(DeviceIndex d, MempoolId_t id, std::shared_ptr<CUDAAllocator> other) override {
    std::printf("createOrIncrefPool %d %llu %d\n", d, id.second, other.get() == this);
  }
  void setUseOnOOM(DeviceIndex d, MempoolId_t id, bool use) override {
    std::printf("setUseOnOOM %d %llu %d\n", d, id.second, use);
  }
  void setNoSplit(DeviceIndex d, MempoolId_t id) override { std::printf("setNoSplit %d %llu\n", d, id.second); }
  bool checkPoolLiveAllocations(DeviceIndex d, MempoolId_t id, const std::unordered_set<void*>& live) override {
    return std::printf("checkPoolLiveAllocations %d %llu %zu\n", d, id.second, live.size()), true;
  }
  cuda::ShareableHandle shareIpcHandle(void*) override {
    return std::puts("shareIpcHandle"), cuda::ShareableHandle{13, "h"};
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return std::printf("getIpcDevPtr %s\n", handle.c_str()), std::make_shared<int>(14);
  }
  bool isHistoryEnabled() override { return std::puts("isHistoryEnabled"), true; }
  void recordHistory(
      bool on, cuda::CreateContextFn, std::size_t n, cuda::RecordContext when, bool clear,
      const std::vector<std::string>& skip) override {
    std::printf("recordHistory %d %zu %d %d %s\n", on, n, static_cast<int>(when), clear, skip.at(0).c_str());
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
    std::printf("recordAnnotation %s\n", pairs.at(0).second.c_str());
  }
  void pushCompileContext(std::string& text) override { std::printf("pushCompileContext %s\n", text.c_str()); }
  void popCompileContext() override { std::puts("popCompileContext"); }
  void setUserMetadata(const std::string& text) override { std::printf("setUserMetadata %s\n", text.c_str()); }
  std::string getUserMetadata() override { return std::puts("getUserMetadata"), "metadata"; }
  void attachOutOfMemoryObserver(cuda::OutOfMemoryObserver observer) override {
    std::puts("attachOutOfMemoryObserver"), observer(1, 2, 3, 4);
  }
  void attachAllocatorTraceTracker(cuda::AllocatorTraceTracker tracker) override {
    std::printf("attachAllocatorTraceTracker %d\n", static_cast<bool>(tracker));
  }
  void enablePeerAccess(DeviceIndex a, DeviceIndex b) override { std::printf("enablePeerAccess %d %d\n", a, b); }
  cudaError_t memcpyAsync(
      void* to, int to_device, const void* from, int from_device, std::size_t n, cudaStream_t on, bool peer) override {
    std::printf("memcpyAsync %d %d %zu %d %d %d\n", to_device, from_device, n, peer, to == &bytes[3], on == stream);
    return from == &bytes[4] ? cudaErrorNotReady : cudaSuccess;
  }
  std::shared_ptr<cuda::AllocatorState> getCheckpointState(DeviceIndex d, MempoolId_t id) override {
    std::printf("getCheckpointState %d %llu\n", d, id.second);
    return std::make_shared<cuda::AllocatorState>();
  }
  cuda::CheckpointDelta setCheckpointPoolState(DeviceIndex d, std::shared_ptr<cuda::AllocatorState> state) override {
    std::printf("setCheckpointPoolState %d %d\n", d, state.use_count() > 1);
    return {{&bytes[6]}, {}};
  }
  std::string name() override { return std::puts("name"), called; }
};

Fake fake, other;
const char* (*install)(MakeRoom, Report);
void (*remove_guard)();

std::uint64_t room = 0;  // so often there is some

bool make_room(std::size_t n, int on, std::uint64_t* seen) {
  std::printf("make_room %zu on %d, seen %zu\n", n, on, static_cast<std::size_t>(*seen));
  *seen += 3;
  return room-- > 0;
}

bool allocates(std::size_t, int, std::uint64_t*) {
  std::puts("allocates");
  failures = 1;
  try {
    cuda::raw_alloc(5);
  } catch (const c10::OutOfMemoryError& error) {
    std::printf("within: %s\n", error.what_without_backtrace());
  }
  return true;
}

std::size_t report(char* buffer, std::size_t size) {
  const char text[] = "the guard holds 3 storages";
  if (size < sizeof text) std::abort();
  std::memcpy(buffer, text, sizeof text - 1);
  return sizeof text - 1;
}

std::size_t report_too_much(char* buffer, std::size_t size) {
  std::memset(buffer, 'x', size);
  return size + 5;
}

void say(const char* what, bool is_so) { std::printf("%s: %s\n", what, is_so ? "yes" : "NO"); }

void say_error(const char* why_not) { std::printf("install: %s\n", why_not == nullptr ? "done" : why_not); }

template <typename Function>
void tried(Function function) {
  try {
    function();
    std::puts("done");
  } catch (const c10::OutOfMemoryError& error) {
    std::printf("OutOfMemoryError: %s\n", error.what_without_backtrace());
  } catch (...) {
    std::puts("ANOTHER ERROR");
  }
}

void forward() {
  say_error(install(make_room, nullptr));
  std::puts("---");
  CUDAAllocator& guard = *cuda::get();
  say("in place", &guard != &fake);
  const MempoolId_t id{0, 8};
  std::string text = "text";
  std::size_t size = 0;
  const auto torch_stream = c10::cuda::getDefaultCUDAStream(0);
  say("allocate", guard.allocate(3).get() == &bytes);
  say("raw_alloc", guard.raw_alloc(4) == &bytes[1]);
  say("raw_alloc_with_stream", guard.raw_alloc_with_stream(5, stream) == &bytes[2]);
  say("is_simple_data_ptr", !guard.is_simple_data_ptr({}));
  say("raw_deleter", guard.raw_deleter() == &std::free);
  guard.copy_data(&bytes[3], &bytes[4], 6);
  say("initialized", guard.initialized());
  guard.emptyCache(id);
  guard.recordStream({}, torch_stream.unwrap());
  guard.recordStream({}, torch_stream);
  say("getDeviceStats", guard.getDeviceStats(1).num_ooms == 7);
  guard.resetAccumulatedStats(1);
  guard.resetPeakStats(1);
  say("getMemoryInfo", guard.getMemoryInfo(1).second == 2);
  guard.raw_delete(&bytes[3]);
  guard.init(2);
  say("getMemoryFraction", guard.getMemoryFraction(1) == 0.5);
  guard.setMemoryFraction(0.25, 1);
  say("getExpandableSegmentSizes", guard.getExpandableSegmentSizes(1).at(0).total_size == 5);
  guard.enable(true);
  say("isEnabled", guard.isEnabled());
  guard.cacheInfo(1, &size);
  say("cacheInfo", size == 9);
  say("getBaseAllocation", guard.getBaseAllocation(&bytes[3], &size) == &bytes[5] && size == 10);
  say("snapshot", guard.snapshot(id, true).config_metadata.max_split_size == 11);
  guard.beginAllocateToPool(1, id, [](cudaStream_t asked) { return asked == stream; });
  guard.endAllocateToPool(1, id);
  guard.releasePool(1, id);
  say("getPoolUseCount", guard.getPoolUseCount(1, id) == 12);
  guard.createOrIncrefPool(1, id, {std::shared_ptr<void>(), &fake});
  guard.setUseOnOOM(1, id, true);
  guard.setNoSplit(1, id);
  say("checkPoolLiveAllocations", guard.checkPoolLiveAllocations(1, id, {&bytes[3], &bytes[4]}));
  say("shareIpcHandle", guard.shareIpcHandle(&bytes[3]).offset == 13);
  say("getIpcDevPtr", *static_cast<int*>(guard.getIpcDevPtr("handle").get()) == 14);
  say("isHistoryEnabled", guard.isHistoryEnabled());
  guard.recordHistory(true, nullptr, 15, cuda::RecordContext::ALL, true, {"skipped"});
  guard.recordAnnotation({{"key", "value"}});
  guard.pushCompileContext(text);
  guard.popCompileContext();
  guard.setUserMetadata(text);
  say("getUserMetadata", guard.getUserMetadata() == "metadata");
  guard.attachOutOfMemoryObserver([](std::int64_t, std::size_t, std::size_t, std::size_t free) {
    say("attachOutOfMemoryObserver", free == 4);
  });
  guard.attachAllocatorTraceTracker([](const cuda::TraceEntry&) {});
  guard.enablePeerAccess(0, 1);
  say("memcpyAsync", guard.memcpyAsync(&bytes[3], 0, &bytes[4], 1, 16, stream, true) == cudaErrorNotReady);
  const auto state = guard.getCheckpointState(1, id);
  say("getCheckpointState", state != nullptr);
  say("setCheckpointPoolState", guard.setCheckpointPoolState(1, state).ptrs_freed.size() == 1);
  say("name", guard.name() == "native");
}

void retry() {
  install(make_room, report);
  std::puts("---");
  failures = 2, room = 2;
  tried([] { cuda::get()->allocate(1000); });
  failures = 1, room = 1;
  tried([] { cuda::raw_alloc(1001); });
  failures = 1, room = 1;
  tried([] { cuda::raw_alloc_with_stream(1002, stream); });
}

void give_up() {
  install(make_room, report);
  std::puts("---");
  failures = 9, room = 1;
  tried([] { cuda::get()->allocate(1000); });
  install(make_room, report_too_much);
  room = 0;
  tried([] { cuda::get()->allocate(1000); });
  install(make_room, nullptr);
  room = 0;
  tried([] { cuda::get()->allocate(1000); });
}

void capturing() {
  install(make_room, report);
  std::puts("---");
  failures = 9, room = 9;
  capture = captured;
  tried([] { cuda::get()->allocate(1000); });
  capture = unknown;
  tried([] { cuda::raw_alloc_with_stream(1000, stream); });
}

void nested() {
  install(allocates, nullptr);
  std::puts("---");
  failures = 1;
  tried([] { cuda::raw_alloc(4); });
  std::thread([] { failures = 1, tried([] { cuda::raw_alloc(6); }); }).join();
}

void removed() {
  install(make_room, report);
  DataPtr kept;
  CUDAAllocator* guard = cuda::get();
  remove_guard();
  std::puts("---");
  say("the former is back", cuda::get() == &fake);
  failures = 1, room = 1;
  tried([&] { guard->allocate(1000); });  // as a storage does that it made, when it grows
  say_error(install(make_room, nullptr));
  say("the same guard", cuda::get() == guard);
  cuda::allocator = &other;
  remove_guard();
  say("another one is left", cuda::get() == &other);
}

void refused() {
  fake.ready = false;
  say_error(install(make_room, report));
  fake.ready = true, fake.called = "cudaMallocAsync";
  say_error(install(make_room, report));
  fake.called = "native";
  say_error(install(make_room, report));
  say_error(install(make_room, report));
  cuda::allocator = &other;
  say_error(install(make_room, report));
  say("that one is left", cuda::get() == &other);
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::puts(dlerror()), 1;
  install = reinterpret_cast<decltype(install)>(dlsym(library, "megatron_swap_cuda_install"));
  remove_guard = reinterpret_cast<decltype(remove_guard)>(dlsym(library, "megatron_swap_cuda_remove"));
  cuda::allocator = &fake;
  const std::pair<const char*, void (*)()> cases[] = {
      {"forward", forward}, {"retry", retry}, {"give_up", give_up}, {"capturing", capturing}, {"nested", nested},
      {"removed", removed}, {"refused", refused}};
  for (const auto& [name, run] : cases) {
    if (std::strcmp(name, arguments[2]) == 0) run();
  }
  return 0;
}
