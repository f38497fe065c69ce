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

// Around every call of the guard in force, so that it can end.
std::mutex in_force_mutex;
Guard* in_force = nullptr;
thread_local bool is_paused = false;

std::string in_words(std::size_t num_bytes) {
  if (num_bytes < std::size_t{1} << 20) return std::to_string(num_bytes >> 10) + " KiB";
  return std::to_string(num_bytes >> 20) + " MiB";
}

const char* const kRefusal =
    "the out-of-memory guard took the memory of this saved tensor, and it was not brought back before its use; please "
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
  places_.insert(place(key, offer));
}

std::optional<Pieces> Guard::claim(Key key) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  Entry entry = std::move(found->second);
  entries_.erase(found);
  if (entry.is_evicted) return std::move(entry.pieces);
  places_.erase(place(key, entry.offer));
  return std::nullopt;
}

void Guard::give_back(const Pieces& pieces) {
  std::lock_guard lock(mutex_);
  chunks_.give_back(pieces);
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
      trouble_ = error.what();  // copies are slower then
    }
  });
}

bool Guard::make_room(std::size_t num_bytes, int device, std::uint64_t* seen, std::vector<c10::DataPtr>& taken) {
  std::lock_guard lock(mutex_);
  if (device != device_) return false;
  if (evict(num_bytes, taken)) return true;
  // Nothing more to take. But another thread may have freed meanwhile what this one did not find: once more.
  return std::exchange(*seen, 1) == 0;
}

bool Guard::is_free(const Offer& offer) {
  const c10::StorageImpl& storage = *offer.storage;
  if (c10::raw::intrusive_ptr::use_count(offer.storage) != offer.num_owners || storage.nbytes() != offer.num_bytes ||
      refuses(storage)) {
    return false;
  }
  // An allocator's own memory, and not a view of somebody else's (numpy's, another process's): to let go of that frees
  // nothing, and may run Python. Nor is there anything where there are no bytes.
  const void* const address = storage.data_ptr().get();
  return address != nullptr && storage.data_ptr().get_context() == address;
}

bool Guard::evict(std::size_t num_bytes, std::vector<c10::DataPtr>& taken) {
  const auto start = std::chrono::steady_clock::now();
  Rescue rescue{.wanted_bytes = num_bytes};
  std::size_t chosen_bytes = 0;
  std::vector<Key> chosen;  // copied to the host together, then freed
  try {
    for (const auto& [must_copy, next_use, key] : places_) {
      // A group goes as a whole: its tensors come back together, and the next allocation needs about as much again.
      Entry& entry = entries_.at(key);
      const bool is_begun = !rescue.groups.empty() && rescue.groups.back() == entry.offer.group;
      if (chosen_bytes >= num_bytes && !is_begun) break;
      if (!is_free(entry.offer)) continue;
      const std::size_t size = entry.offer.num_bytes;
      if (must_copy) {
        entry.pieces = chunks_.take(size);
        if (entry.pieces.empty()) continue;  // the host has no room for this one; for a smaller one perhaps
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
    // Nothing was freed. Copies that began may still write: their room is not used again.
    for (const Key key : chosen) entries_.at(key).pieces.clear();
    trouble_ = error.what();
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
  places_.erase(place(key, entry.offer));
  entry.is_evicted = true;
  evicted_.push_back(key);
  c10::DataPtr memory = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  refuse(storage, kRefusal);  // nobody else refers to it: it never has to be allowed again
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
  std::string text = "Megatron Swap's out-of-memory guard has nothing more to take: " + in_words(evicted_bytes) +
                     " of saved tensors were taken from the device already; " + std::to_string(num_used) + " more (" +
                     in_words(used_bytes) + ") are in use elsewhere, or the host has no room for them (it has given " +
                     in_words(chunks_.mapped_bytes()) + ").";
  if (!trouble_.empty()) text += " An attempt failed: " + trouble_ + ".";
  return text;
}

void pause_here(bool pause) { is_paused = pause; }

bool make_room(std::size_t num_bytes, int device, std::uint64_t* seen) {
  if (is_paused) return false;
  std::vector<c10::DataPtr> taken;  // freed at the very end, behind the lock
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
