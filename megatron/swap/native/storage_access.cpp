#include "storage_access.h"

#include <c10/core/StorageImpl.h>

#include <utility>

namespace megatron_swap {
namespace {

// torch can set StorageImpl's flag (for its own fake tensors) and never clears it: no method, no friend. An explicit
// template instantiation may name private members ([temp.spec.general]), so it can hand on a pointer to this one; where
// a later torch names it otherwise, this does not compile, and build.py falls back.
bool c10::StorageImpl::* throws_flag();

template <bool c10::StorageImpl::* flag>
struct Reach {
  friend bool c10::StorageImpl::* throws_flag() { return flag; }
};

template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void refuse(c10::StorageImpl& storage, std::string message) {
  // Despite its name it leaves the data as they are.
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void allow(c10::StorageImpl& storage) {
  if (!(storage.*throws_flag())) return;
  storage.*throws_flag() = false;
  storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
  // Writers look at one flag that sums up several. Setting the pointer, to what it is, sums them up again.
  c10::DataPtr data = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(std::move(data));
}

bool refuses(const c10::StorageImpl& storage) { return storage.*throws_flag(); }

}  // namespace megatron_swap
