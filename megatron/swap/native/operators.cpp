#include "operators.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "include/megatron_swap/operator_hooks.h"
#include "storage_access.h"

namespace megatron_swap {
namespace {

std::atomic<Reload> reload_hook{nullptr};

// The storages in use by all operators, in the order of their declarations; there are few at a time.
std::mutex uses_mutex;
std::vector<const c10::StorageImpl*> uses;

using Begun = std::vector<const c10::StorageImpl*>;

void* begin(const char*) { return new Begun; }

void use(void* op, c10::StorageImpl* storage) {
  // Mark it as in use first, so that it is not offloaded again between its reload and its use.
  static_cast<Begun*>(op)->push_back(storage);
  {
    std::lock_guard lock(uses_mutex);
    uses.push_back(storage);
  }
  Reload reload = reload_hook.load();
  if (reload != nullptr && refuses(*storage)) reload(*storage);
}

void end(void* op) {
  auto* begun = static_cast<Begun*>(op);
  {
    std::lock_guard lock(uses_mutex);
    for (const auto* storage : *begun) uses.erase(std::find(uses.begin(), uses.end(), storage));
  }
  delete begun;
}

}  // namespace

void set_reload(Reload reload) { reload_hook = reload; }

bool in_use(const c10::StorageImpl& storage) {
  std::lock_guard lock(uses_mutex);
  return std::find(uses.begin(), uses.end(), &storage) != uses.end();
}

}  // namespace megatron_swap

// Extensions find it by name, since build.py loads this library globally.
extern "C" __attribute__((visibility("default"))) const MegatronSwapOperatorHooks megatron_swap_operator_hooks = {
    1, megatron_swap::begin, megatron_swap::use, megatron_swap::end};
