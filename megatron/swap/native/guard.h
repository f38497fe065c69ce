// The out-of-memory guard: evicts storages that are not in use when an allocation on the device has failed.
//
// The engine offers the storages of saved tensors, and withdraws the offer before it uses one. In between the guard may
// evict the storage, on whatever thread the allocation failed. Storages with a copy on the host, complete or under way,
// are evicted first, then those that have to be copied there; within each, the one whose next use is latest. An evicted
// storage keeps its StorageImpl, has no bytes, and refuses access.
//
// The guard never takes the interpreter's lock, calls an allocator only to free, and waits for single events only: two
// pipeline ranks that run out of memory at once must not wait for each other's streams. A failed allocation holds none
// of PyTorch's locks, and `offer` and `withdraw` wait for nothing while they hold ours, so ours is the outermost.
#pragma once

#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "host_chunks.h"

namespace megatron_swap {

using Key = std::int64_t;

// What a guard needs of a device.
class Machine {
 public:
  virtual ~Machine() = default;
  virtual void wait(void* event) = 0;
  // Begins a copy to the host; `finish_copies` waits for all of them.
  virtual void copy_out(const Piece& target, const char* source) = 0;
  virtual void finish_copies() = 0;
  // Called right before memory of the device is freed.
  virtual void discard(void* address, std::size_t num_bytes) = 0;
  virtual void pin(const Piece& slab) = 0;
  virtual void unpin(const Piece& slab) = 0;
};

struct Offer {
  c10::StorageImpl* storage;   // the caller keeps it alive until `withdraw`
  std::size_t num_bytes;       // its size; a storage of another size is not evicted
  std::size_t num_owners;      // the caller's references to it; a storage with more is not evicted
  std::int64_t next_use;       // the higher the later
  bool is_copied;              // the host has its bytes once the event has passed; else the guard copies them
  void* event;                 // passes before its memory may be copied or freed; alive until `withdraw`
  std::int64_t group;          // storages of a group are evicted together; returned in rescues
};

// The evictions for one allocation.
struct Rescue {
  std::size_t wanted_bytes = 0;
  std::size_t freed_bytes = 0;
  std::size_t copied_bytes = 0;  // of the freed bytes
  std::size_t held_bytes = 0;    // on the host, copied now or before
  double ms = 0;
  std::vector<std::int64_t> groups;
};

class Guard {
 public:
  // `device`: index of the device whose allocations it rescues. `most_host_bytes`: most host memory that it may map.
  Guard(std::unique_ptr<Machine> machine, int device, std::size_t most_host_bytes);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // Makes this guard the one that failed allocations call. There can be one at a time.
  void begin();
  // Undoes `begin`. When it returns, no call of the guard is under way.
  void end();

  void offer(Key key, const Offer& offer);
  // Ends an offer: the storage is not evicted from now on. If it was evicted, returns the pieces that hold its bytes
  // (none if they were copied before), which are the caller's now.
  std::optional<Pieces> withdraw(Key key);
  // Returns host memory to the guard.
  void release(const Pieces& pieces);
  // Keys of the offers that were evicted and not withdrawn; each is returned once.
  std::vector<Key> take_evicted();
  std::uint64_t num_evictions() const { return num_evictions_.load(std::memory_order_relaxed); }
  std::vector<Rescue> take_rescues();

  void set_most_host_bytes(std::size_t most_bytes);
  std::size_t mapped_bytes();
  void pin();

  // Called for a failed allocation of `num_bytes`; returns whether to try again. `seen` is the caller's, 0 at the first
  // attempt: the guard's state between attempts. Evicted memory is moved to `taken`; the caller frees it without our
  // locks, since freeing may call anything (PyTorch's memory recorder takes the interpreter's lock).
  bool make_room(std::size_t num_bytes, int device, std::uint64_t* seen, std::vector<c10::DataPtr>& taken);
  // Describes what the guard holds, for error messages.
  std::string report();

 private:
  struct Entry {
    Offer offer;
    bool is_evicted = false;
    Pieces pieces = {};
  };
  using Order = std::tuple<bool, std::int64_t, Key>;  // the lowest is evicted first

  static Order order_of(Key key, const Offer& offer) { return {!offer.is_copied, -offer.next_use, key}; }
  // With the lock:
  bool evict(std::size_t num_bytes, std::vector<c10::DataPtr>& taken);
  bool is_free(const Offer& offer);
  c10::DataPtr take_memory(Key key, Entry& entry, Rescue& rescue);

  const std::unique_ptr<Machine> machine_;
  const int device_;

  std::mutex mutex_;  // of all below
  HostChunks chunks_;
  std::unordered_map<Key, Entry> entries_;
  std::set<Order> candidates_;  // the entries that were not evicted
  std::vector<Key> evicted_;
  std::vector<Rescue> rescues_;
  std::string last_error_;
  std::atomic<std::uint64_t> num_evictions_ = 0;  // never decreases
};

// While paused, allocations of this thread fail as if there were no guard: they are not worth an eviction.
void pause_here(bool pause);

// Called by allocators. They forward to the guard in force, if there is one.
bool make_room(std::size_t num_bytes, int device, std::uint64_t* seen);
std::size_t report(char* text, std::size_t size);  // returns the bytes written to `text`
bool is_any_in_force();

}  // namespace megatron_swap
