// Plans for a context under caps: their bytes are those of the engine that runs them, they fit, and
// what is refused is named with what fits. Files of plans are read back or refused by field.
#include "sluice/planning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_impl.h"
#include "engine/planning/losses.h"
#include "engine/shape_source.h"
#include "offload/backends.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::expect_error;
using Json = nlohmann::json;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
const std::filesystem::path kModel = SLUICE_SOURCE_DIR "/models/sluice-22m";

// Without what the process itself takes, which grows while tests run.
Json comparable(const Plan& plan) {
  Json json = Json::parse(plan.to_json());
  json.erase("program_bytes");
  json.erase("process_bytes");
  return json;
}

PlanWish bundled(std::int64_t context) {
  PlanWish wish;
  wish.model = kModel;
  wish.context = context;
  wish.threads = 1;
  return wish;
}

PlanWish on_machine(const char* shape, const char* machine, std::int64_t context) {
  PlanWish wish;
  wish.shape = shape;
  wish.machine = find_machine(machine);
  wish.context = context;
  return wish;
}

// The plan of an engine that runs by the settings.
Plan engine_plan(const PlanSettings& settings) {
  EngineConfig config;
  config.model = kModel;
  config.threads = 1;
  use_plan(settings, config);
  const Engine engine = Engine::open(config);
  require_model(settings, engine.info());
  return engine.plan(SessionOptions{settings.context, {engine.policy(settings.policy)}, 1});
}

TEST(Planning, TakesWhatTheEngineTakes) {
  const testing::TempDir disk;
  for (const char* const policy :
       {"", "dense", "streaming", "sparq", "twilight", "quantized", "values prefill=pages(0.9)",
        "zipvl", "values bits=2 0:bits=4 dense=1"}) {
    for (const auto device : {std::optional<std::uint64_t>(), std::optional(96 * kMiB)}) {
      for (const bool on_disk : {false, true}) {
        PlanWish wish = bundled(24576);
        wish.policy = policy;
        wish.device_memory = device;
        if (on_disk) {
          wish.host_memory = 220 * kMiB;
          wish.disk = DiskConfig{{disk.path()}, kGiB};
        }
        SCOPED_TRACE(std::string(policy) + (device ? ", capped" : "") + (on_disk ? ", disk" : ""));
        std::optional<AdvisedPlan> plan;
        try {
          plan = advise_quickly(wish);
        } catch (const Error& error) {
          // Some policies cannot leave their rows on a disk; those without one always fit.
          EXPECT_TRUE(on_disk) << error.what();
          continue;
        }
        EXPECT_EQ(comparable(plan->plan), comparable(engine_plan(plan->settings)));
      }
    }
  }
}

TEST(Planning, AShapeTakesWhatItsCheckpointTakes) {
  const Checkpoint checkpoint = Checkpoint::open(kModel);
  const auto open = [&](Checkpoint of) {
    EngineConfig config;
    config.model = kModel;
    config.threads = 1;
    config.device_memory = 64 * kMiB;
    return Engine::Impl::open_to_plan(
        config, std::move(of),
        [&](DType dtype) { return make_backend(backend_options(config, dtype)); }, false);
  };
  const Engine real = open(Checkpoint::open(kModel));
  const Engine shape = open(Checkpoint::open(*make_shape_source(checkpoint.config())));
  EXPECT_EQ(real.info().parameters, shape.info().parameters);
  EXPECT_EQ(shape_of(real.info()), shape_of(shape.info()));
  for (const Preset& preset : presets()) {
    const SessionOptions options = {20000, {parse_policy(preset.name)}, 1};
    EXPECT_EQ(comparable(real.plan(options)), comparable(shape.plan(options))) << preset.name;
  }
}

