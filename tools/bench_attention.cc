// `sluice bench` of attention over rows, without a model.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "engine/planning/tables.h"
#include "engine/value_basis.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "tools/bench_arrays.h"
#include "tools/bench_basis.h"
#include "tools/bench_positions.h"
#include "tools/bench_replay.h"
#include "tools/bench_subject.h"
#include "tools/output.h"
#include "tools/run_record.h"

namespace sluice::tools {
namespace {

constexpr std::int64_t kMostBenchTokens = std::int64_t{1} << 30;

KvConfig base_cache(const BenchFlags& flags, const KvShape& shape) {
  const EngineConfig engine = flags.model.config();
  KvConfig config;
  config.shape = shape;
  config.shape.rows = engine.kv_dtype;
  config.device = engine.device;
  config.threads = engine.threads;
  if (engine.chunk != 0) config.chunk = engine.chunk;
  config.scale = flags.scale;
  config.host_memory = engine.host_memory;
  config.row_cache = engine.row_cache;
  config.disk = engine.disk;
  config.scorers = engine.scorers;
  return config;
}

nlohmann::json json_of_shape(const KvShape& shape) {
  return {{"layers", shape.layers},
          {"query_heads", shape.query_heads},
          {"kv_heads", shape.kv_heads},
          {"head_dim", shape.head_dim}};
}

class AttentionSubject : public BenchSubject {
 public:
  AttentionSubject(const BenchFlags& flags, const KvShape& shape, BenchSteps steps)
      : flags_(flags), steps_(steps), base_(base_cache(flags, shape)), recount_(flags) {
    require_cache();
  }

  Policy policy(const std::string& text) const override {
    Policy policy = parse_policy(text, base_.scorers);
    validate(policy, base_.shape, base_.scorers);
    return policy;
  }

  BenchSteps steps() const override { return steps_; }

  void require(std::span<const WantedCell> cells) override {
    for (const WantedCell& cell : cells) require_tokens(cell.key);
    if (!flags_.record_positions.empty()) {
      require_positions_of(cells.front().method.policy, shape().layers);
    }
  }

  // In a run of its own, because positions take memory.
  void prepare(std::span<const WantedCell> cells) override {
    if (flags_.record_positions.empty()) return;
    const WantedCell& cell = cells.front();
    const Policy& policy = cell.method.policy;
    require_replayable(policy);
    CellKey key = cell.key;
    key.sequences = 1;
    const std::vector<std::shared_ptr<const BenchRows>> own = sequences(key);
    const BenchRows* const rows = own.front().get();
    PositionRecorder positions(shape(), key.context, policy);
    DenseOutputs ignored;
    static_cast<void>(
        run_one(key, policy, {{&rows, 1}, first_token(key)}, ignored, {.positions = &positions}));
    positions.write(flags_.record_positions);
  }

  CellResult run(const WantedCell& cell) override {
    require_replayable(cell.method.policy);
    const std::vector<std::shared_ptr<const BenchRows>> own = sequences(cell.key);
    std::vector<const BenchRows*> rows;
    for (const std::shared_ptr<const BenchRows>& sequence : own) rows.push_back(sequence.get());
    const ReplayRows replay = {rows, first_token(cell.key)};
    DenseOutputs& dense = dense_[{cell.key.context, cell.key.sequences}];
    if (compares() && dense.empty() && cell.method.policy != Policy()) {
      static_cast<void>(run_one(cell.key, Policy(), replay, dense));
    }
    CellResult result = run_one(cell.key, cell.method.policy, replay, dense);
    const bool sees_keys = base_.scorers.at(cell.method.policy.select).by_backend();
    recount(result, cell.key, steps_, recount_, sees_keys, [&](StepCheck& check) {
      static_cast<void>(run_one(cell.key, cell.method.policy, replay, dense, {.check = &check}));
    });
    return result;
  }

 protected:
  const BenchFlags& flags() const { return flags_; }
  const KvShape& shape() const { return base_.shape; }
  Scorers& scorers() { return base_.scorers; }
  const Scorers& scorers() const { return base_.scorers; }

  // False if the outputs stand for nothing.
  virtual bool compares() const { return true; }
  // Throws for a context that there are no rows for.
  virtual void require_tokens(const CellKey& key) const = 0;
  // The token that begins the context of a cell.
  virtual std::int64_t first_token(const CellKey& /*key*/) const { return 0; }
  // The rows of each sequence of a cell.
  virtual std::vector<std::shared_ptr<const BenchRows>> sequences(const CellKey& key) const = 0;

 private:
  // Finds out now what no cell could run: a shape, a scale or a device.
  void require_cache() const {
    KvConfig config = base_;
    config.context = kPageTokens;
    config.host_memory.reset();
    config.disk.reset();
    try {
      const KvCache cache(config);
    } catch (const Error& error) {
      throw Error(error.code(), name() + ": " + error.what());
    }
  }
  // What the rows are, for messages.
  std::string name() const {
    if (!flags_.positions.empty()) return flags_.positions;
    return flags_.arrays.empty() ? "--shape " + flags_.shape : flags_.arrays;
  }

