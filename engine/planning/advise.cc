// Searches the settings of a plan: see sluice/planning.h.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "engine/engine_impl.h"
#include "engine/planning/losses.h"
#include "engine/planning/tables.h"
#include "engine/planning/times.h"
#include "engine/shape_source.h"
#include "lib/bytes.h"
#include "lib/gpu_sizes.h"
#include "lib/text.h"
#include "offload/backends.h"
#include "offload/plan/planned_gpu.h"
#include "offload/plan/planner.h"
#include "sluice/errors.h"
#include "sluice/planning.h"

namespace sluice {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
// Prompts from this length on attend among pages if the loss permits: shorter ones gain little
// (bench/results/sparse_prefill_pages_h100.json).
constexpr std::int64_t kLongPrompt = 131072;
constexpr std::int64_t kMostContext = std::int64_t{1} << 25;
constexpr std::int64_t kContextStep = 1024;

// For models that no index is made for.
const std::vector<planning::PolicyLoss>& dense_alone() {
  static const std::vector<planning::PolicyLoss> dense = {{"dense", 0.0}};
  return dense;
}

void validate(const PlanWish& wish) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw Error(ErrorCode::usage, message);
  };
  require(wish.model.empty() != wish.shape.empty(),
          "a plan is for a `model` or for a `shape`; give one of them");
  require_context(wish.context);
  require(!wish.loss || (std::isfinite(*wish.loss) && *wish.loss >= 0.0),
          "`loss` must be a KL divergence of 0 or more");
  require(!wish.fastest || wish.machine,
          "`fastest` goes by predicted times; give the `machine` to predict them for");
  if (wish.machine && wish.device_memory) {
    require(*wish.device_memory <= wish.machine->device_memory,
            "`device_memory` " + format_bytes(*wish.device_memory) + " is more than " +
                wish.machine->name + " has, " + format_bytes(wish.machine->device_memory));
  }
  if (wish.disk && wish.disk->directories.empty()) {
    throw Error(ErrorCode::usage, "`disk` names no directory");
  }
}

// Formats of weights and rows, and whether rows may lie on disk.
struct Formats {
  std::optional<WeightFormat> weights;
  RowFormat rows;
  bool on_disk = false;
};

struct Found {
  Formats formats;
  std::string policy;
  Plan plan;
  Losses losses;
  const Engine* engine = nullptr;
};

// Finds plans under one set of caps. Engines that plan are opened once for each pair of formats.
class Chooser {
 public:
  explicit Chooser(PlanWish wish) : wish_(std::move(wish)) {
    if (!wish_.model.empty()) {
      source_ = CheckpointSource::open(wish_.model);
    } else {
      source_ = make_shape_source(planning::find_shape(wish_.shape));
    }
    if (wish_.machine) {
      gpu_ = planned(*wish_.machine);
    } else if (wish_.device.starts_with("cuda")) {
      // Engines that plan must not take the GPU's memory from each other.
      BackendOptions options;
      options.device = wish_.device;
      options.device_memory = wish_.device_memory;
      gpu_ = planned_like(*make_backend(options));
      gpu_->host_cap = wish_.host_memory;
    }
  }

  // Weights as wide, rows as exact and as near as they may be: host memory before a disk, and
  // values in 4 bits where int8 fits neither.
  std::vector<Formats> formats() const {
    std::vector<std::optional<WeightFormat>> weights = {std::nullopt, WeightCode::int8,
                                                        WeightCode::int4};
    if (wish_.weights) weights = {wish_.weights};
    std::vector<std::vector<RowFormat>> rows = {{DType::bf16, RowCode::int8}, {RowCode::k8v4}};
    if (wish_.rows) rows = {{*wish_.rows}};
    std::vector<Formats> all;
    for (const auto& of_weights : weights) {
      for (const std::vector<RowFormat>& alike : rows) {
        for (const bool on_disk : {false, true}) {
          if (on_disk && !wish_.disk) continue;
          for (const RowFormat& of_rows : alike) all.push_back({of_weights, of_rows, on_disk});
        }
      }
    }
    return all;
  }

  // The first plan that fits, or of all that fit the one that is `best`.
  std::optional<Found> find(std::int64_t context,
                            const std::function<double(const Found&)>& best = {}) {
    std::optional<Found> found;
    double least = std::numeric_limits<double>::infinity();
    for (const Formats& formats : this->formats()) {
      const Engine* const engine = this->engine(formats);
      if (engine == nullptr || !gains(engine->info().kv)) continue;
      std::optional<Found> one = find_with(*engine, formats, context);
      if (!one) continue;
      if (!best) return one;
      const double cost = best(*one);
      if (cost < least) {
        least = cost;
        found = std::move(one);
      }
    }
    return found;
  }