// Caps and contexts at random: what is advised fits, what is refused names a context that fits.
TEST(Planning, FitsOrNamesWhatFits) {
  const std::uint64_t seed = testing::seed(43);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  const std::vector<std::string> shapes = shape_names();
  int refused = 0;
  for (int i = 0; i < 12; ++i) {
    const auto shape = static_cast<std::size_t>(random.integer(0, std::ssize(shapes) - 1));
    PlanWish wish = on_machine(shapes[shape].c_str(), "rtx5090", random.integer(1, 1 << 21));
    wish.device_memory = static_cast<std::uint64_t>(random.integer(2, 32)) * kGiB;
    wish.host_memory = static_cast<std::uint64_t>(random.integer(1, 200)) * kGiB;
    SCOPED_TRACE(wish.shape + ", " + std::to_string(wish.context));
    try {
      const AdvisedPlan plan = advise_quickly(wish);
      EXPECT_LE(plan.plan.device_bytes(), *wish.device_memory);
      EXPECT_LE(plan.plan.host_bytes(), *wish.host_memory);
      EXPECT_GE(plan.plan.kv.context, wish.context);
      EXPECT_LE(plan.losses.sum() - plan.losses.weights, PlanWish::kUsualLoss);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::memory);
      ++refused;
      const std::string message = error.what();
      const std::string before = "a `context` of ";
      const std::size_t at = message.find(before);
      if (at == std::string::npos) continue;
      wish.context = std::stoll(message.substr(at + before.size()));
      EXPECT_NO_THROW(advise_quickly(wish)) << message;
      wish.context += 1024;
      EXPECT_THROW(advise_quickly(wish), Error) << message;
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_LT(refused, 12);
}

TEST(Planning, LosesNoMoreThanIsAllowed) {
  PlanWish wish = on_machine("llama3-8b", "rtx4090", 1000000);
  EXPECT_EQ(advise_quickly(wish).settings.weights, WeightFormat(WeightCode::int8));
  wish.device_memory = 16 * kGiB;
  EXPECT_EQ(advise_quickly(wish).settings.weights, WeightFormat(WeightCode::int4));
  wish.loss = 0.01;  // which 4-bit weights exceed
  expect_error(ErrorCode::memory, "a `loss` of 0.0", [&] { advise_quickly(wish); });
  wish.weights = WeightCode::int4;  // accepted, because it is asked for
  EXPECT_NO_THROW(advise_quickly(wish));
  wish.weights.reset();
  wish.loss = 0.1;
  EXPECT_LE(advise_quickly(wish).losses.sum(), 0.1);
  wish.loss = 0.0;
  expect_error(ErrorCode::memory, "loses more than a `loss` of 0", [&] { advise_quickly(wish); });
}

TEST(Planning, PrefersHostMemoryToADisk) {
  PlanWish wish = on_machine("qwen3-4b", "rtx4090", 131072);
  wish.disk = DiskConfig{{"/nvme"}, 200 * kGiB};
  wish.host_memory = 20 * kGiB;
  const AdvisedPlan in_memory = advise_quickly(wish);
  EXPECT_FALSE(in_memory.plan.kv.on_disk);
  EXPECT_TRUE(in_memory.settings.disk.has_value()) << "sessions of a server may need it";
  // The device and 8 GiB of host memory hold all rows between them, so none is read from the disk.
  wish.host_memory = 8 * kGiB;
  EXPECT_TRUE(advise_quickly(wish).plan.kv.on_disk);
  wish.host_memory = kGiB;
  const AdvisedPlan plan = advise_quickly(wish);
  EXPECT_TRUE(plan.plan.kv.on_disk);
  EXPECT_TRUE(plan.settings.disk.has_value());
  EXPECT_GT(plan.bytes.disk, 0u);
  wish.disk->bytes = kGiB;
  expect_error(ErrorCode::memory, "do not fit", [&] { advise_quickly(wish); });
}

// On a CPU, whose rows take 512 MiB in int8 and 384 with values in 4 bits, which lose more than is
// usual.
TEST(Planning, PutsValuesIn4BitsWhereInt8FitsNowhere) {
  const testing::TempDir directory;
  std::ofstream(directory.path() / "config.json")
      << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
             "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1000,
             "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
             "torch_dtype": "bfloat16"})";
  PlanWish wish;
  wish.shape = (directory.path() / "config.json").string();
  wish.device = "cpu";
  wish.threads = 1;
  wish.context = 65536;
  wish.host_memory = 800 * kMiB;
  EXPECT_EQ(advise_quickly(wish).settings.rows, RowFormat(RowCode::int8));
  wish.host_memory = 570 * kMiB;
  expect_error(ErrorCode::memory, ", rows in k8v4", [&] { advise_quickly(wish); });
  wish.loss = 0.01;
  const AdvisedPlan small = advise_quickly(wish);
  EXPECT_EQ(small.settings.rows, RowFormat(RowCode::k8v4));
  EXPECT_LE(small.plan.host_bytes(), *wish.host_memory);
  EXPECT_GT(small.losses.rows, 0.005);
  EXPECT_LE(small.losses.rows + small.losses.policy.value() + small.losses.prefill, *wish.loss);
  const auto disk = testing::disk_directory();
  if (!disk) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
  wish.disk = DiskConfig{{*disk}, 600 * kMiB};
  const AdvisedPlan on_disk = advise_quickly(wish);
  EXPECT_EQ(on_disk.settings.rows, RowFormat(RowCode::int8));
  EXPECT_TRUE(on_disk.plan.kv.on_disk);
  wish.host_memory = 300 * kMiB;
  wish.disk->bytes = 450 * kMiB;
  const AdvisedPlan both = advise_quickly(wish);
  EXPECT_EQ(both.settings.rows, RowFormat(RowCode::k8v4));
  EXPECT_TRUE(both.plan.kv.on_disk);
}

