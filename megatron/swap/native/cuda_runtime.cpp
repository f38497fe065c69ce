#include "cuda_runtime.h"

#include <dlfcn.h>

#include <stdexcept>

namespace megatron_swap {
namespace {

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(dlerror());
}

}  // namespace

CudaRuntime CudaRuntime::from_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: CUDA's own threads run in it
  if (library == nullptr) throw std::runtime_error(dlerror());
  CudaRuntime cuda;
  find(library, "cudaSetDevice", cuda.set_device);
  find(library, "cudaMemcpyAsync", cuda.memcpy_async);
  find(library, "cudaStreamWaitEvent", cuda.stream_wait_event);
  find(library, "cudaStreamSynchronize", cuda.stream_synchronize);
  find(library, "cudaEventRecord", cuda.event_record);
  find(library, "cudaEventQuery", cuda.event_query);
  find(library, "cudaEventSynchronize", cuda.event_synchronize);
  find(library, "cudaHostRegister", cuda.host_register);
  find(library, "cudaHostUnregister", cuda.host_unregister);
  find(library, "cudaGetLastError", cuda.get_last_error);
  find(library, "cudaGetErrorString", cuda.get_error_string);
  return cuda;
}

}  // namespace megatron_swap
