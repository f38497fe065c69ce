// The functions of the CUDA runtime that we call, found at run time: one build serves machines with and without CUDA.
#pragma once

#include <cstddef>
#include <string>

namespace megatron_swap {

struct CudaRuntime {
  int (*set_device)(int device) = nullptr;
  int (*memcpy_async)(void* target, const void* source, std::size_t num_bytes, int kind, void* stream) = nullptr;
  int (*stream_wait_event)(void* stream, void* event, unsigned flags) = nullptr;
  int (*stream_synchronize)(void* stream) = nullptr;
  int (*event_record)(void* event, void* stream) = nullptr;
  int (*event_query)(void* event) = nullptr;
  int (*event_synchronize)(void* event) = nullptr;
  int (*host_register)(void* address, std::size_t num_bytes, unsigned flags) = nullptr;
  int (*host_unregister)(void* address) = nullptr;
  int (*get_last_error)() = nullptr;
  const char* (*get_error_string)(int code) = nullptr;

  // Loads the library at `path` for good. Throws std::runtime_error if it cannot be loaded or lacks a function.
  static CudaRuntime from_library(const std::string& path);
  explicit operator bool() const { return memcpy_async != nullptr; }
};

}  // namespace megatron_swap
