#include "transfer_queue.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace megatron_swap {
namespace {

constexpr int kCudaMemcpyDefault = 4;   // the runtime tells host from device by the addresses
constexpr int kCudaSuccess = 0;
constexpr int kCudaErrorNotReady = 600;

// How often events of copies in flight are queried. A thread cannot wait for an event and a condition variable at once.
constexpr auto kPoll = std::chrono::microseconds(100);
// Bytes of a host copy that are moved at once. In between, events of copies in flight are queried.
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;

// Thrown by steps, caught by the worker.
struct StepFailed {
  std::string failure;
};

}  // namespace

TransferQueue::TransferQueue(std::string name, std::size_t num_in_flight, CudaRuntime cuda)
    : name_(std::move(name)), num_in_flight_(num_in_flight), cuda_(cuda) {}

TransferQueue::~TransferQueue() { abandon(); }

// ------------------------------------------------------------------------------------------------- the callers' side

void TransferQueue::start() {
  std::lock_guard join_lock(join_mutex_);
  std::lock_guard lock(mutex_);
  if (is_started_ || is_closed_) return;
  worker_ = std::thread(&TransferQueue::work, this);
  is_started_ = true;
}

bool TransferQueue::is_started() const {
  std::lock_guard lock(mutex_);
  return is_started_;
}

Ticket TransferQueue::add(Job job, bool at_head) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return 0;
  const Ticket ticket = ++last_;
  const std::int64_t position = at_head ? head_-- : tail_++;
  waiting_.emplace(position, Waiting{ticket, std::move(job)});
  positions_.emplace(ticket, position);
  wake_.notify_one();
  return ticket;
}

bool TransferQueue::erase(Ticket ticket) {
  std::lock_guard lock(mutex_);
  const auto position = positions_.find(ticket);
  if (position == positions_.end()) return withdrawn_.contains(ticket);
  withdrawn_.insert(take(waiting_.find(position->second)).ticket);
  changed_.notify_all();
  return true;
}

JobState TransferQueue::state(Ticket ticket) const {
  std::lock_guard lock(mutex_);
  return state_now(ticket);
}

JobState TransferQueue::wait(Ticket ticket, JobState until, double seconds) const {
  std::unique_lock lock(mutex_);
  JobState state = JobState::unknown;
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    state = state_now(ticket);
    return state >= until;  // the states above `done` are final too
  });
  return state;
}

bool TransferQueue::wait_all(double seconds) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return is_idle(); });
}

std::string TransferQueue::failure(Ticket ticket) {
  std::lock_guard lock(mutex_);
  unraised_.erase(ticket);
  return failures_.at(ticket);
}

Ticket TransferQueue::first_failure() const {
  std::lock_guard lock(mutex_);
  return unraised_.empty() ? 0 : *unraised_.begin();
}

void TransferQueue::close() {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  wake_.notify_one();
}

void TransferQueue::join() {
  std::lock_guard lock(join_mutex_);
  if (worker_.joinable()) worker_.join();
}

void TransferQueue::abandon() {
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    while (!waiting_.empty()) withdrawn_.insert(take(waiting_.begin()).ticket);
    wake_.notify_one();
    changed_.notify_all();
  }
  join();
}

std::size_t TransferQueue::num_waiting() const {
  std::lock_guard lock(mutex_);
  return waiting_.size();
}

JobState TransferQueue::state_now(Ticket ticket) const {
  if (ticket < 1 || ticket > last_) return JobState::unknown;
  if (ticket == running_) return JobState::running;
  if (positions_.contains(ticket)) return JobState::waiting;
  for (const Flight& flight : in_flight_) {
    // A failure is reported only when the job's memory is no longer in use.
    if (flight.ticket == ticket) return flight.failure ? JobState::running : JobState::issued;
  }
  if (failures_.contains(ticket)) return JobState::failed;
  return withdrawn_.contains(ticket) ? JobState::withdrawn : JobState::done;
}

bool TransferQueue::is_idle() const { return waiting_.empty() && in_flight_.empty() && running_ == 0; }

TransferQueue::Waiting TransferQueue::take(std::map<std::int64_t, Waiting>::iterator at) {
  Waiting taken = std::move(at->second);
  waiting_.erase(at);
  positions_.erase(taken.ticket);
  return taken;
}

// -------------------------------------------------------------------------------------------------------- the worker

void TransferQueue::work() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());  // the kernel keeps 15 characters
  std::unique_lock lock(mutex_);
  while (!(is_closed_ && waiting_.empty() && in_flight_.empty())) {
    if (can_begin()) {
      const Waiting next = take(waiting_.begin());
      running_ = next.ticket;
      lock.unlock();
      const Flight flight = issue(next.ticket, next.job);
      lock.lock();
      running_ = 0;
      if (flight.event == nullptr) {
        end(flight);
      } else {
        in_flight_.push_back(flight);
      }
      changed_.notify_all();
    } else if (in_flight_.empty()) {
      wake_.wait(lock);
    } else {
      // A copy in flight may hold back the first waiting job. A job that is pushed ahead of it wakes us at once.
      wake_.wait_for(lock, kPoll);
    }
    lock.unlock();
    reap();
    lock.lock();
  }
}