// Rows are whole cache lines: with a head_dim of 64 those of k8v4 are no smaller.
TEST(Planning, TakesNoRowsThatLoseMoreAndSaveNothing) {
  PlanWish wish = on_machine("llama3.2-1b", "rtx4090", 131072);
  wish.loss = 0.01;
  wish.host_memory = kGiB;
  try {
    EXPECT_NE(advise_quickly(wish).settings.rows, RowFormat(RowCode::k8v4));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
  }
}

TEST(Planning, SaysWhatAGiBGives) {
  PlanWish wish = on_machine("llama3-8b", "rtx4090", 131072);
  wish.device_memory = 23 * kGiB;
  wish.host_memory = 24 * kGiB;
  const AdvisedPlan plan = advise(wish);
  ASSERT_EQ(plan.gains.size(), 2u);
  EXPECT_GE(plan.longest, wish.context);
  for (const Gain& gain : plan.gains) {
    PlanWish raised = wish;
    auto& cap = gain.tier == Tier::device ? raised.device_memory : raised.host_memory;
    *cap += kGiB;
    raised.context = gain.context;
    EXPECT_NO_THROW(advise_quickly(raised));
    raised.context += 1024;
    EXPECT_THROW(advise_quickly(raised), Error);
  }
  // 24 GiB hold the rows of 196,608 tokens, which the device could serve twice over.
  EXPECT_EQ(plan.gains[0].context, plan.longest);
  EXPECT_GT(plan.gains[1].context, plan.longest);
}

TEST(Planning, FastestIsNoSlower) {
  PlanWish wish = on_machine("llama3-8b", "rtx4090", 131072);
  const double usual = advise_quickly(wish).times->step;
  wish.fastest = true;
  EXPECT_LT(advise_quickly(wish).times->step, usual);  // 15 GiB of weights can be 4
  wish.machine.reset();
  expect_error(ErrorCode::usage, "`machine`", [&] { advise_quickly(wish); });
}

TEST(Planning, RefusesWishesThatMakeNoSense) {
  const auto refuse = [](const char* mention, const std::function<void(PlanWish&)>& spoil) {
    PlanWish wish = on_machine("llama3-8b", "rtx4090", 4096);
    spoil(wish);
    expect_error(ErrorCode::usage, mention, [&] { advise_quickly(wish); });
  };
  refuse("`model`", [](PlanWish& w) { w.shape.clear(); });
  refuse("`model`", [](PlanWish& w) { w.model = kModel; });
  refuse("'gpt-5'", [](PlanWish& w) { w.shape = "gpt-5"; });
  refuse("`context`", [](PlanWish& w) { w.context = 0; });
  refuse("`context`", [](PlanWish& w) { w.context = std::int64_t{1} << 31; });
  refuse("`loss`", [](PlanWish& w) { w.loss = -1.0; });
  refuse("`loss`", [](PlanWish& w) { w.loss = std::nan(""); });
  refuse("more than rtx4090 has", [](PlanWish& w) { w.device_memory = 25 * kGiB; });
  refuse("`disk`", [](PlanWish& w) { w.disk = DiskConfig{}; });
  refuse("policy", [](PlanWish& w) { w.policy = "nonsense"; });
  refuse("`chunk`", [](PlanWish& w) { w.chunk = -1; });
  expect_error(ErrorCode::usage, "'rtx1'", [] { find_machine("rtx1"); });
}

TEST(Planning, RefusesADirectoryThatIsNotThere) {
  PlanWish wish = bundled(24576);
  wish.device_memory = 96 * kMiB;
  wish.host_memory = 120 * kMiB;
  wish.disk = DiskConfig{{"/not/there"}, kGiB};
  expect_error(ErrorCode::not_found, "/not/there", [&] { advise_quickly(wish); });
}

TEST(Tables, CanBeRead) {
  for (const std::string& name : machine_names()) EXPECT_EQ(find_machine(name).name, name);
  for (const std::string& name : shape_names()) {
    EXPECT_NO_THROW(advise_quickly(on_machine(name.c_str(), "h200", 1024))) << name;
  }
  for (const bool on_gpu : {false, true}) {
    for (const planning::PolicyLoss& row : planning::preferred_policies(on_gpu)) {
      EXPECT_EQ(planning::policy_loss(parse_policy(row.policy)), row.kl) << row.policy;
    }
  }
  EXPECT_EQ(planning::policy_loss(parse_policy("streaming")), std::nullopt);
  EXPECT_EQ(planning::policy_loss(Policy()), 0.0);
}

