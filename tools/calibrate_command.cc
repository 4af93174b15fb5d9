// The calibrate command: measures which policy suits a model best and stores it beside the model.
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/calibration.h"
#include "io/file.h"
#include "sluice/errors.h"
#include "sluice/version.h"
#include "tools/calibration.h"
#include "tools/commands.h"
#include "tools/flags.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/void_flags.h"

namespace sluice::tools {
namespace {

constexpr int kStepTokens = 32;  // for presets that compare answers, not bytes

struct CalibrateFlags {
  ModelFlags model;
  TaskOptions options;
  std::string preset = "tidaldecode";
  std::string text;
  std::vector<std::int64_t> budgets = {64, 256};
  LayerChoices choices;
  bool dry_run = false;
  std::string json;
  bool force = false;
  std::string foreign;  // first flag given that belongs to the other preset; empty: none
};

template <typename T>
void require_all(const std::vector<T>& values, T least, T most, const std::string& flag) {
  for (const T value : values) {
    if (value >= least && value <= most) continue;
    throw Error(ErrorCode::usage, flag + " is " + std::to_string(value) + "; it has to be from " +
                                      std::to_string(least) + " to " + std::to_string(most));
  }
}

void validate(const CalibrateFlags& flags, const ModelInfo& info) {
  if (flags.preset == "tidaldecode") require_anchors(info);
  for (const std::int64_t budget : flags.budgets) {
    if (budget < 1) throw Error(ErrorCode::usage, "--budget must be at least 1");
  }
  require_all<std::int64_t>(flags.choices.rows, 0, std::int64_t{1} << 31, "--rows");
  require_all(flags.choices.value_bits, 1, 4, "--value-bits");
  require_all(flags.choices.key_bits, 1, 4, "--key-bits");
  if (!(flags.choices.loss > 0.0) || !std::isfinite(flags.choices.loss)) {
    throw Error(ErrorCode::usage, "--loss has to be a number above 0");
  }
  validate(flags.options);
  if (flags.foreign.empty()) return;
  throw Error(ErrorCode::usage,
              flags.foreign + " is no flag of --preset " + flags.preset + "; leave it out");
}

// The first flag given that belongs to the other preset; empty if there is none.
std::string foreign_flag(const CLI::App& app, const std::string& preset) {
  const std::vector<const char*> anchors = {"--budget", "--needles", "--seed"};
  const std::vector<const char*> values = {"--loss",       "--save",     "--rows",
                                           "--value-bits", "--key-bits", "--tokens"};
  for (const char* const flag : preset == "values" ? anchors : values) {
    if (app.count(flag) > 0) return flag;
  }
  return {};
}

// The requested settings and the policy found.
nlohmann::json report_of(const CalibrateFlags& flags, const Calibration& found) {
  nlohmann::json report = {{"version", kVersion},
                           {"model", flags.model.model},
                           {"text", flags.text},
                           {"preset", flags.preset},
                           {"context", flags.options.context},
                           {"seed", flags.options.seed},
                           {"rounds", flags.options.rounds},
                           {"step_tokens", flags.options.step_tokens},
                           {"device_memory", flags.model.device_memory},
                           {"policy", to_string(found.policy)},
                           {"stored", !flags.dry_run}};
  if (flags.preset == "tidaldecode") {
    report["needles"] = flags.options.needles;
  } else {
    report["tokens"] = flags.options.tokens;
  }
  report.update(found.report);
  return report;
}

int run(const CalibrateFlags& flags) {
  require_writable(flags.json, flags.model.model, flags.text, flags.force);
  Engine engine = Engine::open(flags.model.config());
  validate(flags, engine.info());
  if (!flags.dry_run) require_storable(flags.model.model);
  const std::string text = read_text_file(flags.text, kMaxTextBytes);
  const PassageBuilder passages(engine.tokenizer(), engine.encode_prompt(""), text, flags.options);
  // A plan that does not fit in host memory fails here, before the weights are loaded.
  const Plan plan = engine.plan(flags.options.context);
  print_error(void_on_device(flags.model, plan.on_device));
  engine.load_weights();
  const Calibration found = flags.preset == "tidaldecode"
                                ? calibrate_anchors(engine, passages, flags.options, flags.budgets)
                                : calibrate_layers(engine, passages, flags.options, flags.choices);
  print_beside_report(flags.json, found.table + "best: " + to_string(found.policy) + "\n");
  if (!flags.dry_run) {
    store_calibration(flags.model.model, flags.preset, found.policy);
    print_beside_report(flags.json,
                        "stored as the preset " + flags.preset + " of " + flags.model.model + "\n");
  }
  if (!flags.json.empty())
    write_report(flags.json, flags.force, report_text(report_of(flags, found)));
  return 0;
}

}  // namespace

Command add_calibrate(CLI::App& app) {
  const auto flags = std::make_shared<CalibrateFlags>();
  flags->model.add_to(app);
  flags->options.step_tokens = kStepTokens;
  app.add_option("--preset", flags->preset,
                 "what is fitted to the model: tidaldecode, the layers that select; values, what "
                 "every layer keeps")
      ->check(CLI::IsMember({"tidaldecode", "values"}))
      ->capture_default_str();
  app.add_option("-t,--text", flags->text, "text that contexts are cut from, unseen in training")
      ->required();
  add_integer(app, "--length", flags->options.context, "tokens of context")->capture_default_str();
  add_integer(app, "--budget", flags->budgets,
              "of tidaldecode: tokens kept per KV head; may be given several times, all count")
      ->capture_default_str();
  app.add_option("--loss", flags->choices.loss,
                 "of values: most nats per token, KL of dense attention's answers to its own")
      ->capture_default_str();
  app.add_option_function<std::string>(
         "--save",
         [flags](const std::string& what) {
           flags->choices.saving = what == "device" ? Saving::device : Saving::bus;
         },
         "of values: what is saved first, rows fetched or memory of the index")
      ->check(CLI::IsMember({"bus", "device"}))
      ->default_str("bus");
  add_integer(app, "--rows", flags->choices.rows,
              "of values: exact tokens that a layer may keep per KV head; several times")
      ->capture_default_str();
  add_integer(app, "--value-bits", flags->choices.value_bits,
              "of values: bits that a layer may keep values in; several times")
      ->capture_default_str();
  add_integer(app, "--key-bits", flags->choices.key_bits,
              "of values: bits that a layer may keep keys in; several times")
      ->capture_default_str();
  add_integer(app, "--rounds", flags->options.rounds, "contexts")->capture_default_str();
  add_integer(app, "--needles", flags->options.needles, "of tidaldecode: needles per context")
      ->capture_default_str();
  add_integer(app, "--tokens", flags->options.tokens, "of values: tokens compared per context")
      ->capture_default_str();
  add_integer(app, "--seed", flags->options.seed, "of tidaldecode: of needles and their places")
      ->capture_default_str();
  app.add_flag("--dry-run", flags->dry_run, "print the table, store nothing");
  auto* json = app.add_option("--json", flags->json,
                              "write every number to this file, - for standard output");
  add_force(app, flags->force, "--json")->needs(json);
  return [flags, &app] {
    flags->foreign = foreign_flag(app, flags->preset);
    flags->options.step_tokens = flags->model.of_step(flags->options.step_tokens);
    return run(*flags);
  };
}

}  // namespace sluice::tools