  // The longest context that fits, in steps; 0: none.
  std::int64_t longest(std::int64_t fits) {
    std::int64_t low = fits / kContextStep;
    std::int64_t high = std::max<std::int64_t>(low, 1);
    while (high <= kMostContext / kContextStep && fits_at(high)) {
      low = high;
      high *= 2;
    }
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (fits_at(middle) ? low : high) = middle;
    }
    return std::max(fits, low * kContextStep);
  }

  const Error& why() const { return *why_; }
  const PlanWish& wish() const { return wish_; }

 private:
  bool fits_at(std::int64_t steps) { return find(steps * kContextStep).has_value(); }

  // Returns true unless rows lose more than those of int8 and are no smaller: padded to whole
  // lines, those of k8v4 are not where head_dim is 64.
  bool gains(const KvShape& shape) const {
    return wish_.rows || shape.rows.code != RowCode::k8v4 ||
           shape.row_bytes() < RowFormat(RowCode::int8).bytes(shape.head_dim);
  }

  // Null if the device or the model does not take the formats.
  const Engine* engine(const Formats& formats) {
    const auto key = std::tuple(formats.weights ? static_cast<int>(formats.weights->code) : -1,
                                static_cast<int>(formats.rows.code),
                                static_cast<int>(formats.rows.element), formats.on_disk);
    const auto known = engines_.find(key);
    if (known != engines_.end()) return known->second ? &*known->second : nullptr;
    std::optional<Engine>& made = engines_[key];
    try {
      made = open(formats);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported && error.code() != ErrorCode::memory) throw;
      if (!why_) why_ = error;  // rather say what does not fit
    }
    return made ? &*made : nullptr;
  }

  Engine open(const Formats& formats) const {
    EngineConfig config;
    // A shape has no calibrated policies, and no place for them.
    config.model = wish_.model.empty() ? "/dev/null" : wish_.model;
    config.device = wish_.device;
    config.threads = wish_.threads;
    config.chunk = wish_.chunk;
    config.weights = formats.weights;
    config.kv_dtype = formats.rows;
    config.device_memory = wish_.device_memory;
    config.host_memory = wish_.host_memory;
    if (formats.on_disk) config.disk = wish_.disk;
    return Engine::Impl::open_to_plan(
        config, Checkpoint::open(*source_),
        [&](DType dtype) {
          if (!gpu_) return make_backend(backend_options(config, dtype));
          PlannedGpu gpu = *gpu_;
          gpu.weight_dtype = dtype;
          return make_planned_gpu(gpu);
        },
        wish_.machine.has_value());
  }

  PlannedGpu planned(const Machine& machine) const {
    PlannedGpu gpu;
    gpu.memory_bytes = machine.device_memory;
    gpu.memory_rate = machine.memory_rate;
    gpu.bus_rate = machine.bus_rate;
    gpu.device_cap = wish_.device_memory;
    gpu.host_cap = wish_.host_memory;
    return gpu;
  }

  std::optional<Found> find_with(const Engine& engine, const Formats& formats,
                                 std::int64_t context) {
    const bool on_gpu = gpu_.has_value();
    std::vector<planning::PolicyLoss> policies = {{wish_.policy, 0.0}};
    if (wish_.policy.empty()) policies = planning::preferred_policies(on_gpu);
    const double limit = wish_.loss.value_or(PlanWish::kUsualLoss);
    // Losses of settings that were given are accepted.
    const bool counts_weights = wish_.loss && !wish_.weights;
    const double others = (wish_.rows ? 0.0 : planning::row_loss(formats.rows)) +
                          (counts_weights ? planning::weight_loss(formats.weights) : 0.0);
    const planning::PrefillLoss sparse = planning::sparse_prefill();
    for (const bool pages : {true, false}) {
      const bool may_list = wish_.policy.empty() && context >= kLongPrompt &&
                            (wish_.chunk == 0 || wish_.chunk >= kPageTokens);
      if (pages && !may_list) continue;
      std::vector<planning::PolicyLoss> within;
      for (const planning::PolicyLoss& policy : policies) {
        const double sum = others + policy.kl + (pages ? sparse.kl : 0.0);
        if (sum <= limit) within.push_back(policy);
      }
      if (within.empty()) {
        // What does not fit says more.
        if (!why_) {
          why_ =
              Error(ErrorCode::memory, "every choice loses more than a `loss` of " + digits(limit));
        }
        continue;
      }
      std::string suffix = pages ? " " + sparse.setting : "";
      const SessionOptions options = {context, {}, 1};
      planning::Fitting fitting = planning::first_that_fits(engine, options, within, suffix);
      const bool has_no_index = fitting.why && fitting.why->code() == ErrorCode::unsupported;
      if (fitting.choice == nullptr && has_no_index && wish_.policy.empty()) {
        suffix.clear();
        fitting = planning::first_that_fits(engine, options, dense_alone());
      }
      if (fitting.choice == nullptr) {
        why_ = fitting.why;
        continue;
      }
      Found found;
      found.formats = formats;
      found.policy = fitting.choice->policy + suffix;
      found.plan = std::move(*fitting.plan);
      const Policy policy = engine.policy(found.policy);
      found.losses.weights = planning::weight_loss(formats.weights);
      found.losses.rows = planning::row_loss(formats.rows);
      // A calibrated policy of a preset's name counts as the preset.
      found.losses.policy =
          wish_.policy.empty() ? fitting.choice->kl : planning::policy_loss(policy);
      found.losses.prefill = planning::prefill_loss(policy);
      found.engine = &engine;
      return found;
    }
    return std::nullopt;
  }

  PlanWish wish_;
  std::unique_ptr<const CheckpointSource> source_;
  std::optional<PlannedGpu> gpu_;  // else the CPU of this machine
  std::map<std::tuple<int, int, int, bool>, std::optional<Engine>> engines_;
  std::optional<Error> why_;  // the last refusal
};

