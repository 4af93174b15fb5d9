#include "offload/backends.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "cpu/cpu_backend.h"
#include "cpu/reference/backend.h"
#include "sluice/errors.h"
#include "sluice/topology.h"
#ifdef SLUICE_CUDA
#include "kernels/cuda_backend.h"
#elif defined(SLUICE_CUDA_MODULE)
#include <dlfcn.h>

#include "kernels/cuda_module.h"
#endif

namespace sluice {
namespace {

// 0 for "cuda", N for "cuda:N".
std::optional<int> cuda_ordinal(std::string_view device) {
  constexpr std::string_view kName = "cuda";
  if (!device.starts_with(kName)) return std::nullopt;
  device.remove_prefix(kName.size());
  if (device.empty()) return 0;
  int ordinal = -1;
  const char* const end = device.data() + device.size();
  const auto parsed = std::from_chars(device.data() + 1, end, ordinal);
  if (device.front() != ':' || parsed.ec != std::errc() || parsed.ptr != end || ordinal < 0) {
    return std::nullopt;
  }
  return ordinal;
}

#ifdef SLUICE_CUDA
using cuda::make_cuda_backend;
#elif defined(SLUICE_CUDA_MODULE)
// Loads the CUDA backend from a library beside this one, which stays loaded.
std::unique_ptr<Backend> make_cuda_backend(const cuda::CudaOptions& options) {
  const char* const why = "; install all of Sluice, or choose `device` cpu";
  void* const module = ::dlopen(SLUICE_CUDA_MODULE, RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) {
    throw Error(ErrorCode::unsupported,
                std::string("`device` cuda: the library of the CUDA backend cannot be loaded (") +
                    ::dlerror() + ")" + why);
  }
  const auto make =
      reinterpret_cast<cuda::MakeCudaBackend*>(::dlsym(module, cuda::kMakeCudaBackend));
  if (make == nullptr) {
    throw Error(ErrorCode::unsupported,
                "`device` cuda: " SLUICE_CUDA_MODULE " is of another build" + std::string(why));
  }
  std::unique_ptr<Backend> backend;
  make(options, backend);
  return backend;
}
#endif

}  // namespace

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
  if (const std::optional<int> ordinal = cuda_ordinal(options.device)) {
#if defined(SLUICE_CUDA) || defined(SLUICE_CUDA_MODULE)
    return make_cuda_backend(
        {*ordinal, options.compute, options.weight_dtype, options.device_memory, host_cap});
#else
    throw Error(ErrorCode::unsupported,
                "`device` " + options.device +
                    ": this build has no CUDA backend; build where nvcc is, with SLUICE_CUDA=ON");
#endif
  }
  throw Error(ErrorCode::usage, "`device` " + options.device +
                                    ": there are the devices cpu, cuda, cuda:N and reference");
}

DeviceTopology detect_device(const std::string& device) {
  BackendOptions options;
  options.device = device;
  const std::unique_ptr<Backend> backend = make_backend(options);
  const BackendInfo& info = backend->info();
  if (info.compute_tier == Tier::host) {
    throw Error(ErrorCode::usage, "`device` " + device + " has no memory of its own");
  }
  return {info.name,        info.description, info.memory_bytes, info.memory_rate,
          info.link.copied, info.link.read,   info.cached_bytes};
}

std::unique_ptr<Backend> make_attending_cpu(int threads) {
  cpu::CpuOptions options;
  options.threads = threads > 0 ? threads : std::max(1, detect_topology().threads - 1);
  return std::make_unique<cpu::CpuBackend>(options);
}

}  // namespace sluice
