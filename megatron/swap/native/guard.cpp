#include "guard.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "storage_access.h"

namespace megatron_swap {
namespace {

// Held during every call of the guard in force, so that `end` can wait for it.
std::mutex in_force_mutex;
Guard* in_force = nullptr;
thread_local bool is_paused = false;

std::string format_bytes(std::size_t num_bytes) {
  if (num_bytes < std::size_t{1} << 20) return std::to_string(num_bytes >> 10) + " KiB";
  return std::to_string(num_bytes >> 20) + " MiB";
}

const char* const kRefusal =
    "the out-of-memory guard evicted this saved tensor, and it was not reloaded before its use; please "
    "report this";

}  // namespace

Guard::Guard(std::unique_ptr<Machine> machine, int device, std::size_t most_host_bytes)
    : machine_(std::move(machine)), device_(device), chunks_(most_host_bytes) {}

Guard::~Guard() {
  end();
  chunks_.close([this](Piece slab) { machine_->unpin(slab); });
}

void Guard::begin() {
  std::lock_guard lock(in_force_mutex);
  if (in_force != nullptr && in_force != this) {
    throw std::runtime_error("another out-of-memory guard is at work in this process, and there can be one at a time");
  }
  in_force = this;
}

void Guard::end() {
  std::lock_guard lock(in_force_mutex);
  if (in_force == this) in_force = nullptr;
}

void Guard::offer(Key key, const Offer& offer) {
  std::lock_guard lock(mutex_);
  entries_.insert_or_assign(key, Entry{offer});
  candidates_.insert(order_of(key, offer));
}

std::optional<Pieces> Guard::withdraw(Key key) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  Entry entry = std::move(found->second);
  entries_.erase(found);
  if (entry.is_evicted) return std::move(entry.pieces);
  candidates_.erase(order_of(key, entry.offer));
  return std::nullopt;
}

void Guard::release(const Pieces& pieces) {
  std::lock_guard lock(mutex_);
  chunks_.release(pieces);
}

std::vector<Key> Guard::take_evicted() {
  std::lock_guard lock(mutex_);
  return std::exchange(evicted_, {});
}

std::vector<Rescue> Guard::take_rescues() {
  std::lock_guard lock(mutex_);
  return std::exchange(rescues_, {});
}

void Guard::set_most_host_bytes(std::size_t most_bytes) {
  std::lock_guard lock(mutex_);
  chunks_.set_most(most_bytes);
}

std::size_t Guard::mapped_bytes() {
  std::lock_guard lock(mutex_);
  return chunks_.mapped_bytes();
}

void Guard::pin() {
  std::lock_guard lock(mutex_);
  chunks_.pin([this](Piece slab) {
    try {
      machine_->pin(slab);
    } catch (const std::exception& error) {
      last_error_ = error.what();  // not pinned: copies are slower
    }
  });
}

bool Guard::make_room(std::size_t num_bytes, int device, std::uint64_t* seen, std::vector<c10::DataPtr>& taken) {
  std::lock_guard lock(mutex_);
  if (device != device_) return false;
  if (evict(num_bytes, taken)) return true;
  // Nothing to evict. But another thread may have freed memory since the attempt failed: try once more.
  return std::exchange(*seen, 1) == 0;
}

bool Guard::is_free(const Offer& offer) {
  const c10::StorageImpl& storage = *offer.storage;
  if (c10::raw::intrusive_ptr::use_count(offer.storage) != offer.num_owners || storage.nbytes() != offer.num_bytes ||
      refuses(storage)) {
    return false;
  }
  // It must be the allocator's own memory. Releasing memory of others (numpy's, another process's) frees nothing, and
  // may run Python. A null address has no memory.
  const void* const address = storage.data_ptr().get();
  return address != nullptr && storage.data_ptr().get_context() == address;
}

