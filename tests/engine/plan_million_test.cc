// Plans of a million tokens take what is allocated for them: everything but rows in host memory,
// which grow, is there before the first step. Memory is address space that nobody touches.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/decoder.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "sluice/errors.h"
#include "tests/support/far_backend.h"

namespace sluice {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// As a GPU's.
constexpr LogitFormat kLogits = {DType::f16, false, 65536, 20, 24, 8192, 65536};

class UntouchedBackend : public testing::FarBackend {
 public:
  UntouchedBackend(std::uint64_t device_cap, std::uint64_t host_cap)
      : FarBackend({1, DType::f32, DType::bf16, device_cap, host_cap}, kLogits) {}

 private:
  std::byte* take(Tier /*tier*/, std::size_t bytes) override {
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(data);
  }
  void give_back(Tier /*tier*/, std::byte* data, std::size_t bytes) noexcept override {
    ::munmap(data, bytes);
  }
};

ModelConfig llama_8b() {
  ModelConfig c;
  c.hidden_size = 4096;
  c.intermediate_size = 14336;
  c.num_hidden_layers = 32;
  c.num_attention_heads = 32;
  c.num_key_value_heads = 8;
  c.head_dim = 128;
  c.vocab_size = 128256;
  return c;
}

ModelConfig sluice_22m() {
  ModelConfig c;
  c.hidden_size = 384;
  c.intermediate_size = 1024;
  c.num_hidden_layers = 12;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 2;
  c.head_dim = 64;
  c.vocab_size = 4096;
  return c;
}

KvShape shape_of(const ModelConfig& c) {
  return {c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
          DType::bf16};
}

KvRequest request_for(const ModelConfig& config, const Policy& policy, std::int64_t sequences) {
  KvRequest request;
  request.shape = shape_of(config);
  request.context = 1046600;
  request.sequences = sequences;
  request.tokens = request.context + 20000 * (sequences - 1);
  request.policies = {&policy, 1};
  request.on.logits = kLogits;
  request.has_value_basis = true;
  return request;
}

// The memory of a pool at exactly the caps of its plan.
void expect_allocated(const KvPlan& plan, const Policy& policy) {
  const std::uint64_t scratch = testing::FarBackend::kScratchBytes;
  UntouchedBackend backend(plan.device_bytes + scratch, plan.host_bytes);
  const std::shared_ptr<Queue> queue = backend.make_queue();
  const float unread = 0.0f;
  KvPool pool(queue, plan, {&policy, 1}, own_scorers(), {}, {}, {&unread, 0});
  pool.open();
  EXPECT_EQ(backend.account(Tier::device).peak(), plan.device_bytes + scratch);
  const auto regions =
      static_cast<std::uint64_t>(std::int64_t{plan.shape.layers} * plan.shape.kv_heads);
  EXPECT_EQ(backend.account(Tier::host).peak() +
                regions * host_region_bytes(plan.shape, plan.host_rows()),
            plan.host_bytes);
}

class MillionTokens : public ::testing::TestWithParam<std::pair<const char*, ModelConfig>> {};

// Under a cap, or refused.
void expect_held(KvRequest request, std::uint64_t cap) {
  request.device_cap = cap;
  std::optional<KvPlan> plan;
  try {
    plan = plan_kv(request);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory) << error.what();
  }
  if (!plan) return;
  EXPECT_LE(plan->device_bytes, cap);
  expect_allocated(*plan, request.policies.front());
}

TEST_P(MillionTokens, TakeWhatIsPlanned) {
  const ModelConfig& config = GetParam().second;
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const Policy policy = parse_policy(preset.name);
    for (const std::uint64_t cap : {1 * kGiB, 4 * kGiB, 24 * kGiB}) {
      expect_held(request_for(config, policy, 1), cap);
    }
    expect_allocated(plan_kv(request_for(config, policy, 4)), policy);
  }
}

TEST_P(MillionTokens, TakeWhatIsPlannedForSparsePrompts) {
  for (const char* const line :
       {"sluice prefill=zipvl(0.9)", "sparq prefill=zipvl(0.9,evict)",
        "select=dense prefill=zipvl(0.9,evict)", "quantized prefill=zipvl(0.9)"}) {
    SCOPED_TRACE(line);
    const Policy policy = parse_policy(line);
    for (const std::uint64_t cap : {4 * kGiB, 24 * kGiB}) {
      expect_held(request_for(GetParam().second, policy, 1), cap);
    }
    expect_allocated(plan_kv(request_for(GetParam().second, policy, 2)), policy);
  }
}

TEST_P(MillionTokens, LeaveActivationsWhatIsPlanned) {
  const ModelConfig& config = GetParam().second;
  for (const std::int64_t chunk : {16, 512, 8192}) {
    UntouchedBackend backend(MemoryAccount::kNoCap, MemoryAccount::kNoCap);
    const std::uint64_t before = backend.account(Tier::device).used();
    const std::unique_ptr<Queue> queue = backend.make_queue();
    Decoder decoder(config, {}, *queue);
    decoder.allocate(chunk);
    EXPECT_EQ(backend.account(Tier::device).used() - before,
              Decoder::activation_bytes(config, backend, chunk));
    EXPECT_EQ(backend.account(Tier::host).used(), Decoder::host_bytes(config, backend, chunk));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, MillionTokens,
                         ::testing::Values(std::pair("sluice_22m", sluice_22m()),
                                           std::pair("llama_8b", llama_8b())),
                         [](const auto& parameter) { return parameter.param.first; });

}  // namespace
}  // namespace sluice