class PlanFiles : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& text) const {
    const std::filesystem::path file = directory_.path() / "plan.json";
    std::ofstream(file) << text;
    return file;
  }
  Json good() const {
    PlanWish wish = bundled(24576);
    wish.device_memory = 96 * kMiB;
    wish.host_memory = 120 * kMiB;
    wish.disk = DiskConfig{{directory_.path()}, kGiB};
    return Json::parse(to_json(advise_quickly(wish)));
  }
  testing::TempDir directory_;
};

TEST_F(PlanFiles, AreReadAsTheyWereWritten) {
  PlanWish wish = on_machine("llama3-8b", "rtx4090", 1 << 20);
  wish.host_memory = 40 * kGiB;
  wish.disk = DiskConfig{{"/a", "/b"}, 400 * kGiB};
  const AdvisedPlan plan = advise_quickly(wish);
  const PlanSettings read = read_plan(write(to_json(plan)));
  const PlanSettings& made = plan.settings;
  EXPECT_EQ(read.model, made.model);
  EXPECT_EQ(read.on_gpu, made.on_gpu);
  EXPECT_EQ(read.context, made.context);
  EXPECT_EQ(read.chunk, made.chunk);
  EXPECT_EQ(read.weights, made.weights);
  EXPECT_EQ(read.rows, made.rows);
  EXPECT_EQ(parse_policy(read.policy), parse_policy(made.policy));
  EXPECT_EQ(read.device_memory, made.device_memory);
  EXPECT_EQ(read.host_memory, made.host_memory);
  ASSERT_TRUE(read.disk.has_value());
  EXPECT_EQ(read.disk->directories, made.disk->directories);
  EXPECT_EQ(read.disk->bytes, made.disk->bytes);
}

TEST_F(PlanFiles, AreRefusedByField) {
  const Json plan = good();
  const auto refuse = [&](const char* field, const std::function<void(Json&)>& spoil) {
    Json bad = plan;
    spoil(bad);
    expect_error(ErrorCode::corrupt, field, [&] { read_plan(write(bad.dump())); });
  };
  for (const char* const field :
       {"sluice_plan", "model", "device", "context", "chunk", "weights", "kv_dtype", "policy"}) {
    refuse(field, [&](Json& j) { j.erase(field); });
    refuse(field, [&](Json& j) { j[field] = Json::array(); });
    refuse(field, [&](Json& j) { j[field] = -1; });
    refuse(field, [&](Json& j) { j[field] = "nonsense"; });
  }
  for (const auto& [field, value] : plan["model"].items()) {
    refuse(field.c_str(), [&](Json& j) { j["model"].erase(field); });
    refuse(field.c_str(), [&](Json& j) { j["model"][field] = Json::object(); });
  }
  refuse("device_memory", [](Json& j) { j["device_memory"] = 0; });
  refuse("host_memory", [](Json& j) { j["host_memory"] = 1.5; });
  refuse("directories", [](Json& j) { j["disk"]["directories"] = Json::array(); });
  refuse("directories", [](Json& j) { j["disk"]["directories"] = {""}; });
  refuse("bytes", [](Json& j) { j["disk"]["bytes"] = "much"; });
  refuse("colour", [](Json& j) { j["colour"] = 1; });
  refuse("colour", [](Json& j) { j["model"]["colour"] = 1; });
  refuse("policy", [](Json& j) { j["policy"] = "select=int4 prune=top_k(0)"; });
  expect_error(ErrorCode::corrupt, "plan.json", [&] { read_plan(write("{")); });
  expect_error(ErrorCode::not_found, "gone", [] { read_plan("gone"); });
}

TEST_F(PlanFiles, AreForModelsOfTheirShape) {
  PlanSettings settings = read_plan(write(good().dump()));
  EngineConfig config;
  config.model = kModel;
  const Engine engine = Engine::open(config);
  EXPECT_NO_THROW(require_model(settings, engine.info()));
  settings.model.kv_heads = 8;
  expect_error(ErrorCode::usage, "another model", [&] { require_model(settings, engine.info()); });
}

TEST_F(PlanFiles, OfMachinesAreRefusedByField) {
  const Json machine = {{"device_memory", 8000000000},
                        {"memory_rate", 3e11},
                        {"bus_rate", 1e10},
                        {"copy_rate", 1e10},
                        {"flops", 3e13},
                        {"multiprocessors", 30},
                        {"clock", 1.8e9},
                        {"capability", 86},
                        {"disk_rate", 1e9},
                        {"disk_row_rate", 1e9},
                        {"disk_latency", 1e-4}};
  EXPECT_EQ(read_machine(write(machine.dump())).multiprocessors, 30);
  for (const auto& [field, value] : machine.items()) {
    for (const Json& bad : {Json(-1), Json("fast"), Json()}) {
      Json spoilt = machine;
      spoilt[field] = bad;
      expect_error(ErrorCode::corrupt, field, [&] { read_machine(write(spoilt.dump())); });
    }
  }
}

}  // namespace
}  // namespace sluice
