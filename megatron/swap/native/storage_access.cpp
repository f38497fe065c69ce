#include "storage_access.h"

#include <c10/core/StorageImpl.h>

#include <utility>

namespace megatron_swap {
namespace {

// torch can set this flag of StorageImpl (for its own fake tensors) but has no way to clear it. An explicit template
// instantiation may name private members ([temp.spec.general]), so it can provide a pointer to the flag. If a later
// torch renames the flag, this does not compile, and build.py falls back to Python.
bool c10::StorageImpl::* throws_flag();

template <bool c10::StorageImpl::* flag>
struct Reach {
  friend bool c10::StorageImpl::* throws_flag() { return flag; }
};

template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void refuse(c10::StorageImpl& storage, std::string message) {
  // Despite its name it does not release the data.
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void allow(c10::StorageImpl& storage) {
  if (!(storage.*throws_flag())) return;
  storage.*throws_flag() = false;
  storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
  // Writes check one flag that combines several. Setting the pointer to itself recomputes it.
  c10::DataPtr data = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(std::move(data));
}

bool refuses(const c10::StorageImpl& storage) { return storage.*throws_flag(); }

}  // namespace megatron_swap
