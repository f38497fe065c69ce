// The table of functions that operator.h finds in a process with swapping. Plain C, so that the sides build separately.
#pragma once

namespace c10 {
struct StorageImpl;
}

extern "C" {

// The native part of Megatron Swap exports one as megatron_swap_operator_hooks.
struct MegatronSwapOperatorHooks {
  int version;  // 1
  void* (*begin)(const char* name);
  void (*tensor)(void* op, c10::StorageImpl* storage);  // throws std::runtime_error
  void (*end)(void* op);
};
}
