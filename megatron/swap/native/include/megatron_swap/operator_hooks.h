// What operator.h finds in a process with swapping: a table of functions. Plain C, so that both sides may be built apart.
#pragma once

namespace c10 {
struct StorageImpl;
}

extern "C" {

// What the native part of Megatron Swap offers under the name megatron_swap_operator_hooks.
struct MegatronSwapOperatorHooks {
  int version;  // 1
  void* (*begin)(const char* name);
  void (*tensor)(void* op, c10::StorageImpl* storage);  // throws std::runtime_error
  void (*end)(void* op);
};
}
