// Pins and unpins memory with a CUDA that refuses both, and prints the error that the thread's next launch would report.
#include <cstdio>
#include <stdexcept>

#include "machines.h"

using megatron_swap::CudaRuntime;

namespace {

thread_local int last_error = 0;  // as CUDA keeps it

const char* message(int) { return "refused"; }

void print_next_launch(const char* behind) { std::printf("launch behind %s: %d\n", behind, std::exchange(last_error, 0)); }

}  // namespace

int main() {
  CudaRuntime cuda;
  cuda.host_register = [](void*, std::size_t, unsigned) { return last_error = 2; };
  cuda.host_unregister = [](void*) { return last_error = 713; };
  cuda.get_last_error = [] { return std::exchange(last_error, 0); };
  cuda.get_error_string = message;
  const auto machine = megatron_swap::cuda_machine(cuda, nullptr, nullptr);
  char memory[64];
  try {
    machine->pin({memory, sizeof memory});
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
  }
  print_next_launch("pin");
  machine->unpin({memory, sizeof memory});
  print_next_launch("unpin");
}
