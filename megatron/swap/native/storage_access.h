// Storages of torch that refuse access while their bytes are elsewhere.
#pragma once

#include <string>

namespace c10 {
struct StorageImpl;
}

namespace megatron_swap {

// From now on whoever asks for the data pointer, to read or to write, gets a RuntimeError with this message.
void refuse(c10::StorageImpl& storage, std::string message);

// Access is as it was before; a storage that refuses nothing is left as it is.
void allow(c10::StorageImpl& storage);

// Whether it refuses access now.
bool refuses(const c10::StorageImpl& storage);

}  // namespace megatron_swap
