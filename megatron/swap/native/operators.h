// The storages that C++ operators declare through include/megatron_swap/operator.h, from begin to end of each.
#pragma once

#include <c10/core/StorageImpl.h>

#include <functional>

namespace megatron_swap {

// Called with a storage that an operator is about to use and that refuses access; reloads it, or throws.
using Reload = void (*)(c10::StorageImpl& storage);

void set_reload(Reload reload);

// Whether an operator uses `storage` and has not ended.
bool in_use(const c10::StorageImpl& storage);

}  // namespace megatron_swap
