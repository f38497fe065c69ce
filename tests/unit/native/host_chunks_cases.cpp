// Cases for the guard's host memory, without a guard. Exit status not 0: a case failed, and the output says why.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>

#include "host_chunks.h"

using namespace megatron_swap;

namespace {

constexpr std::size_t kSlab = HostChunks::kSlabBytes;
int num_wrong = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  ++num_wrong;
}

std::size_t size_of(const Pieces& pieces) {
  std::size_t size = 0;
  for (const Piece& piece : pieces) size += piece.num_bytes;
  return size;
}

// The slabs that were pinned, to check that each piece is inside one of them.
class Pinned {
 public:
  void add(Piece slab) { slabs_.push_back(slab); }
  bool holds(const Piece& piece) const {
    const auto* const first = static_cast<char*>(piece.address);
    return std::any_of(slabs_.begin(), slabs_.end(), [&](const Piece& slab) {
      const auto* const start = static_cast<char*>(slab.address);
      return start <= first && first + piece.num_bytes <= start + slab.num_bytes;
    });
  }
  std::size_t size() const { return slabs_.size(); }

 private:
  std::vector<Piece> slabs_;
};

void no_piece_spans_two_slabs() {
  HostChunks chunks(64 * kSlab);
  const Pieces pieces = chunks.take(5 * kSlab + 1);  // slabs that are mapped in a row mostly lie in a row
  Pinned pinned;
  chunks.pin([&](Piece slab) { pinned.add(slab); });
  expect(pinned.size() == 6 && chunks.mapped_bytes() == 6 * kSlab, "not as many slabs as needed");
  expect(size_of(pieces) == 5 * kSlab + 1, "not as large as asked for");
  for (const Piece& piece : pieces) expect(pinned.holds(piece), "a piece spans two slabs");
  expect(pieces.size() == 6, "pieces are not as long as they could be");
  chunks.pin([&](Piece slab) { pinned.add(slab); });
  expect(pinned.size() == 6, "a slab was pinned twice");
  std::size_t num_unpinned = 0;
  chunks.close([&](Piece) { ++num_unpinned; });
  expect(num_unpinned == 6 && chunks.mapped_bytes() == 0, "not everything was given back");
}

void no_more_is_mapped_than_may_be() {
  constexpr std::size_t kMost = 2 * kSlab - 1, kLast = kSlab - HostChunks::kChunkBytes;
  HostChunks chunks(kMost);
  const Pieces pieces = chunks.take(kSlab);
  expect(pieces.size() == 1 && chunks.mapped_bytes() == kSlab, "there is room for one slab");
  expect(chunks.take(kLast + 1).empty() && chunks.mapped_bytes() == kSlab + kLast, "more than may be");
  Pinned pinned;
  chunks.pin([&](Piece slab) { pinned.add(slab); });
  const Pieces rest = chunks.take(kLast);
  expect(size_of(rest) == kLast && pinned.holds(rest.front()), "what is left of it makes a shorter slab");
  chunks.set_most(0);
  chunks.release(pieces);
  expect(!chunks.take(kSlab).empty(), "what is mapped stays usable");
  HostChunks none(HostChunks::kChunkBytes - 1);
  expect(none.take(1).empty() && none.mapped_bytes() == 0, "room where there is none");
}

// Takes and frees memory in any order: no piece overlaps another one, and all memory is freed.
void nobody_gets_what_another_has() {
  HostChunks chunks(8 * kSlab);
  std::mt19937 random(1);
  std::vector<Pieces> taken;
  std::map<char*, char*> used;  // first and last address
  for (int i = 0; i < 20000; ++i) {
    if (taken.empty() || random() % 2) {
      const std::size_t num_bytes = 1 + random() % (12 << 20);
      Pieces pieces = chunks.take(num_bytes);
      if (pieces.empty()) {
        expect(chunks.mapped_bytes() == 8 * kSlab, "refused although there is room");
        for (const Pieces& others : taken) chunks.release(others);
        taken.clear();
        used.clear();
        continue;
      }
      expect(size_of(pieces) == num_bytes, "not as large as asked for");
      for (const Piece& piece : pieces) {
        auto* const first = static_cast<char*>(piece.address);
        const auto next = used.lower_bound(first);
        expect(next == used.end() || first + piece.num_bytes <= next->first, "the next one's room");
        expect(next == used.begin() || std::prev(next)->second <= first, "the room of the one before");
        used[first] = first + piece.num_bytes;
      }
      taken.push_back(std::move(pieces));
    } else {
      std::swap(taken[random() % taken.size()], taken.back());
      for (const Piece& piece : taken.back()) used.erase(static_cast<char*>(piece.address));
      chunks.release(taken.back());
      taken.pop_back();
    }
  }
  for (const Pieces& pieces : taken) chunks.release(pieces);
  const std::size_t mapped_bytes = chunks.mapped_bytes();
  expect(!chunks.take(mapped_bytes).empty() && chunks.mapped_bytes() == mapped_bytes, "some room got lost");
}

}  // namespace

int main() {
  no_piece_spans_two_slabs();
  no_more_is_mapped_than_may_be();
  nobody_gets_what_another_has();
  return num_wrong > 0;
}
