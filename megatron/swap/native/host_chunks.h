// Host memory for what is taken from the device in an emergency: chunks of slabs that are mapped when they are needed.
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

// Not thread-safe: the guard's lock is around it.
class HostChunks {
 public:
  explicit HostChunks(std::size_t most_bytes) : most_bytes_(most_bytes) {}
  ~HostChunks();
  HostChunks(const HostChunks&) = delete;
  HostChunks& operator=(const HostChunks&) = delete;

  // Room for so much, in pieces of whole chunks, none of them across two slabs; no pieces where there is not so much
  // left.
  Pieces take(std::size_t num_bytes);
  void give_back(const Pieces& pieces);

  // What is mapped may no longer grow beyond this.
  void set_most(std::size_t most_bytes) { most_bytes_ = most_bytes; }
  std::size_t mapped_bytes() const { return mapped_bytes_; }
  std::size_t used_bytes() const { return used_bytes_; }

  // Tells `pin` of each slab that it was not told of.
  void pin(const std::function<void(Piece)>& pin);
  // Tells `unpin` of each slab that was pinned, and unmaps all; nobody may use any of it any more.
  void close(const std::function<void(Piece)>& unpin);

  static constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
  static constexpr std::size_t kSlabBytes = std::size_t{64} << 20;  // or what is left

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
