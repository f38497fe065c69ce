// Host memory for evicted storages: chunks of slabs, which are mapped when they are needed.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace megatron_swap {

struct Piece {
  void* address;
  std::size_t num_bytes;
};
using Pieces = std::vector<Piece>;

// Not thread-safe: the guard calls it under its lock.
class HostChunks {
 public:
  explicit HostChunks(std::size_t most_bytes) : most_bytes_(most_bytes) {}
  ~HostChunks();
  HostChunks(const HostChunks&) = delete;
  HostChunks& operator=(const HostChunks&) = delete;

  // Returns room for `num_bytes` in pieces of whole chunks, none of them across two slabs. Empty: there is no room.
  Pieces take(std::size_t num_bytes);
  void release(const Pieces& pieces);

  // Limits the mapped bytes. Slabs that are mapped already stay.
  void set_most(std::size_t most_bytes) { most_bytes_ = most_bytes; }
  std::size_t mapped_bytes() const { return mapped_bytes_; }
  std::size_t used_bytes() const { return used_bytes_; }

  // Calls `pin` for each slab that is not pinned yet.
  void pin(const std::function<void(Piece)>& pin);
  // Calls `unpin` for each pinned slab, and unmaps all slabs. No piece may be in use.
  void close(const std::function<void(Piece)>& unpin);

  static constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
  static constexpr std::size_t kSlabBytes = std::size_t{64} << 20;  // less for the last one before the limit

 private:
  bool grow();

  std::size_t most_bytes_;
  std::vector<Piece> slabs_;
  std::size_t mapped_bytes_ = 0;
  std::size_t num_pinned_ = 0;
  std::vector<char*> free_;  // chunks, the next one last
  std::size_t used_bytes_ = 0;
};

}  // namespace megatron_swap
