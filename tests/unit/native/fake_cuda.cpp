// A fake libcudart for machines without a GPU: streams are queues of operations, events count their records.
//
// A query of an event runs operations, as many as `fake_cuda_allow` allows. Streams and events are arbitrary numbers.
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace {

constexpr int kDevices = 8;

struct Operation {
  enum { copy, wait, record } kind;
  void* target = nullptr;
  const void* source = nullptr;
  std::size_t num_bytes = 0;
  void* event = nullptr;
  std::int64_t number = 0;  // of the event's record
};

std::mutex mutex;
std::map<void*, std::deque<Operation>> streams;
std::map<void*, std::int64_t> recorded, passed;
std::ostringstream calls;
std::string failing;
int failing_code = 0;
std::int64_t allowed = -1;  // operations; below 0: all
thread_local int device = 0;

std::int64_t name(const void* pointer) { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)); }

int failure(const char* call) {
  if (failing != call) return 0;
  failing.clear();
  return failing_code;
}

bool advance(std::deque<Operation>& stream) {
  if (stream.empty() || allowed == 0) return false;
  const Operation next = stream.front();
  if (next.kind == Operation::wait && passed[next.event] < next.number) return false;
  if (next.kind == Operation::copy) std::memcpy(next.target, next.source, next.num_bytes);
  if (next.kind == Operation::record) passed[next.event] = next.number;
  stream.pop_front();
  if (allowed > 0) --allowed;
  return true;
}

void advance_all() {
  for (bool any = true; any;) {
    any = false;
    for (auto& [_, stream] : streams) any = advance(stream) || any;
  }
}

}  // namespace

extern "C" {

int cudaSetDevice(int chosen) {
  std::lock_guard lock(mutex);
  if (const int code = failure("cudaSetDevice")) return code;
  if (chosen >= kDevices) return 101;  // cudaErrorInvalidDevice
  device = chosen;
  calls << "device " << chosen << '\n';
  return 0;
}

int cudaMemcpyAsync(void* target, const void* source, std::size_t num_bytes, int kind, void* stream) {
  std::lock_guard lock(mutex);
  if (const int code = failure("cudaMemcpyAsync")) return code;
  calls << "copy " << num_bytes << " kind " << kind << " stream " << name(stream) << " device " << device << '\n';
  streams[stream].push_back({.kind = Operation::copy, .target = target, .source = source, .num_bytes = num_bytes});
  return 0;
}

int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  std::lock_guard lock(mutex);
  if (const int code = failure("cudaStreamWaitEvent")) return code;
  calls << "wait " << name(event) << " stream " << name(stream) << '\n';
  streams[stream].push_back({.kind = Operation::wait, .event = event, .number = recorded[event]});
  return 0;
}

int cudaStreamSynchronize(void* stream) {
  std::lock_guard lock(mutex);
  calls << "synchronize stream " << name(stream) << '\n';
  while (advance(streams[stream])) {
  }
  return 0;
}

int cudaEventRecord(void* event, void* stream) {
  std::lock_guard lock(mutex);
  if (const int code = failure("cudaEventRecord")) return code;
  calls << "record " << name(event) << " stream " << name(stream) << '\n';
  streams[stream].push_back({.kind = Operation::record, .event = event, .number = ++recorded[event]});
  return 0;
}

int cudaEventQuery(void* event) {
  std::lock_guard lock(mutex);
  if (const int code = failure("cudaEventQuery")) return code;
  advance_all();
  return passed[event] < recorded[event] ? 600 : 0;
}

int cudaEventSynchronize(void* event) {
  std::lock_guard lock(mutex);
  if (const int code = failure("cudaEventSynchronize")) return code;
  calls << "synchronize event " << name(event) << '\n';
  advance_all();
  return passed[event] < recorded[event] ? 600 : 0;
}

int cudaHostRegister(void*, std::size_t, unsigned) {
  std::lock_guard lock(mutex);
  return failure("cudaHostRegister");
}

int cudaHostUnregister(void*) { return 0; }

int cudaGetLastError() { return 0; }

const char* cudaGetErrorString(int) { return "as the test wished"; }

void fake_cuda_reset() {
  std::lock_guard lock(mutex);
  streams.clear();
  recorded.clear();
  passed.clear();
  calls.str("");
  failing.clear();
  allowed = -1;
}

// Allows so many further operations; below 0: all.
void fake_cuda_allow(std::int64_t operations) {
  std::lock_guard lock(mutex);
  allowed = operations;
}

// Lets the next call of a function fail.
void fake_cuda_fail(const char* call, int code) {
  std::lock_guard lock(mutex);
  failing = call;
  failing_code = code;
}

// Returns the calls so far, one in each line.
void fake_cuda_calls(char* buffer, std::size_t size) {
  std::lock_guard lock(mutex);
  std::strncpy(buffer, calls.str().c_str(), size - 1);
  buffer[size - 1] = '\0';
}

// Records an event, as the stream of a caller does.
void fake_cuda_record(std::uintptr_t event, std::uintptr_t stream) {
  std::lock_guard lock(mutex);
  auto* what = reinterpret_cast<void*>(event);
  streams[reinterpret_cast<void*>(stream)].push_back(
      {.kind = Operation::record, .event = what, .number = ++recorded[what]});
}
}
