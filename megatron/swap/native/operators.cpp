#include "operators.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "include/megatron_swap/operator_hooks.h"
#include "storage_access.h"

namespace megatron_swap {
namespace {

std::atomic<BringBack> bring_back_hook{nullptr};

// Of all operators that have begun, in the order of their declarations; there are few at a time.
std::mutex uses_mutex;
std::vector<const c10::StorageImpl*> uses;

struct Begun {
  std::vector<const c10::StorageImpl*> storages;
};

void* begin(const char*) { return new Begun; }

void use(void* op, c10::StorageImpl* storage) {
  // In use first: what is brought back must not leave before the operator has seen it.
  static_cast<Begun*>(op)->storages.push_back(storage);
  {
    std::lock_guard lock(uses_mutex);
    uses.push_back(storage);
  }
  BringBack bring_back = bring_back_hook.load();
  if (bring_back != nullptr && refuses(*storage)) bring_back(*storage);
}

void end(void* op) {
  auto* begun = static_cast<Begun*>(op);
  {
    std::lock_guard lock(uses_mutex);
    for (const auto* storage : begun->storages) uses.erase(std::find(uses.begin(), uses.end(), storage));
  }
  delete begun;
}

}  // namespace

void set_bring_back(BringBack bring_back) { bring_back_hook = bring_back; }

bool in_use(const c10::StorageImpl& storage) {
  std::lock_guard lock(uses_mutex);
  return std::find(uses.begin(), uses.end(), &storage) != uses.end();
}

}  // namespace megatron_swap

// Found by name: build.py loads this library for all to see.
extern "C" __attribute__((visibility("default"))) const MegatronSwapOperatorHooks megatron_swap_operator_hooks = {
    1, megatron_swap::begin, megatron_swap::use, megatron_swap::end};
