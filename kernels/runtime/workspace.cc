#include "kernels/runtime/workspace.h"

#include "kernels/runtime/error.h"

namespace sluice::cuda {
namespace {

// Launch::bus_free_at lies after the counters.
constexpr std::size_t kCounterBytes =
    Launch::kCounters * sizeof(std::uint32_t) + sizeof(*Launch{}.bus_free_at);

}  // namespace

Workspace::Workspace(std::size_t scratch_bytes, cudaStream_t wrapped)
    : device_(current_limits()),
      own_(wrapped == nullptr ? make_stream() : StreamOwner()),
      stream_(wrapped == nullptr ? own_.get() : wrapped),
      scratch_bytes_(scratch_bytes) {
  if (scratch_bytes == 0) return;
  scratch_ = make_device_block(scratch_bytes);
  counters_ = make_device_block(kCounterBytes);
  require(cudaMemsetAsync(counters_.get(), 0, kCounterBytes, stream_), "memset");
  require(cudaStreamSynchronize(stream_), "a new workspace");
}

Launch Workspace::launch() const {
  auto* const counters = static_cast<std::uint32_t*>(counters_.get());
  Launch launch{stream_, &device_, counters, static_cast<std::byte*>(scratch_.get()),
                scratch_bytes_};
  if (counters != nullptr) {
    launch.bus_free_at = reinterpret_cast<unsigned long long*>(counters + Launch::kCounters);
  }
  return launch;
}

std::size_t Workspace::bytes(std::size_t scratch_bytes) {
  return scratch_bytes == 0 ? 0 : scratch_bytes + kCounterBytes;
}

}  // namespace sluice::cuda
