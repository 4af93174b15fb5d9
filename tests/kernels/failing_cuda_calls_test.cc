// CUDA calls that fail, one at a time or all from one on: the call of Sluice that met it throws,
// other sessions go on, and everything can be ended. The linker leads the library's calls through
// the functions below (--wrap).
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "sluice/engine.h"
#include "tests/kernels/has_device.h"
#include "tests/support/fault_sweep.h"
#include "tests/support/model_sessions.h"
#include "tests/support/small_sessions.h"
#include "tests/support/test_disk.h"
#include "tests/support/work_under_faults.h"

namespace {

sluice::testing::FailingCall& cuda_call() {
  static sluice::testing::FailingCall call;
  return call;
}

// What the thread's next cudaGetLastError() returns after a call that was made to fail.
thread_local cudaError_t last_error = cudaSuccess;

// Calls `real`, or returns `status` instead.
template <typename... Parameters, typename... Arguments>
cudaError_t unless_failing(cudaError_t status, cudaError_t (*real)(Parameters...),
                           Arguments... arguments) {
  if (!cuda_call().fails()) return real(arguments...);
  return last_error = status;
}

constexpr cudaError_t kNoMemory = cudaErrorMemoryAllocation;
constexpr cudaError_t kBroken = cudaErrorInvalidResourceHandle;  // not sticky

}  // namespace

// NOLINTBEGIN(*-identifier*, readability-identifier-naming): names of the linker
extern "C" {

cudaError_t __real_cudaMalloc(void** data, std::size_t bytes);
cudaError_t __wrap_cudaMalloc(void** data, std::size_t bytes) {
  return unless_failing(kNoMemory, __real_cudaMalloc, data, bytes);
}
cudaError_t __real_cudaHostAlloc(void** data, std::size_t bytes, unsigned flags);
cudaError_t __wrap_cudaHostAlloc(void** data, std::size_t bytes, unsigned flags) {
  return unless_failing(kNoMemory, __real_cudaHostAlloc, data, bytes, flags);
}
cudaError_t __real_cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool,
                                           cudaStream_t stream);
cudaError_t __wrap_cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool,
                                           cudaStream_t stream) {
  return unless_failing(kNoMemory, __real_cudaMallocFromPoolAsync, data, bytes, pool, stream);
}
cudaError_t __real_cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props);
cudaError_t __wrap_cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props) {
  return unless_failing(kNoMemory, __real_cudaMemPoolCreate, pool, props);
}
cudaError_t __real_cudaHostRegister(void* data, std::size_t bytes, unsigned flags);
cudaError_t __wrap_cudaHostRegister(void* data, std::size_t bytes, unsigned flags) {
  return unless_failing(kNoMemory, __real_cudaHostRegister, data, bytes, flags);
}
cudaError_t __real_cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t __wrap_cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return unless_failing(kNoMemory, __real_cudaStreamCreateWithFlags, stream, flags);
}
cudaError_t __real_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return unless_failing(kNoMemory, __real_cudaEventCreateWithFlags, event, flags);
}
cudaError_t __real_cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long flags);  // NOLINT(*-int): CUDA's
cudaError_t __wrap_cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long flags) {  // NOLINT(*-int): CUDA's
  return unless_failing(kNoMemory, __real_cudaGraphInstantiate, exec, graph, flags);
}

cudaError_t __real_cudaSetDevice(int device);
cudaError_t __wrap_cudaSetDevice(int device) {
  return unless_failing(kBroken, __real_cudaSetDevice, device);
}
cudaError_t __real_cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream);
cudaError_t __wrap_cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  return unless_failing(kBroken, __real_cudaMemsetAsync, data, value, bytes, stream);
}
cudaError_t __real_cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t __wrap_cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t stream) {
  return unless_failing(kBroken, __real_cudaMemcpyAsync, to, from, bytes, kind, stream);
}
cudaError_t __real_cudaStreamSynchronize(cudaStream_t stream);
cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t stream) {
  return unless_failing(kBroken, __real_cudaStreamSynchronize, stream);
}
cudaError_t __real_cudaDeviceSynchronize();
cudaError_t __wrap_cudaDeviceSynchronize() {
  return unless_failing(kBroken, __real_cudaDeviceSynchronize);
}
cudaError_t __real_cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t __wrap_cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return unless_failing(kBroken, __real_cudaEventRecord, event, stream);
}
cudaError_t __real_cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t __wrap_cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return unless_failing(kBroken, __real_cudaStreamWaitEvent, stream, event, flags);
}
cudaError_t __real_cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t __wrap_cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return unless_failing(kBroken, __real_cudaStreamBeginCapture, stream, mode);
}
cudaError_t __real_cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count);
cudaError_t __wrap_cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                     std::size_t* count) {
  return unless_failing(kBroken, __real_cudaGraphGetNodes, graph, nodes, count);
}
cudaError_t __real_cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t __wrap_cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return unless_failing(kBroken, __real_cudaGraphLaunch, exec, stream);
}
cudaError_t __real_cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void* data);
cudaError_t __wrap_cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void* data) {
  return unless_failing(kBroken, __real_cudaLaunchHostFunc, stream, run, data);
}
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  return unless_failing(kBroken, __real_cudaLaunchKernelExC, config, kernel, arguments);
}
// Behind <<< >>>.
cudaError_t __real___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                      std::size_t shared, cudaStream_t stream);
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                      std::size_t shared, cudaStream_t stream) {
  return unless_failing(kBroken, __real___cudaLaunchKernel, kernel, grid, block, arguments, shared,
                        stream);
}
cudaError_t __real_cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t __wrap_cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute,
                                        int value) {
  return unless_failing(kBroken, __real_cudaFuncSetAttribute, kernel, attribute, value);
}

