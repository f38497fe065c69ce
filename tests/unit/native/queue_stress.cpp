// Hammers the queue's core from several threads, without Python, for ThreadSanitizer:  queue_stress SECONDS [SEED]
//
// In each round a queue is made, filled, started, used by all threads at once, and stopped or abandoned meanwhile.
// The bytes of every job are checked: all were moved or, if the job was withdrawn or failed, none after that step.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../../megatron/swap/native/transfer_queue.h"
#include "fake_cuda.cpp"

using namespace megatron_swap;
using Random = std::mt19937_64;

namespace {

constexpr int kThreads = 4;
constexpr const char* kFailure = "CUDA: choosing a device failed: as the test wished";
constexpr std::size_t kBytes = 20'000;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition);    \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (false)

std::atomic<std::int64_t> num_done, num_failed, num_withdrawn;
std::atomic<std::uintptr_t> num_events;

std::int64_t below(Random& random, std::int64_t end) { return static_cast<std::int64_t>(random() % end); }

CudaRuntime fake_runtime() {
  return {.set_device = cudaSetDevice,
          .memcpy_async = cudaMemcpyAsync,
          .stream_wait_event = cudaStreamWaitEvent,
          .stream_synchronize = cudaStreamSynchronize,
          .event_record = cudaEventRecord,
          .event_query = cudaEventQuery,
          .get_error_string = cudaGetErrorString};
}

struct Work {
  Ticket ticket = 0;
  bool fails = false;
  std::vector<char> source, middle, target;

  void check(JobState state) const {
    CHECK(state == JobState::done || state == JobState::failed || state == JobState::withdrawn);
    CHECK(state != JobState::done || !fails);
    CHECK(state != JobState::failed || fails);
    const std::vector<char> untouched(target.size(), 0);
    CHECK(target == (state == JobState::done ? source : untouched));
    ++(state == JobState::done ? num_done : state == JobState::failed ? num_failed : num_withdrawn);
  }
};

CudaCopy cuda_copy(Random& random, std::vector<char>& target, const std::vector<char>& source) {
  // Each job has its own event: no other job may record it before this one is done.
  void* const done = reinterpret_cast<void*>(++num_events);
  void* const stream = reinterpret_cast<void*>(1 + below(random, 3));
  return {target.data(), source.data(), source.size(), stream, nullptr, done, static_cast<int>(below(random, 2))};
}

std::unique_ptr<Work> make_work(Random& random, Job& job) {
  auto work = std::make_unique<Work>();
  const std::size_t size = 1 + below(random, kBytes);
  work->source.resize(size);
  for (char& byte : work->source) byte = static_cast<char>(1 + below(random, 127));
  work->middle.resize(size);
  work->target.resize(size);
  if (below(random, 2)) {
    job = {HostCopy{work->middle.data(), work->source.data(), size}};
  } else {
    job = {cuda_copy(random, work->middle, work->source)};
  }
  work->fails = below(random, 10) == 0;
  if (work->fails) {
    job.push_back(cuda_copy(random, work->target, work->middle));
    std::get<CudaCopy>(job.back()).device = kDevices;  // there is none
  }
  if (below(random, 2)) {
    job.push_back(HostCopy{work->target.data(), work->middle.data(), size});
  } else if (!work->fails) {
    job.push_back(cuda_copy(random, work->target, work->middle));
  }
  return work;
}

// Until the job is over: states only go forward.
JobState wait(TransferQueue& queue, Ticket ticket, JobState until) {
  JobState before = JobState::waiting;
  for (;;) {
    const JobState state = queue.wait(ticket, until, 0.01);
    CHECK(state >= before);
    if (state >= until) return state;
    before = state;
  }
}

void use(TransferQueue& queue, int num_jobs, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::unique_ptr<Work>> works;
  for (int number = 0; number < num_jobs; ++number) {
    Job job;
    auto work = make_work(random, job);
    work->ticket = queue.add(std::move(job), below(random, 3) == 0);
    if (work->ticket == 0) break;  // it was closed
    works.push_back(std::move(work));
    Work& some = *works[below(random, static_cast<std::int64_t>(works.size()))];
    switch (below(random, 7)) {
      case 0:
        if (queue.erase(some.ticket)) CHECK(queue.state(some.ticket) == JobState::withdrawn);
        break;
      case 1:
        if (queue.is_started()) wait(queue, some.ticket, JobState::done);
        break;
      case 2:
        if (queue.is_started()) wait(queue, some.ticket, JobState::issued);
        break;
      case 3:
        queue.wait_all(0.001);
        break;
      case 4:
        if (const Ticket failed = queue.first_failure()) CHECK(queue.failure(failed) == kFailure);
        break;
      case 5:
        CHECK(queue.state(some.ticket) != JobState::unknown);
        break;
      default:
        break;
    }
  }
  for (const auto& work : works) work->check(wait(queue, work->ticket, JobState::done));
}

void play_round(std::uint64_t seed) {
  Random random(seed);
  fake_cuda_reset();
  const int num_jobs = 1 + static_cast<int>(below(random, 60));
  TransferQueue queue("stress", 1 + below(random, 2), fake_runtime());
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back(use, std::ref(queue), num_jobs, random());
  }
  if (below(random, 2)) std::this_thread::sleep_for(std::chrono::microseconds(below(random, 2000)));
  queue.start();
  const auto how = below(random, 3);
  if (how > 0) std::this_thread::sleep_for(std::chrono::microseconds(below(random, 5000)));
  if (how == 1) queue.close();
  if (how == 2) queue.abandon();
  std::thread joins([&] {
    if (how > 0) queue.join();
  });
  for (std::thread& thread : threads) thread.join();
  queue.close();
  queue.join();
  joins.join();
  CHECK(queue.wait_all(0));
  CHECK(queue.num_waiting() == 0);
}

}  // namespace

int main(int num_arguments, char** arguments) {
  if (num_arguments < 2) {
    std::fprintf(stderr, "usage: %s SECONDS [SEED]\n", arguments[0]);
    return 2;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(arguments[1]));
  std::uint64_t seed = num_arguments > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  std::int64_t num_rounds = 0;
  for (; std::chrono::steady_clock::now() < end; ++num_rounds) play_round(seed++);
  std::printf("%lld rounds: %lld jobs done, %lld failed, %lld withdrawn\n", static_cast<long long>(num_rounds),
              static_cast<long long>(num_done), static_cast<long long>(num_failed),
              static_cast<long long>(num_withdrawn));
  CHECK(num_done > 0 && num_failed > 0 && num_withdrawn > 0);
  return 0;
}
