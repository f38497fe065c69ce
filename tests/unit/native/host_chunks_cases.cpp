// The guard's host memory, without a guard. Exit status not 0: something failed, and the output says what.
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
      expect(chunks.mapped_bytes() <= 8 * kSlab, "more is mapped than may be");
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
  nobody_gets_what_another_has();
  return num_wrong > 0;
}
