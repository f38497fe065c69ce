// What C++ operators declare through include/megatron_swap/operator.h: which storages they use, from begin to end.
#pragma once

#include <c10/core/StorageImpl.h>

#include <functional>

namespace megatron_swap {

// Called with a storage that an operator is about to use and that refuses access; brings it back, or throws.
using BringBack = void (*)(c10::StorageImpl& storage);

void set_bring_back(BringBack bring_back);

// Whether an operator that has not ended uses `storage`.
bool in_use(const c10::StorageImpl& storage);

}  // namespace megatron_swap