StepBytes bytes_of(const Found& found) {
  return planning::step_bytes(found.plan, found.engine->policy(found.policy), found.engine->info(),
                              found.formats.weights);
}

std::optional<StepTimes> times_of(const Found& found, const PlanWish& wish) {
  if (!wish.machine) return std::nullopt;
  return planning::predict(*wish.machine, found.plan, bytes_of(found),
                           found.engine->policy(found.policy), found.engine->info(),
                           found.formats.weights, static_cast<int>(found.plan.kv.chunk));
}

std::optional<Found> find(Chooser& chooser, std::int64_t context) {
  const PlanWish& wish = chooser.wish();
  if (!wish.fastest) return chooser.find(context);
  return chooser.find(context, [&](const Found& found) { return times_of(found, wish)->step; });
}

// The least cap of at least `least` bytes with which the wish fits, in steps of 64 MiB.
std::optional<std::uint64_t> least_cap(const PlanWish& wish, std::uint64_t least,
                                       std::optional<std::uint64_t> PlanWish::*cap) {
  constexpr std::uint64_t kStep = std::uint64_t{64} << 20;
  const auto fits = [&](std::uint64_t bytes) {
    PlanWish raised = wish;
    raised.*cap = bytes;
    return Chooser(raised).find(wish.context).has_value();
  };
  std::uint64_t most = std::uint64_t{1} << 40;
  if (cap == &PlanWish::device_memory && wish.machine) most = wish.machine->device_memory;
  if (most <= least || !fits(most)) return std::nullopt;
  std::uint64_t low = least / kStep;
  std::uint64_t high = (most + kStep - 1) / kStep;
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (fits(middle * kStep) ? high : low) = middle;
  }
  return std::min(high * kStep, most);
}

// A loss that is not below `loss`, in few digits.
std::string rounded(double loss) { return digits(std::ceil(loss * 1e4 - 1e-6) / 1e4); }

// Names the nearest plans that do fit.
[[noreturn]] void refuse(Chooser& chooser) {
  const PlanWish& wish = chooser.wish();
  const Error why = chooser.why();
  std::string nearest;
  const auto add = [&](const std::string& text) {
    nearest += (nearest.empty() ? "" : ", or ") + text;
  };
  const std::int64_t shorter = chooser.longest(0);
  if (shorter > 0) add("a `context` of " + std::to_string(shorter));
  const auto add_cap = [&](const char* name, std::optional<std::uint64_t> PlanWish::*cap,
                           std::uint64_t set) {
    if (const auto least = least_cap(wish, set, cap)) {
      add("`" + std::string(name) + "` " + format_bytes(*least));
    }
  };
  if (wish.device_memory) add_cap("device_memory", &PlanWish::device_memory, *wish.device_memory);
  if (wish.host_memory) add_cap("host_memory", &PlanWish::host_memory, *wish.host_memory);
  PlanWish any = wish;
  any.loss = std::numeric_limits<float>::max();
  Chooser tolerant(any);
  if (const std::optional<Found> found = tolerant.find(wish.context)) {
    add("a `loss` of " + rounded(found->losses.sum()) + ", with the policy " + found->policy +
        (found->formats.weights ? ", weights in " + to_string(*found->formats.weights) : "") +
        (wish.rows ? "" : ", rows in " + to_string(found->formats.rows)));
  }
  if (nearest.empty() && why.code() == ErrorCode::unsupported) throw Error(why);
  throw Error(ErrorCode::memory,
              std::to_string(wish.context) + " tokens do not fit: " + why.what() +
                  (nearest.empty() ? "; nothing near does" : "; what fits: " + nearest));
}

