// A queue of copies between host memory and CUDA devices, run by a thread of its own.
//
// Pure C++20: no Python and no torch, so that it runs under ThreadSanitizer, and so that nothing here can take the
// interpreter's lock. transfer_queue.py documents the contract.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "cuda_runtime.h"

namespace megatron_swap {

struct HostCopy {
  void* target;
  const void* source;
  std::size_t num_bytes;
};

struct CudaCopy {
  void* target;
  const void* source;
  std::size_t num_bytes;
  void* stream;  // cudaStream_t
  void* after;   // cudaEvent_t that the stream waits for first; null: none
  void* done;    // cudaEvent_t recorded behind the copy
  int device;    // of the stream
};

using Step = std::variant<HostCopy, CudaCopy>;
using Job = std::vector<Step>;
using Ticket = std::int64_t;  // 1, 2, 3, …

// A job passes through the first four in this order; `issued` only with CUDA copies. The numbers are transfer_queue.py's.
enum class JobState { waiting = 0, running = 1, issued = 2, done = 3, failed = 4, withdrawn = 5, unknown = 6 };

class TransferQueue {
 public:
  TransferQueue(std::string name, std::size_t num_in_flight, CudaRuntime cuda);
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  void start();                          // starts the worker; a second call does nothing
  bool is_started() const;
  Ticket add(Job job, bool at_head);     // 0: the queue is closed
  bool erase(Ticket ticket);             // withdraws a job; false: it has begun
  JobState state(Ticket ticket) const;
  // Waits until the job's state is `until` or final, or the time is over; returns the state.
  JobState wait(Ticket ticket, JobState until, double seconds) const;
  bool wait_all(double seconds) const;   // true: no job waits or is under way
  std::string failure(Ticket ticket);    // the text of a failed job; from now on it counts as raised
  Ticket first_failure() const;          // the lowest that was not raised; 0: there is none
  void close();                          // accepts no more jobs; the worker ends after the last one
  void join();                           // after close(): returns when the worker has ended
  void abandon();                        // close, withdraw the jobs that have not begun, join
  std::size_t num_waiting() const;

 private:
  struct Waiting {
    Ticket ticket;
    Job job;
  };
  // A job whose last CUDA copy was issued, and the failure that it reports when that copy is complete.
  struct Flight {
    Ticket ticket = 0;
    void* event = nullptr;  // null: there is none, or it has passed
    void* stream = nullptr;
    int device = 0;
    std::optional<std::string> failure = {};
  };

  // With the lock:
  JobState state_now(Ticket ticket) const;
  bool can_begin() const;
  bool is_idle() const;
  Waiting take(std::map<std::int64_t, Waiting>::iterator at);
  void end(const Flight& flight);

  // Without it, in the worker:
  void work();
  Flight issue(Ticket ticket, const Job& job);
  void run(const HostCopy& step, Flight& flight);
  void run(const CudaCopy& step, Flight& flight);
  void reap();
  bool is_complete(Flight& flight);
  void wait_for_copy(Flight& flight);
  void use_device(int device);
  void check_cuda(int code, const char* what) const;

  const std::string name_;
  const std::size_t num_in_flight_;
  const CudaRuntime cuda_;
  int device_ = -1;  // the worker thread's current device; -1: not set yet, which CUDA takes for 0

  mutable std::mutex mutex_;                  // of all below
  std::condition_variable wake_;              // wakes the worker: there is more to do
  mutable std::condition_variable changed_;   // wakes waiting callers: a job's state has changed
  std::map<std::int64_t, Waiting> waiting_;   // by position: enqueued jobs count up, pushed ones down
  std::unordered_map<Ticket, std::int64_t> positions_;
  std::int64_t head_ = 0;
  std::int64_t tail_ = 1;
  Ticket running_ = 0;
  std::vector<Flight> in_flight_;             // only the worker changes it, under the lock; so it reads without
  std::map<Ticket, std::string> failures_;
  std::set<Ticket> unraised_;                 // failures that were not raised
  std::unordered_set<Ticket> withdrawn_;
  Ticket last_ = 0;
  bool is_started_ = false;
  bool is_closed_ = false;

  std::mutex join_mutex_;  // guards worker_: several threads may stop the queue at once
  std::thread worker_;
};

}  // namespace megatron_swap
