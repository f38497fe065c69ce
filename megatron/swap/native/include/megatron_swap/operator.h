// For C++ operators that PyTorch's dispatcher does not see: those called through pybind, or with tensors of their own.
//
//   #include <megatron_swap/operator.h>
//
//   at::Tensor my_operator(const at::Tensor& x, const at::Tensor& weight) {
//     megatron_swap::Operator op("my_operator");   // begin
//     op.tensor(x);                                 // reloads x if it is offloaded; on the device from here on
//     op.tensor(weight);
//     ... launch the kernel on the current stream ...
//   }                                               // end: x and weight may be offloaded again
//
// Nothing has to be linked. Without swapping it costs the look-up of a symbol. The folder of this header is
// megatron.swap.native.build.include_folder().
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include "operator_hooks.h"

namespace megatron_swap {

class Operator {
 public:
  explicit Operator(const char* name) : name_(name), hooks_(find_hooks()) {
    if (hooks_ != nullptr) op_ = hooks_->begin(name);
  }
  ~Operator() {
    if (hooks_ != nullptr) hooks_->end(op_);
  }
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  // The operator reads or writes `tensor`, on the current stream, from here to its end.
  void tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
    if (hooks_ != nullptr) hooks_->tensor(op_, tensor.storage().unsafeGetStorageImpl());
    TORCH_CHECK(tensor.storage().nbytes() != 0, name_, ": a tensor of shape ", tensor.sizes(),
                " has no memory: it is offloaded, and without the native part of Megatron Swap it cannot be "
                "reloaded here. Call resident(tensor) in Python first.");
  }

 private:
  // Looked up each time: swapping may begin after this library was loaded.
  static const MegatronSwapOperatorHooks* find_hooks() {
    auto* hooks = static_cast<const MegatronSwapOperatorHooks*>(dlsym(RTLD_DEFAULT, "megatron_swap_operator_hooks"));
    return hooks != nullptr && hooks->version == 1 ? hooks : nullptr;
  }

  const char* name_;
  const MegatronSwapOperatorHooks* hooks_;
  void* op_ = nullptr;
};

}  // namespace megatron_swap