bool Guard::evict(std::size_t num_bytes, std::vector<c10::DataPtr>& taken) {
  const auto start = std::chrono::steady_clock::now();
  Rescue rescue{.wanted_bytes = num_bytes};
  std::size_t chosen_bytes = 0;
  std::vector<Key> chosen;  // copied to the host together, then freed
  try {
    for (const auto& [must_copy, next_use, key] : candidates_) {
      // A group is evicted as a whole: its tensors are reloaded together, and the next allocation is about as large.
      Entry& entry = entries_.at(key);
      const bool is_begun = !rescue.groups.empty() && rescue.groups.back() == entry.offer.group;
      if (chosen_bytes >= num_bytes && !is_begun) break;
      if (!is_free(entry.offer)) continue;
      const std::size_t size = entry.offer.num_bytes;
      if (must_copy) {
        entry.pieces = chunks_.take(size);
        if (entry.pieces.empty()) continue;  // the host has no room for this one, but may have for a smaller one
      }
      chosen.push_back(key);
      chosen_bytes += size;
      if (!is_begun) rescue.groups.push_back(entry.offer.group);
    }
    for (const Key key : chosen) {
      const Entry& entry = entries_.at(key);
      machine_->wait(entry.offer.event);
      const auto* source = static_cast<const char*>(entry.offer.storage->data());
      for (const Piece& piece : entry.pieces) {
        machine_->copy_out(piece, source);
        source += piece.num_bytes;
      }
    }
    machine_->finish_copies();
  } catch (const std::exception& error) {
    // Nothing was freed. Copies that began may still write, so their host memory is not reused.
    for (const Key key : chosen) entries_.at(key).pieces.clear();
    last_error_ = error.what();
    return false;
  }
  for (const Key key : chosen) taken.push_back(take_memory(key, entries_.at(key), rescue));
  if (chosen.empty()) return false;
  ++num_evictions_;
  rescue.held_bytes = chunks_.used_bytes();
  rescue.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  rescues_.push_back(std::move(rescue));
  return true;
}

c10::DataPtr Guard::take_memory(Key key, Entry& entry, Rescue& rescue) {
  c10::StorageImpl& storage = *entry.offer.storage;
  const std::size_t size = entry.offer.num_bytes;
  machine_->discard(const_cast<void*>(storage.data()), size);  // not mutable_data(): that may allocate
  rescue.freed_bytes += size;
  if (!entry.offer.is_copied) rescue.copied_bytes += size;
  candidates_.erase(order_of(key, entry.offer));
  entry.is_evicted = true;
  evicted_.push_back(key);
  c10::DataPtr memory = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  refuse(storage, kRefusal);  // it has no other owner, so access never has to be allowed again
  return memory;
}

std::string Guard::report() {
  std::lock_guard lock(mutex_);
  std::size_t evicted_bytes = 0, used_bytes = 0, num_used = 0;
  for (const auto& [_, entry] : entries_) {
    const std::size_t size = entry.offer.num_bytes;
    if (entry.is_evicted) {
      evicted_bytes += size;
    } else {
      used_bytes += size;
      ++num_used;
    }
  }
  std::string text = "Megatron Swap's out-of-memory guard has nothing more to evict: " + format_bytes(evicted_bytes) +
                     " of saved tensors are evicted already; " + std::to_string(num_used) + " more (" +
                     format_bytes(used_bytes) + ") are in use elsewhere, or the host has no room for them (it has given " +
                     format_bytes(chunks_.mapped_bytes()) + ").";
  if (!last_error_.empty()) text += " An eviction failed: " + last_error_ + ".";
  return text;
}

void pause_here(bool pause) { is_paused = pause; }

bool make_room(std::size_t num_bytes, int device, std::uint64_t* seen) {
  if (is_paused) return false;
  std::vector<c10::DataPtr> taken;  // declared before the lock, so it is freed after the unlock
  std::lock_guard lock(in_force_mutex);
  return in_force != nullptr && in_force->make_room(num_bytes, device, seen, taken);
}

bool is_any_in_force() {
  std::lock_guard lock(in_force_mutex);
  return in_force != nullptr;
}

std::size_t report(char* text, std::size_t size) {
  std::lock_guard lock(in_force_mutex);
  if (in_force == nullptr) return 0;
  const std::string words = in_force->report();
  const std::size_t length = std::min(size, words.size());
  std::memcpy(text, words.data(), length);
  return length;
}

}  // namespace megatron_swap
