// Chooses the settings of a run before anything is allocated: weights, index, rows and tiers for a
// context under caps, within a loss; what they take, and how long they are expected to take.
//
//   sluice::PlanWish wish;
//   wish.shape = "llama3-8b";
//   wish.context = 1 << 20;
//   wish.machine = sluice::find_machine("rtx4090");
//   const sluice::AdvisedPlan plan = sluice::advise(wish);
//
// Bytes are counted by Engine::plan(). Losses and times are predictions: losses by a table measured
// with sluice-22m, times by a formula fitted to measurements on two GPUs. The choice depends on
// sizes, caps and the table of losses alone, unless PlanWish::fastest asks for the predicted times
// to decide.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/engine.h"

namespace sluice {

// A machine with a GPU, by its data sheet. Rates in bytes per second.
struct Machine {
  std::string name;
  std::uint64_t device_memory = 0;  // bytes
  double memory_rate = 0.0;         // of device memory
  double bus_rate = 0.0;            // at which kernels read host memory
  double copy_rate = 0.0;           // at which host memory is copied to the device
  double flops = 0.0;               // per second, dense products of bf16 with sums in fp32
  int multiprocessors = 0;
  double clock = 0.0;          // Hz
  int capability = 80;         // 90 for compute capability 9.0
  double disk_rate = 0.0;      // whole pages, reading and writing
  double disk_row_rate = 0.0;  // single rows, a few dozen at a time
  double disk_latency = 0.0;   // seconds until the first of them
};

std::vector<std::string> machine_names();
// Throws Error{usage} listing the names if there is no such machine.
Machine find_machine(std::string_view name);
// A file with one machine: a JSON object with the fields of Machine. Throws Error{corrupt} naming
// file and field, and what reading a file throws.
Machine read_machine(const std::filesystem::path& file);

// Models that can be planned for without their files.
std::vector<std::string> shape_names();

// The sizes of a model that rows and weights depend on.
struct ModelShape {
  std::string architecture;
  int layers = 0;
  int hidden = 0;
  int intermediate = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocabulary = 0;

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};
ModelShape shape_of(const ModelInfo& info);

struct PlanWish {
  std::filesystem::path model;  // a checkpoint, or
  std::string shape;         // one of shape_names(), or a config.json of a model that is not here
  std::int64_t context = 0;  // tokens; required
  // The machine to plan for. Unset: this machine with `device`; then the limits of this process
  // count, too, and times are not predicted.
  std::optional<Machine> machine = std::nullopt;
  std::string device = "cpu";
  // Caps in bytes, as in EngineConfig.
  std::optional<std::uint64_t> device_memory = std::nullopt;
  std::optional<std::uint64_t> host_memory = std::nullopt;
  std::optional<DiskConfig> disk = std::nullopt;
  // Most KL divergence of everything that is chosen, weights included unless `weights` is set.
  // Unset: kUsualLoss for all but weights, which are coded only if they do not fit otherwise.
  std::optional<double> loss = std::nullopt;
  // Settings that are not chosen but given.
  std::optional<WeightFormat> weights = std::nullopt;
  std::optional<RowFormat> rows = std::nullopt;
  std::string policy;  // a policy line; empty: chosen
  int chunk = 0;
  int threads = 0;
  bool fastest = false;  // of all that fits, the least predicted step; needs `machine`

  static constexpr double kUsualLoss = 0.005;
};

// Settings of a run, as a plan file has them.
struct PlanSettings {
  ModelShape model;
  bool on_gpu = false;
  std::int64_t context = 0;
  int chunk = 0;                                       // most tokens of a prompt's step
  std::optional<WeightFormat> weights = std::nullopt;  // as EngineConfig::weights
  RowFormat rows;
  std::string policy;
  std::optional<std::uint64_t> device_memory = std::nullopt;
  std::optional<std::uint64_t> host_memory = std::nullopt;
  std::optional<DiskConfig> disk = std::nullopt;
};

struct Losses {
  double weights = 0.0;
  double rows = 0.0;
  std::optional<double> policy = std::nullopt;  // unset: not in the table
  double prefill = 0.0;

  double sum() const { return weights + rows + policy.value_or(0.0) + prefill; }
};

// Bytes that a decode step behind a whole context reads.
struct StepBytes {
  std::uint64_t weights = 0;
  std::uint64_t keys = 0;    // of the index
  std::uint64_t values = 0;  // tiles
  std::uint64_t rows = 0;    // that attention reads, from all tiers
  std::uint64_t bus = 0;     // of these, from host memory
  std::uint64_t disk = 0;    // of these, from disk
};

// Seconds.
struct StepTimes {
  double step = 0.0;     // one decoded token behind a whole context
  double prefill = 0.0;  // a prompt as long as the context
};

// The gain of one more GiB of a tier.
struct Gain {
  Tier tier = Tier::device;
  std::int64_t context = 0;  // the longest that then fits
  std::optional<double> step_seconds = std::nullopt;
  std::optional<WeightFormat> weights = std::nullopt;  // that the plan with it has
};

struct AdvisedPlan {
  PlanSettings settings;
  Plan plan;  // its program_bytes are those of this process
  Losses losses;
  StepBytes bytes;
  std::optional<StepTimes> times = std::nullopt;  // of PlanWish::machine
  std::int64_t longest = 0;                       // context that fits the same wish
  std::vector<Gain> gains;                        // of the tiers that have a cap
};

// Throws Error{usage} for a wish that makes no sense; Error{memory} if nothing fits, naming the
// nearest plans that do; what Engine::open() throws for the model.
AdvisedPlan advise(const PlanWish& wish);
// The same without `longest` and `gains`, which take some hundred plans.
AdvisedPlan advise_quickly(const PlanWish& wish);

// A plan file: JSON that read_plan() reads. Bytes, losses and times in it are for people.
std::string to_json(const AdvisedPlan& plan);
// Throws Error{corrupt} naming the field that is missing, unknown or makes no sense.
PlanSettings read_plan(const std::filesystem::path& file);
// Throws Error{usage} if the plan was made for a model of another shape.
void require_model(const PlanSettings& settings, const ModelInfo& info);
// Sets the fields that a plan decides.
void use_plan(const PlanSettings& settings, EngineConfig& config);

}  // namespace sluice