bool TransferQueue::can_begin() const {
  if (waiting_.empty()) return false;
  if (in_flight_.size() < num_in_flight_) return true;
  const Job& job = waiting_.begin()->second.job;
  return std::none_of(job.begin(), job.end(), [](const Step& step) { return std::holds_alternative<CudaCopy>(step); });
}

void TransferQueue::end(const Flight& flight) {
  if (!flight.failure) return;
  failures_.emplace(flight.ticket, *flight.failure);
  unraised_.insert(flight.ticket);
}

TransferQueue::Flight TransferQueue::issue(Ticket ticket, const Job& job) {
  Flight flight{.ticket = ticket};
  try {
    for (const Step& step : job) {
      std::visit([&](const auto& kind) { run(kind, flight); }, step);
    }
  } catch (const StepFailed& failed) {
    flight.failure = failed.failure;  // a copy that was issued before is still waited for
  } catch (const std::exception& error) {
    flight.failure = error.what();  // such as bad_alloc: the thread goes on with the other jobs
  }
  return flight;
}

void TransferQueue::run(const HostCopy& step, Flight& flight) {
  wait_for_copy(flight);
  for (std::size_t moved = 0; moved < step.num_bytes; moved += kChunkBytes) {
    const std::size_t chunk_bytes = std::min(kChunkBytes, step.num_bytes - moved);
    std::memcpy(static_cast<char*>(step.target) + moved, static_cast<const char*>(step.source) + moved, chunk_bytes);
    reap();
  }
}

void TransferQueue::run(const CudaCopy& step, Flight& flight) {
  if (!cuda_) throw StepFailed{"no CUDA runtime is loaded in this process"};
  use_device(step.device);
  // This copy follows the job's previous copy by stream order, or by an event; the thread does not wait.
  if (flight.event != nullptr && (flight.stream != step.stream || flight.device != step.device)) {
    check_cuda(cuda_.stream_wait_event(step.stream, flight.event, 0), "waiting for the copy before");
  }
  if (step.after != nullptr) check_cuda(cuda_.stream_wait_event(step.stream, step.after, 0), "waiting for an event");
  check_cuda(cuda_.memcpy_async(step.target, step.source, step.num_bytes, kCudaMemcpyDefault, step.stream), "copying");
  const int recorded = cuda_.event_record(step.done, step.stream);
  if (recorded != kCudaSuccess) {
    // Without the event nothing else shows when the copy is over, and the job's memory must not be released before.
    cuda_.stream_synchronize(step.stream);
    flight.event = nullptr;
    check_cuda(recorded, "recording an event");
  }
  flight.event = step.done;
  flight.stream = step.stream;
  flight.device = step.device;
}

void TransferQueue::reap() {
  // Only this thread changes in_flight_, so it reads without our lock. A query may wait for a lock of CUDA's.
  std::vector<Flight> complete;
  for (Flight flight : in_flight_) {
    if (is_complete(flight)) complete.push_back(std::move(flight));
  }
  if (complete.empty()) return;
  std::lock_guard lock(mutex_);
  for (const Flight& flight : complete) {
    std::erase_if(in_flight_, [&](const Flight& other) { return other.ticket == flight.ticket; });
    end(flight);
  }
  changed_.notify_all();
}

bool TransferQueue::is_complete(Flight& flight) {
  int code = kCudaSuccess;
  try {
    use_device(flight.device);
    code = cuda_.event_query(flight.event);
    if (code == kCudaErrorNotReady) return false;
    check_cuda(code, "a copy");
  } catch (const StepFailed& failed) {
    if (!flight.failure) flight.failure = failed.failure;
  }
  flight.event = nullptr;
  return true;
}

void TransferQueue::wait_for_copy(Flight& flight) {
  if (flight.event == nullptr) return;
  while (!is_complete(flight)) {
    std::this_thread::sleep_for(kPoll);
    reap();
  }
  if (flight.failure) throw StepFailed{*flight.failure};
}

void TransferQueue::use_device(int device) {
  // A new thread's device is 0. Its first call would create a context there, which takes memory from another rank.
  if (device == device_) return;
  check_cuda(cuda_.set_device(device), "choosing a device");
  device_ = device;
}

void TransferQueue::check_cuda(int code, const char* what) const {
  if (code == kCudaSuccess) return;
  throw StepFailed{std::string("CUDA: ") + what + " failed: " + cuda_.get_error_string(code)};
}

}  // namespace megatron_swap