  // Rows are appended as they are: no prompt is computed, and none of its tokens has a query.
  void require_replayable(const Policy& policy) const {
    const auto refuse = [](const std::string& what) {
      throw Error(ErrorCode::unsupported, what + "; bench measures it with --model");
    };
    if (policy.correct != 0) refuse("correct: a correction needs a model");
    if (!policy.prefill.dense()) refuse("prefill: the context's tokens have no queries");
    if (base_.scorers.at(policy.select).observes()) {
      refuse("select=" + policy.select.name +
             " looks at the queries of the context's tokens, which have none");
    }
  }

  CellResult run_one(const CellKey& key, const Policy& policy, const ReplayRows& rows,
                     DenseOutputs& dense, const CellWatch& watch = {}) const {
    KvConfig config = cache_of(base_, key, policy, steps_);
    if (watch.check != nullptr) config.counter = recount_.counter;
    config.reports_positions = watch.positions != nullptr;
    if (halves_values({&policy, 1}, base_.shape.layers)) {
      config.value_basis = basis_of_rows(*rows.sequences.front(), rows.first, key.context);
    }
    if (!key.device_memory.empty()) {
      config.device_memory = parse_cap(key.device_memory, "--device-memory");
    }
    try {
      return run_replay(config, key, steps_, rows, compares() ? &dense : nullptr, watch);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::numeric) throw;
      throw Error(error.code(),
                  name() + ": under policy " + in_quotes(key.policy) + ": " + error.what());
    }
  }

  const BenchFlags& flags_;
  BenchSteps steps_;
  KvConfig base_;
  Recount recount_;
  // Dense attention by context and number of sequences.
  std::map<std::pair<std::int64_t, int>, DenseOutputs> dense_;
};

// --- arrays

// The steps of a file: up to 4 of warm-up, and the others are measured, unless flags say otherwise.
BenchSteps steps_in(const BenchFlags& flags, const std::string& path, std::int64_t count) {
  constexpr std::int64_t kWarmUp = BenchSteps().warm_up;
  constexpr std::int64_t kMost = 10000;
  const std::int64_t warm_up = flags.warm_up ? *flags.warm_up : std::min(kWarmUp, count - 1);
  BenchSteps all;
  all.warm_up = static_cast<int>(warm_up);
  all.steps = static_cast<int>(std::clamp<std::int64_t>(count - warm_up, 1, kMost));
  const BenchSteps steps = steps_of(flags, all);
  if (std::int64_t{steps.steps} + steps.warm_up <= count) return steps;
  throw Error(ErrorCode::usage, path + ": has " + std::to_string(count) +
                                    " steps, fewer than --warm-up " +
                                    std::to_string(steps.warm_up) + " and --steps " +
                                    std::to_string(steps.steps) + " take");
}

class ArraySubject : public AttentionSubject {
 public:
  ArraySubject(const BenchFlags& flags, std::unique_ptr<BenchArrays> arrays)
      : AttentionSubject(flags, arrays->shape(), steps_in(flags, flags.arrays, arrays->steps())),
        arrays_(std::move(arrays)) {}

  std::vector<std::int64_t> contexts() const override { return {arrays_->context()}; }

  void require(std::span<const WantedCell> cells) override {
    AttentionSubject::require(cells);
    ProgressBar bar("bench");
    checksum_ = arrays_->check([&](double share) { bar.update(share, "reading the arrays"); });
  }

  nlohmann::json head() const override {
    nlohmann::json run = run_record(flags().model, "");
    run["arrays"] = fingerprint_text(checksum_);
    nlohmann::json arrays = json_of_shape(shape());
    arrays["path"] = flags().arrays;
    arrays["context"] = arrays_->context();
    arrays["steps"] = arrays_->steps();
    arrays["q"] = to_string(arrays_->dtype(RowPart::q));
    arrays["k"] = to_string(arrays_->dtype(RowPart::k));
    arrays["v"] = to_string(arrays_->dtype(RowPart::v));
    return {{"run", run}, {"arrays", arrays}};
  }

 protected:
  void require_tokens(const CellKey& key) const override {
    if (key.context <= arrays_->context()) return;
    throw Error(ErrorCode::usage, flags().arrays + ": has " + std::to_string(arrays_->context()) +
                                      " tokens before its steps, fewer than --context " +
                                      std::to_string(key.context));
  }
  // The newest tokens before the steps.
  std::int64_t first_token(const CellKey& key) const override {
    return arrays_->context() - key.context;
  }
  std::vector<std::shared_ptr<const BenchRows>> sequences(const CellKey& key) const override {
    return {static_cast<std::size_t>(key.sequences), arrays_};
  }

