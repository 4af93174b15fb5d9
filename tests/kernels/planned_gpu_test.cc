// A plan made without a GPU is the plan that the GPU makes: the same bytes, policy by policy.
#include "offload/plan/planned_gpu.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "engine/engine_impl.h"
#include "offload/backends.h"
#include "sluice/errors.h"
#include "sluice/scorer.h"
#include "tests/kernels/has_device.h"

namespace sluice {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// The plan of an engine, or why there is none.
nlohmann::json comparable(const Engine& engine, const SessionOptions& options) {
  try {
    nlohmann::json json = nlohmann::json::parse(engine.plan(options).to_json());
    json.erase("program_bytes");
    json.erase("process_bytes");
    return json;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::memory) throw;
    return error.what();
  }
}

EngineConfig config_of(std::optional<WeightFormat> weights) {
  EngineConfig config;
  config.model = SLUICE_SOURCE_DIR "/models/sluice-22m";
  config.device = "cuda";
  config.threads = 2;
  config.device_memory = kGiB;
  config.weights = weights;
  return config;
}

// As advise() plans for the GPU of this machine.
Engine planned(const EngineConfig& config) {
  return Engine::Impl::open_to_plan(
      config, Checkpoint::open(config.model),
      [&](DType dtype) {
        PlannedGpu gpu = planned_like(*make_backend(backend_options(config, dtype)));
        gpu.host_cap = config.host_memory;
        gpu.weight_dtype = dtype;
        return make_planned_gpu(gpu);
      },
      false);
}

TEST(PlannedGpu, TakesWhatTheGpuTakes) {
  if (!cuda::has_device()) GTEST_SKIP() << "no GPU";
  for (const auto weights :
       {std::optional<WeightFormat>(), std::optional<WeightFormat>(WeightCode::int8),
        std::optional<WeightFormat>(WeightCode::int4)}) {
    const EngineConfig config = config_of(weights);
    const Engine engine = Engine::open(config);
    const Engine planned_engine = planned(config);
    for (const Preset& preset : presets()) {
      const Policy policy = parse_policy(preset.name);
      if (!own_scorers().at(policy.select).runs_on(Processor::cuda)) continue;
      for (const std::int64_t context : {5000, 300000, 1000000}) {
        SCOPED_TRACE(std::string(preset.name) + ", " + std::to_string(context));
        const SessionOptions options = {context, {policy}, 1};
        EXPECT_EQ(comparable(engine, options), comparable(planned_engine, options));
      }
    }
  }
}

}  // namespace
}  // namespace sluice
