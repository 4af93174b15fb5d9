#include "offload/backends.h"

#include "cpu/cpu_backend.h"
#include "cpu/reference_backend.h"
#include "sluice/errors.h"

namespace sluice {

std::unique_ptr<Backend> make_backend(const BackendOptions& options) {
  const std::uint64_t device_cap = options.device_memory.value_or(MemoryAccount::kNoCap);
  const std::uint64_t host_cap = options.host_memory.value_or(MemoryAccount::kNoCap);
  if (options.device == "cpu") {
    return std::make_unique<cpu::CpuBackend>(cpu::CpuOptions{
        options.threads, options.compute, options.weight_dtype, device_cap, host_cap});
  }
  if (options.device == "reference") {
    return std::make_unique<cpu::ReferenceBackend>(device_cap, host_cap);
  }
  throw Error(ErrorCode::usage,
              "--device " + options.device + ": this build has the devices cpu and reference");
}

}  // namespace sluice