 private:
  std::shared_ptr<const BenchArrays> arrays_;
  std::uint64_t checksum_ = 0;
};

// --- positions

// Rows and queries of zeros.
class ZeroRows : public BenchRows {
 public:
  explicit ZeroRows(const KvShape& shape) : shape_(shape) {}
  KvShape shape() const override { return shape_; }
  DType dtype(RowPart /*part*/) const override { return DType::f32; }
  void read(RowPart /*part*/, int /*layer*/, std::int64_t /*first*/, std::int64_t /*count*/,
            std::span<std::byte> to) const override {
    std::fill(to.begin(), to.end(), std::byte{0});
  }

 private:
  KvShape shape_;
};

// Rows of zeros, selected as a trace says. Compared with the run that wrote the trace, only the
// scorer, its index and the values of the rows differ.
class PositionsSubject : public AttentionSubject {
 public:
  PositionsSubject(const BenchFlags& flags, std::shared_ptr<const PositionTrace> trace)
      : AttentionSubject(flags, trace->shape(), steps_in(flags, flags.positions, trace->steps())),
        trace_(std::move(trace)) {
    scorers().add(std::make_shared<PositionScorer>(trace_));
  }

  std::optional<BenchMethod> method() const override {
    const Policy policy = trace_->policy(scorers());
    return BenchMethod{PositionScorer::kName, to_string(policy), policy};
  }
  std::vector<std::int64_t> contexts() const override { return {trace_->context()}; }

  nlohmann::json head() const override {
    nlohmann::json run = run_record(flags().model, "");
    run["positions"] = fingerprint_text(trace_->checksum());
    nlohmann::json positions = json_of_shape(shape());
    positions["path"] = flags().positions;
    positions["context"] = trace_->context();
    positions["steps"] = trace_->steps();
    positions["missed_rows"] = trace_->missed();
    return {{"run", run}, {"positions", positions}};
  }

 protected:
  bool compares() const override { return false; }
  void require_tokens(const CellKey& /*key*/) const override {}
  std::vector<std::shared_ptr<const BenchRows>> sequences(const CellKey& key) const override {
    return {static_cast<std::size_t>(key.sequences), std::make_shared<const ZeroRows>(shape())};
  }

 private:
  std::shared_ptr<const PositionTrace> trace_;
};

// --- made-up rows

KvShape shape_of_flags(const BenchFlags& flags) {
  const ModelConfig config = planning::find_shape(flags.shape);
  if (config.window) {
    throw Error(ErrorCode::unsupported,
                "--shape " + flags.shape + ": layers with a sliding window of " +
                    std::to_string(*config.window) + " tokens are not replayed");
  }
  KvShape shape;
  shape.layers = config.num_hidden_layers;
  shape.query_heads = config.num_attention_heads;
  shape.kv_heads = config.num_key_value_heads;
  shape.head_dim = config.head_dim;
  return shape;
}

class MadeUpSubject : public AttentionSubject {
 public:
  explicit MadeUpSubject(const BenchFlags& flags)
      : AttentionSubject(flags, shape_of_flags(flags), steps_of(flags, {})) {
    validate(flags.statistics);
  }

  std::vector<std::int64_t> contexts() const override { return {8192}; }

  nlohmann::json head() const override {
    nlohmann::json made_up = json_of_shape(shape());
    made_up["shape"] = flags().shape;
    made_up["seed"] = flags().seed;
    made_up["logit_std"] = flags().statistics.logit_std;
    made_up["heavy_share"] = flags().statistics.heavy_share;
    made_up["heavy_weight"] = flags().statistics.heavy_weight;
    made_up["persistence"] = flags().statistics.persistence;
    nlohmann::json run = run_record(flags().model, "");
    // A config.json may change under its name.
    run["shape"] = json_of_shape(shape());
    return {{"run", run}, {"made_up", made_up}};
  }

 protected:
  void require_tokens(const CellKey& key) const override {
    if (tokens_of(key, steps()) <= kMostBenchTokens) return;
    throw Error(ErrorCode::usage, "--context " + std::to_string(key.context) +
                                      " with its steps is more than 1073741824 tokens");
  }
  std::vector<std::shared_ptr<const BenchRows>> sequences(const CellKey& key) const override {
    std::vector<std::shared_ptr<const BenchRows>> made;
    for (int i = 0; i < key.sequences; ++i) {
      made.push_back(std::make_shared<MadeUpRows>(shape(), flags().statistics,
                                                  flags().seed + static_cast<std::uint64_t>(i)));
    }
    return made;
  }
};

}  // namespace

std::unique_ptr<BenchSubject> array_subject(const BenchFlags& flags) {
  return std::make_unique<ArraySubject>(flags, BenchArrays::open(flags.arrays));
}

std::unique_ptr<BenchSubject> positions_subject(const BenchFlags& flags) {
  return std::make_unique<PositionsSubject>(
      flags, std::make_shared<const PositionTrace>(PositionTrace::open(flags.positions)));
}

std::unique_ptr<BenchSubject> made_up_subject(const BenchFlags& flags) {
  return std::make_unique<MadeUpSubject>(flags);
}

}  // namespace sluice::tools
