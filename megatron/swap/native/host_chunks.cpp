#include "host_chunks.h"

#include <sys/mman.h>

#include <algorithm>

namespace megatron_swap {

HostChunks::~HostChunks() {
  close([](Piece) {});
}

bool HostChunks::grow() {
  if (mapped_bytes_ + kChunkBytes > most_bytes_) return false;
  const std::size_t num_bytes = std::min(kSlabBytes, (most_bytes_ - mapped_bytes_) / kChunkBytes * kChunkBytes);
  void* const address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return false;
  // Otherwise, after a fork (a data loader's worker), the first write to each page would copy it.
  madvise(address, num_bytes, MADV_DONTFORK);
  slabs_.push_back({address, num_bytes});
  mapped_bytes_ += num_bytes;
  for (std::size_t offset = num_bytes; offset > 0; offset -= kChunkBytes) {
    free_.push_back(static_cast<char*>(address) + offset - kChunkBytes);
  }
  return true;
}

Pieces HostChunks::take(std::size_t num_bytes) {
  const std::size_t num_chunks = (num_bytes + kChunkBytes - 1) / kChunkBytes;
  while (free_.size() < num_chunks) {
    if (!grow()) return {};
  }
  used_bytes_ += num_bytes;
  Pieces pieces;
  for (std::size_t left = num_bytes; left > 0;) {
    char* const chunk = free_.back();
    free_.pop_back();
    const std::size_t size = std::min(left, kChunkBytes);
    const bool is_next = !pieces.empty() && static_cast<char*>(pieces.back().address) + pieces.back().num_bytes == chunk;
    const auto begins_here = [chunk](const Piece& slab) { return slab.address == chunk; };
    // Slabs may be adjacent, but each is pinned by itself: CUDA refuses a copy that spans two.
    if (is_next && std::none_of(slabs_.begin(), slabs_.end(), begins_here)) {
      pieces.back().num_bytes += size;
    } else {
      pieces.push_back({chunk, size});
    }
    left -= size;
  }
  return pieces;
}

void HostChunks::release(const Pieces& pieces) {
  for (const Piece& piece : pieces) {
    used_bytes_ -= piece.num_bytes;
    auto* const first = static_cast<char*>(piece.address);
    const std::size_t num_chunks = (piece.num_bytes + kChunkBytes - 1) / kChunkBytes;
    for (std::size_t i = num_chunks; i > 0; --i) free_.push_back(first + (i - 1) * kChunkBytes);
  }
}

void HostChunks::pin(const std::function<void(Piece)>& pin) {
  for (; num_pinned_ < slabs_.size(); ++num_pinned_) pin(slabs_[num_pinned_]);
}

void HostChunks::close(const std::function<void(Piece)>& unpin) {
  for (std::size_t i = 0; i < slabs_.size(); ++i) {
    if (i < num_pinned_) unpin(slabs_[i]);
    munmap(slabs_[i].address, slabs_[i].num_bytes);
  }
  slabs_.clear();
  mapped_bytes_ = 0;
  free_.clear();
  num_pinned_ = 0;
}

}  // namespace megatron_swap
