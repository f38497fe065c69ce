// Storages of torch that refuse access while their bytes are elsewhere.
#pragma once

#include <string>

namespace c10 {
struct StorageImpl;
}

namespace megatron_swap {

// Lets every access to the data pointer, to read or to write, raise a RuntimeError with this message.
void refuse(c10::StorageImpl& storage, std::string message);

// Undoes `refuse`. Does nothing to a storage that allows access.
void allow(c10::StorageImpl& storage);

// Whether it refuses access now.
bool refuses(const c10::StorageImpl& storage);

}  // namespace megatron_swap
