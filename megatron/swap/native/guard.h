// Takes memory from storages that nobody uses right now, when an allocation on the device has failed.
//
// Whoever saves tensors for later offers their storages; whoever wants to use one claims it first. In between the guard
// may take its memory, on whatever thread the allocation failed: what has its bytes on the host already, or is about
// to, goes first, then what has to be copied there; of each, what is used last. The storage stays, without bytes, and
// refuses access.
//
// It never asks for the interpreter's lock, calls no allocator but to free, and waits for single events alone: two
// pipeline ranks that are short of memory at once may not wait for each other's streams. A failed allocation holds no
// lock of PyTorch's, and an offer or a claim waits for nobody while it holds ours, so ours is always the outermost.
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
  // The copy to the host begins; `finish_copies` waits until all have ended.
  virtual void copy_out(const Piece& target, const char* source) = 0;
  virtual void finish_copies() = 0;
  // Right before memory of the device is freed.
  virtual void discard(void* address, std::size_t num_bytes) = 0;
  virtual void pin(const Piece& slab) = 0;
  virtual void unpin(const Piece& slab) = 0;
};

struct Offer {
  c10::StorageImpl* storage;   // the one who offers keeps it alive until the claim
  std::size_t num_bytes;       // that it has; emptied by somebody else, it is left alone
  std::size_t num_owners;      // references to it while nobody else has one
  std::int64_t next_use;       // the higher the later
  bool is_copied;              // its bytes rest on the host once the event has passed; else the guard copies them
  void* event;                 // passes before its memory may go, or be copied; kept alive until the claim
  std::int64_t group;          // for people: what it belongs to
};

// What was done for one allocation.
struct Rescue {
  std::size_t wanted_bytes = 0;
  std::size_t freed_bytes = 0;
  std::size_t copied_bytes = 0;  // of those
  std::size_t held_bytes = 0;    // on the host, copied for this one or before
  double ms = 0;
  std::vector<std::int64_t> groups;
};

class Guard {
 public:
  // `device`: the index of the device whose allocations it rescues. `most_host_bytes`: that it may map.
  Guard(std::unique_ptr<Machine> machine, int device, std::size_t most_host_bytes);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // From now on an allocation that fails asks this guard; one at a time is in force.
  void begin();
  // Nobody asks any more: when this returns, nobody is being served.
  void end();

  void offer(Key key, const Offer& offer);
  // Its memory is safe from now on. Where it was taken: the pieces that hold its bytes (none if they were copied
  // before), which are the caller's now.
  std::optional<Pieces> claim(Key key);
  // Room for so many bytes on the host is free again.
  void give_back(const Pieces& pieces);
  // Of offers whose memory was taken and that were not claimed since; each is told once.
  std::vector<Key> take_evicted();
  std::uint64_t num_evictions() const { return num_evictions_.load(std::memory_order_relaxed); }
  std::vector<Rescue> take_rescues();

  void set_most_host_bytes(std::size_t most_bytes);
  std::size_t mapped_bytes();
  void pin();

  // For a failed allocation of so many bytes: whether to try again. `seen` is the caller's, 0 at first: what the
  // guard remembers between the attempts. What is taken goes to `taken`: to free it may call anything (PyTorch's recorder
  // of memory asks for the interpreter's lock), so no lock of ours may be held then.
  bool make_room(std::size_t num_bytes, int device, std::uint64_t* seen, std::vector<c10::DataPtr>& taken);
  // For people: what it holds.
  std::string report();

 private:
  struct Entry {
    Offer offer;
    bool is_evicted = false;
    Pieces pieces = {};
  };
  using Place = std::tuple<bool, std::int64_t, Key>;  // what goes first comes first

  static Place place(Key key, const Offer& offer) { return {!offer.is_copied, -offer.next_use, key}; }
  // With the lock:
  bool evict(std::size_t num_bytes, std::vector<c10::DataPtr>& taken);
  bool is_free(const Offer& offer);
  c10::DataPtr take_memory(Key key, Entry& entry, Rescue& rescue);

  const std::unique_ptr<Machine> machine_;
  const int device_;

  std::mutex mutex_;  // of all below
  HostChunks chunks_;
  std::unordered_map<Key, Entry> entries_;
  std::set<Place> places_;  // of entries that were not evicted
  std::vector<Key> evicted_;
  std::vector<Rescue> rescues_;
  std::string trouble_;
  std::atomic<std::uint64_t> num_evictions_ = 0;  // how often memory was taken: only grows
};

// On this thread allocations fail as if there were no guard: for what is not worth taking anything away.
void pause_here(bool pause);

// What allocators call; the guard in force, if there is one, answers.
bool make_room(std::size_t num_bytes, int device, std::uint64_t* seen);
std::size_t report(char* text, std::size_t size);  // how much of `text` was written
bool is_any_in_force();

}  // namespace megatron_swap
