// `sluice bench` of a model behind a text.
#include <map>
#include <optional>
#include <utility>

#include "io/file.h"
#include "sluice/errors.h"
#include "tools/bench_positions.h"
#include "tools/bench_record.h"
#include "tools/bench_subject.h"
#include "tools/eval_tasks.h"
#include "tools/run_record.h"

namespace sluice::tools {
namespace {

EngineConfig bench_config(const ModelFlags& flags, const std::string& cap) {
  ModelFlags model = flags;
  model.device_memory = cap;
  return model.config();
}

// The ids of a text, from which every sequence reads a part of its own.
class Texts {
 public:
  Texts(const Engine& engine, const std::string& path)
      : prefix_(engine.encode_prompt("")),
        ids_(engine.tokenizer().encode(read_text_file(path, kMaxTextBytes))) {}

  // Throws Error{prompt} if the text is too short for a cell.
  void require(const CellKey& key, const BenchSteps& steps) const {
    const std::int64_t most = std::ssize(ids_) + std::ssize(prefix_);
    if (tokens_of(key, steps) <= most) return;
    throw Error(ErrorCode::prompt,
                "--text has " + std::to_string(most) + " tokens, but --context " +
                    std::to_string(key.context) + " with its steps needs " +
                    std::to_string(tokens_of(key, steps)) + "; give a longer text");
  }

  // Parts of one length, spread evenly over the text.
  std::vector<std::vector<TokenId>> parts(const CellKey& key, const BenchSteps& steps) const {
    const std::int64_t length = tokens_of(key, steps) - std::ssize(prefix_);
    const std::int64_t room = std::ssize(ids_) - length;
    std::vector<std::vector<TokenId>> parts;
    for (int i = 0; i < key.sequences; ++i) {
      const auto first = ids_.begin() + room * i / key.sequences;
      std::vector<TokenId>& part = parts.emplace_back(prefix_);
      part.insert(part.end(), first, first + length);
    }
    return parts;
  }

 private:
  std::vector<TokenId> prefix_;
  std::vector<TokenId> ids_;
};

// The engine of one cap at a time, because two would take twice the memory.
class Engines {
 public:
  // `counter`: counts in every engine; null: none.
  Engines(const ModelFlags& flags, std::shared_ptr<TrafficCounter> counter)
      : flags_(flags), counter_(std::move(counter)), engine_(open("")) {}

  // The engine without a cap, whose weights need not be loaded; until under() is called.
  const Engine& first() const { return *engine_; }
  // The engine under `cap`, with weights. Throws Error{memory} if the cap is too small for it.
  Engine& under(const std::string& cap) {
    if (!engine_ || cap != cap_) {
      engine_.reset();
      cap_ = cap;
      engine_ = open(cap);
    }
    engine_->load_weights();
    return *engine_;
  }

 private:
  Engine open(const std::string& cap) const {
    EngineConfig config = bench_config(flags_, cap);
    config.counter = counter_;
    return Engine::open(config);
  }

  const ModelFlags& flags_;
  std::shared_ptr<TrafficCounter> counter_;
  std::string cap_;
  std::optional<Engine> engine_;
};

class ModelSubject : public BenchSubject {
 public:
  explicit ModelSubject(const BenchFlags& flags)
      : flags_(flags),
        steps_(steps_of(flags, {})),
        recount_(flags),
        engines_(flags.model, recount_.counter),
        texts_(engines_.first(), flags.text) {}

  Policy policy(const std::string& text) const override {
    const Engine& engine = engines_.first();
    Policy policy = engine.policy(text);
    validate(policy, engine.info().kv, flags_.model.config().scorers);
    return policy;
  }

  std::vector<std::int64_t> contexts() const override { return {8192}; }
  BenchSteps steps() const override { return steps_; }

  void require(std::span<const WantedCell> cells) override {
    for (const WantedCell& wanted : cells) texts_.require(wanted.key, steps_);
    for (const WantedCell& wanted : cells) require_plan(wanted);
    const Policy& first = cells.front().method.policy;
    if (!flags_.record.empty()) require_recordable(first);
    if (!flags_.record_positions.empty()) {
      require_positions_of(first, engines_.first().info().kv.layers);
    }
  }

