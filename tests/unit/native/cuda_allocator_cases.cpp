// Drives cuda_allocator.cpp without a GPU: with an allocator in place of torch's, and with the functions of the CUDA
// runtime that the allocator calls (the dynamic linker prefers a program's own functions to a library's).
// The argument names a case. test_cuda_allocator.py compares the output.
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

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

[[noreturn]] void unused() { std::abort(); }

// Allocates, with another text for each function. The cases call no other function.
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
  bool initialized() override { return std::puts("initialized"), ready; }
  std::string name() override { return std::puts("name"), called; }

  void copy_data(void*, const void*, std::size_t) const override { unused(); }
  void emptyCache(MempoolId_t) override { unused(); }
  void recordStream(const DataPtr&, c10::Stream) override { unused(); }
  void recordStream(const DataPtr&, c10::cuda::CUDAStream) override { unused(); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { unused(); }
  void resetAccumulatedStats(DeviceIndex) override { unused(); }
  void resetPeakStats(DeviceIndex) override { unused(); }
  void raw_delete(void*) override { unused(); }
  void init(int) override { unused(); }
  double getMemoryFraction(DeviceIndex) override { unused(); }
  void setMemoryFraction(double, DeviceIndex) override { unused(); }
  std::vector<cuda::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex) override { unused(); }
  void enable(bool) override { unused(); }
  bool isEnabled() const override { unused(); }
  void cacheInfo(DeviceIndex, std::size_t*) override { unused(); }
  void* getBaseAllocation(void*, std::size_t*) override { unused(); }
  cuda::SnapshotInfo snapshot(MempoolId_t, bool) override { unused(); }
  void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) override { unused(); }
  void endAllocateToPool(DeviceIndex, MempoolId_t) override { unused(); }
  void releasePool(DeviceIndex, MempoolId_t) override { unused(); }
  cuda::ShareableHandle shareIpcHandle(void*) override { unused(); }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { unused(); }
  void recordHistory(
      bool, cuda::CreateContextFn, std::size_t, cuda::RecordContext, bool, const std::vector<std::string>&) override {
    unused();
  }
  void attachOutOfMemoryObserver(cuda::OutOfMemoryObserver) override { unused(); }
  void attachAllocatorTraceTracker(cuda::AllocatorTraceTracker) override { unused(); }
  void enablePeerAccess(DeviceIndex, DeviceIndex) override { unused(); }
  cudaError_t memcpyAsync(void*, int, const void*, int, std::size_t, cudaStream_t, bool) override { unused(); }
  std::shared_ptr<cuda::AllocatorState> getCheckpointState(DeviceIndex, MempoolId_t) override { unused(); }
  cuda::CheckpointDelta setCheckpointPoolState(DeviceIndex, std::shared_ptr<cuda::AllocatorState>) override {
    unused();
  }
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

void removed() {
  install(make_room, report);
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
      {"retry", retry}, {"give_up", give_up}, {"capturing", capturing}, {"removed", removed}, {"refused", refused}};
  for (const auto& [name, run] : cases) {
    if (std::strcmp(name, arguments[2]) == 0) run();
  }
  return 0;
}