// A capture that does not end would take in all that follows.
cudaError_t __real_cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t __wrap_cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const cudaError_t status = __real_cudaStreamEndCapture(stream, graph);
  if (!cuda_call().fails()) return status;
  if (status == cudaSuccess) static_cast<void>(cudaGraphDestroy(*graph));
  *graph = nullptr;
  return last_error = kBroken;
}
cudaError_t __real_cudaGetLastError();
cudaError_t __wrap_cudaGetLastError() {
  const cudaError_t real = __real_cudaGetLastError();
  const cudaError_t ours = std::exchange(last_error, cudaSuccess);
  return ours != cudaSuccess ? ours : real;
}
cudaError_t __real_cudaPeekAtLastError();
cudaError_t __wrap_cudaPeekAtLastError() {
  return last_error != cudaSuccess ? last_error : __real_cudaPeekAtLastError();
}

}  // extern "C"
// NOLINTEND(*-identifier*, readability-identifier-naming)

namespace sluice {
namespace {

using testing::answers_of;
using testing::FaultSweep;
using testing::go_on;
using testing::goes_on_with;
using testing::Logits;
using testing::random_tokens;

FaultSweep sweep_of(std::uint64_t seed) {
  FaultSweep sweep;
  sweep.seed = testing::seed(seed);
  sweep.codes = {ErrorCode::memory, ErrorCode::internal};
  return sweep;
}

TEST(FailingCudaCalls, WhileAnEngineIsOpened) {
  if (!cuda::has_device()) GTEST_SKIP() << "no CUDA device";
  FaultSweep sweep = sweep_of(1);
  sweep.codes.insert(ErrorCode::unsupported);  // a device that cannot be asked
  sweep.run(cuda_call(), [] {
    Engine engine = Engine::open(testing::config_for("cuda"));
    Session session = engine.new_session(testing::options_for(engine, "values"));
    return go_on(session, random_tokens(140, 1));
  });
}

class OfPolicy : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!cuda::has_device()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(OfPolicy, InSessionsBesideAnother) {
  Engine engine = Engine::open(testing::config_for("cuda"));
  Session other = engine.new_session(
      testing::tightly(engine, testing::options_for(engine, GetParam(), 3), false));
  other.prefill(random_tokens(150, 2));
  const auto work = [&] { return answers_of(engine, other); };
  work();
  const MemoryUse before = engine.memory();
  FaultSweep sweep = sweep_of(2);
  sweep.check_others = goes_on_with(other);
  sweep.run(cuda_call(), work);
  EXPECT_EQ(engine.memory().device_bytes, before.device_bytes);
  EXPECT_EQ(engine.memory().host_bytes, before.host_bytes);
}

// All calls fail from one on, as on a device that is lost: what runs ends with an error, and ends.
TEST_P(OfPolicy, OnADeviceThatIsLost) {
  const auto work = [](std::optional<std::int64_t> fails_from) {
    cuda_call().choose_none();
    Engine engine = Engine::open(testing::config_for("cuda"));
    Session root = engine.new_session(
        testing::tightly(engine, testing::options_for(engine, GetParam(), 3), false));
    root.prefill(random_tokens(150, 2));
    cuda_call().choose_none();
    if (fails_from) cuda_call().choose_from(*fails_from);
    return answers_of(engine, root);
  };
  work({});  // loads kernels
  const Logits expected = work({});
  FaultSweep sweep = sweep_of(3);
  sweep.most = testing::fault_count(5);
  // Of the first half, because the last calls are those of destructors, which throw nothing.
  for (const std::int64_t call : sweep.chosen(cuda_call().calls() / 2)) {
    SCOPED_TRACE("from call " + std::to_string(call));
    try {
      work(call);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_TRUE(sweep.codes.contains(error.code())) << error.what();
    }
    EXPECT_EQ(work({}), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(FailingCudaCalls, OfPolicy,
                         ::testing::Values("dense", "values", "twilight", "sparq",
                                           "tidaldecode anchors=2", "compact prefill=pages(0.9)",
                                           "quest"));

using OnDisk = testing::OnDisk;

TEST_F(OnDisk, FailingCudaCallsOfSessions) {
  if (!cuda::has_device()) GTEST_SKIP() << "no CUDA device";
  EngineConfig config = testing::config_for("cuda");
  config.disk = DiskConfig{{parent_}, {}};
  Engine engine = Engine::open(config);
  Session other =
      engine.new_session(testing::tightly(engine, testing::options_for(engine, "values", 3), true));
  other.prefill(random_tokens(300, 2));
  FaultSweep sweep = sweep_of(4);
  sweep.check_others = goes_on_with(other);
  sweep.run(cuda_call(), [&] { return answers_of(engine, other); });
}

TEST(FailingCudaCalls, InABatcher) {
  if (!cuda::has_device()) GTEST_SKIP() << "no CUDA device";
  Engine engine = Engine::open(testing::config_for("cuda"));
  FaultSweep sweep = sweep_of(5);
  sweep.run(cuda_call(), [&] { return testing::batched_answers(engine); });
}

}  // namespace
}  // namespace sluice