  nlohmann::json head() const override {
    return {{"run", run_record(flags_.model, flags_.text)},
            {"model", flags_.model.model},
            {"text", flags_.text}};
  }

  // Records in a run of its own, because an observer slows steps and positions take memory.
  void prepare(std::span<const WantedCell> cells) override {
    if (flags_.record.empty() && flags_.record_positions.empty()) return;
    const WantedCell& cell = cells.front();
    const Policy& policy = cell.method.policy;
    CellKey key = cell.key;
    key.sequences = 1;
    const KvShape shape = engines_.first().info().kv;
    EngineConfig config = bench_config(flags_.model, key.device_memory);
    std::shared_ptr<RowRecorder> rows;
    if (!flags_.record.empty()) {
      rows = std::make_shared<RowRecorder>(flags_.record, shape, key.context,
                                           steps_.warm_up + steps_.steps);
      config.observer = rows;
    }
    PositionRecorder positions(shape, key.context, policy);
    CellWatch watch;
    if (!flags_.record_positions.empty()) watch.positions = &positions;
    const std::vector<std::vector<TokenId>> parts = texts_.parts(cell.key, steps_);
    const std::span<const TokenId> part = parts.front();
    DenseAnswers ignored;
    Engine engine = Engine::open(config);
    static_cast<void>(run_cell(engine, key, policy, steps_, {&part, 1}, ignored, watch));
    if (rows != nullptr) rows->finish();
    if (watch.positions != nullptr) positions.write(flags_.record_positions);
  }

  CellResult run(const WantedCell& cell) override {
    const CellKey& key = cell.key;
    const std::vector<std::vector<TokenId>> parts = texts_.parts(key, steps_);
    const std::vector<std::span<const TokenId>> views(parts.begin(), parts.end());
    Engine& engine = engines_.under(key.device_memory);
    DenseAnswers& answers = dense_[{key.context, key.sequences}];
    if (answers.empty() && cell.method.policy != Policy()) {
      static_cast<void>(run_cell(engine, key, Policy(), steps_, views, answers));
    }
    CellResult result = run_cell(engine, key, cell.method.policy, steps_, views, answers);
    const bool sees_keys = flags_.model.config().scorers.at(cell.method.policy.select).by_backend();
    recount(result, key, steps_, recount_, sees_keys, [&](StepCheck& check) {
      static_cast<void>(
          run_cell(engine, key, cell.method.policy, steps_, views, answers, {.check = &check}));
    });
    return result;
  }

 private:
  // Contexts beyond the model, and plans that are wrong for any cap, are refused before the weights
  // are loaded.
  void require_plan(const WantedCell& wanted) const {
    const Engine& engine = engines_.first();
    const std::int64_t trained = engine.info().trained_context;
    const std::int64_t tokens = tokens_of(wanted.key, steps_);
    if (trained > 0 && tokens > trained) {
      throw Error(ErrorCode::usage, "--context " + std::to_string(wanted.key.context) +
                                        " with its steps is " + std::to_string(tokens) +
                                        " tokens, but the model was trained for " +
                                        std::to_string(trained));
    }
    try {
      static_cast<void>(engine.plan(session_of(wanted.key, wanted.method.policy, steps_)));
    } catch (const Error& error) {
      if (!is_answer(error)) throw;
    }
  }

  // Corrections write rows a second time, and a recording has each row once.
  static void require_recordable(const Policy& policy) {
    if (policy.correct == 0) return;
    throw Error(ErrorCode::usage, "--record takes no policy that corrects; give correct=0");
  }

  const BenchFlags& flags_;
  BenchSteps steps_;
  Recount recount_;
  Engines engines_;
  Texts texts_;
  // Dense attention's answers by context and number of sequences.
  std::map<std::pair<std::int64_t, int>, DenseAnswers> dense_;
};

}  // namespace

std::unique_ptr<BenchSubject> model_subject(const BenchFlags& flags) {
  return std::make_unique<ModelSubject>(flags);
}

}  // namespace sluice::tools