// Throws unless the directories of a plan for this machine have the room.
void require_disk(const AdvisedPlan& plan) {
  const KvPlan& kv = plan.plan.kv;
  if (!kv.on_disk) return;
  const std::uint64_t each =
      kv.disk_bytes / static_cast<std::uint64_t>(plan.settings.disk->directories.size());
  for (const std::filesystem::path& directory : plan.settings.disk->directories) {
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(directory, error);
    if (error) {
      throw Error(ErrorCode::not_found, "`disk` " + directory.string() + ": " + error.message());
    }
    if (space.available < each) {
      throw Error(ErrorCode::memory, "`disk` " + directory.string() + " has " +
                                         format_bytes(space.available) + " left, and the plan's " +
                                         "rows take " + format_bytes(each) + " there");
    }
  }
}

AdvisedPlan advised(const Found& found, const PlanWish& wish) {
  AdvisedPlan advice;
  PlanSettings& s = advice.settings;
  s.model = shape_of(found.engine->info());
  s.on_gpu = found.plan.on_device;
  s.context = wish.context;
  s.chunk = wish.chunk;
  s.weights = found.formats.weights;
  s.rows = found.formats.rows;
  // As a line without presets, so that a calibrated one stays what it is.
  s.policy = to_string(found.engine->policy(found.policy));
  s.device_memory = wish.device_memory;
  s.host_memory = wish.host_memory;
  s.disk = wish.disk;  // where the rows of one context need none, those of several may
  advice.plan = found.plan;
  advice.losses = found.losses;
  advice.bytes = bytes_of(found);
  advice.times = times_of(found, wish);
  return advice;
}

AdvisedPlan choose(Chooser& chooser) {
  const PlanWish& wish = chooser.wish();
  const std::optional<Found> found = find(chooser, wish.context);
  if (!found) refuse(chooser);
  AdvisedPlan plan = advised(*found, wish);
  if (!wish.machine) require_disk(plan);
  return plan;
}

// The gain of one more GiB of a tier; nothing if the machine has no more of it.
std::optional<Gain> gain_of(PlanWish wish, Tier tier) {
  if (tier == Tier::device) *wish.device_memory += kGiB;
  if (tier == Tier::host) *wish.host_memory += kGiB;
  if (tier == Tier::disk) *wish.disk->bytes += kGiB;
  Chooser chooser(wish);
  const std::optional<Found> found = find(chooser, wish.context);
  if (!found) return std::nullopt;
  Gain gain;
  gain.tier = tier;
  gain.context = chooser.longest(wish.context);
  gain.weights = found->formats.weights;
  if (const std::optional<StepTimes> times = times_of(*found, wish))
    gain.step_seconds = times->step;
  return gain;
}

}  // namespace

AdvisedPlan advise_quickly(const PlanWish& wish) {
  validate(wish);
  PlanWish capped = wish;
  if (wish.machine && !wish.device_memory) {
    const std::uint64_t all = wish.machine->device_memory;
    capped.device_memory = all - std::min(all, gpu::kReserve);
  }
  Chooser chooser(std::move(capped));
  return choose(chooser);
}

AdvisedPlan advise(const PlanWish& wish) {
  AdvisedPlan plan = advise_quickly(wish);
  PlanWish capped = wish;
  capped.device_memory = plan.settings.device_memory;
  plan.longest = Chooser(capped).longest(wish.context);
  if (capped.device_memory) {
    if (const auto gain = gain_of(capped, Tier::device)) plan.gains.push_back(*gain);
  }
  if (capped.host_memory) {
    if (const auto gain = gain_of(capped, Tier::host)) plan.gains.push_back(*gain);
  }
  if (capped.disk && capped.disk->bytes) {
    if (const auto gain = gain_of(capped, Tier::disk)) plan.gains.push_back(*gain);
  }
  return plan;
}

}  // namespace sluice
