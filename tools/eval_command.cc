#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/file.h"
#include "sluice/errors.h"
#include "sluice/version.h"
#include "tools/commands.h"
#include "tools/eval_data.h"
#include "tools/eval_parts.h"
#include "tools/eval_report.h"
#include "tools/eval_runner.h"
#include "tools/flags.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/plan_flag.h"
#include "tools/policy_help.h"
#include "tools/run_record.h"
#include "tools/void_flags.h"

namespace sluice::tools {
namespace {

struct EvalFlags {
  ModelFlags model;
  TaskOptions options;
  std::string text;
  std::vector<std::string> data;
  std::vector<std::string> tasks = {"needle"};
  std::vector<std::int64_t> lengths = {8192};
  std::int64_t most = 0;  // tokens of a prompt in `data` with its answer; 0: as trained
  std::vector<std::string> policies = {"streaming", "quest", "sparq", "twilight", "sluice"};
  std::string dense_kv_type;
  std::string json;
  bool force = false;
  bool resume = false;
};

// "needle, multikey, ... or repetition"
std::string task_names() {
  std::string names;
  for (const std::string_view name : kTaskNames) {
    if (name != kTaskNames.front()) names += name == kTaskNames.back() ? " or " : ", ";
    names += name;
  }
  return names;
}

Task parse_task(const std::string& name) {
  const auto* const at = std::find(kTaskNames.begin(), kTaskNames.end(), name);
  if (at != kTaskNames.end()) return static_cast<Task>(at - kTaskNames.begin());
  throw Error(ErrorCode::usage, "--task '" + name + "' is unknown; give " + task_names());
}

void validate(const EvalFlags& flags) {
  TaskOptions options = flags.options;
  for (const std::int64_t length : flags.lengths) {
    options.context = length;
    validate(options);
  }
}

// One policy per argument, because policy lines contain commas.
std::vector<NamedPolicy> parse_policies(const Engine& engine, const Scorers& scorers,
                                        const std::vector<std::string>& texts, bool keeps_dense) {
  std::vector<NamedPolicy> policies;
  for (const std::string& text : texts) {
    const Policy policy = engine.policy(text);
    validate(policy, engine.info().kv, scorers);
    if (policy == Policy() && !keeps_dense) continue;  // dense always runs
    policies.push_back({text, policy});
  }
  return policies;
}

// The engine whose dense attention all are compared with, if its rows are of another type.
std::optional<Engine> exact_engine(const EvalFlags& flags) {
  if (flags.dense_kv_type.empty() || flags.dense_kv_type == flags.model.kv_dtype) return {};
  ModelFlags model = flags.model;
  model.kv_dtype = flags.dense_kv_type;
  return Engine::open(model.config());
}

std::int64_t most_of(const std::vector<std::int64_t>& lengths) {
  if (lengths.size() == 1) return lengths.front();
  throw Error(ErrorCode::usage,
              "--data takes one --length, the most tokens of a prompt and its answer");
}

// The tasks in the files of --data.
std::vector<DataSet> data_of(const EvalFlags& flags, const Engine& engine) {
  DataReader reader;
  reader.tokenizer = &engine.tokenizer();
  reader.prefix = engine.encode_prompt("");
  reader.ends = engine.info().eos;
  reader.tokens = flags.options.tokens;
  reader.most = flags.most > 0 ? flags.most : engine.info().trained_context;
  reader.limit = flags.most > 0 ? "--length is" : "the model was trained for";
  std::vector<DataSet> sets;
  for (const std::string& file : flags.data) sets.push_back(read_data(file, reader));
  return sets;
}

// A task and what makes its passages, which are long: only those of one task are in memory.
struct Work {
  Task task = Task::needle;
  std::string data;
  TaskOptions options;
  std::function<TaskInput()> input;  // called once at most
};

// The members of a report's result that identify it.
nlohmann::json key_of(const Work& work) {
  nlohmann::json key = {{"task", to_string(work.task)}, {"context", work.options.context}};
  if (!work.data.empty()) key["data"] = work.data;
  return key;
}

std::vector<Work> work_of_data(const EvalFlags& flags, const Engine& engine) {
  std::vector<Work> work;
  std::vector<DataSet> sets = data_of(flags, engine);
  for (std::size_t i = 0; i < sets.size(); ++i) {
    TaskOptions options = flags.options;
    options.context = sets[i].context;
    const auto input = std::make_shared<TaskInput>(
        TaskInput{sets[i].task, flags.data[i], sets[i].context, std::move(sets[i].passages)});
    work.push_back({input->task, input->data, options, [input] { return std::move(*input); }});
  }
  return work;
}

// Texts and lengths too short for any round are refused here.
std::vector<Work> work_of_text(const EvalFlags& flags, const Engine& engine,
                               const std::vector<Task>& tasks) {
  const std::string text = read_text_file(flags.text, kMaxTextBytes);
  std::vector<Work> work;
  for (const std::int64_t length : flags.lengths) {
    TaskOptions options = flags.options;
    options.context = length;
    const auto builder = std::make_shared<PassageBuilder>(engine.tokenizer(),
                                                          engine.encode_prompt(""), text, options);
    for (const Task task : tasks) {
      for (int round = 0; round < options.rounds; ++round) builder->build(task, round);
      work.push_back({task, {}, options, [=] { return input_of(*builder, task, options); }});
    }
  }
  return work;
}

std::string void_notes(const EvalFlags& flags, const std::vector<Task>& tasks) {
  return flags.data.empty() ? void_in_tasks(flags.options, tasks) : void_with_data(flags.options);
}

// The members of a report before its results.
nlohmann::json head_of(const EvalFlags& flags, const Engine& exact,
                       const std::vector<NamedPolicy>& policies) {
  nlohmann::json run = run_record(flags.model, flags.text, flags.data);
  // A preset may have been calibrated since.
  for (const NamedPolicy& policy : policies) run["policies"].push_back(to_string(policy.policy));
  return {{"schema", "sluice-eval-1"},
          {"run", run},
          {"version", kVersion},
          {"model", flags.model.model},
          {"text", flags.text},
          {"data", flags.data},
          {"seed", flags.options.seed},
          {"rounds", flags.options.rounds},
          {"needles", flags.options.needles},
          {"digits", flags.options.digits},
          {"tokens", flags.options.tokens},
          {"step_tokens", flags.options.step_tokens},
          {"kv_dtype", flags.model.kv_dtype},
          {"dense_kv_dtype", to_string(exact.info().kv.rows)},
          {"device_memory", flags.model.device_memory}};
}

// A result of the report. Passages that an earlier run measured are not measured again.
nlohmann::json measure(Engine& engine, Engine& exact, const Work& work,
                       const std::vector<NamedPolicy>& policies, GrowingReport& report,
                       ProgressBar& bar) {
  const nlohmann::json key = key_of(work);
  PassageLog log;
  for (const nlohmann::json& part : report.parts(key)) {
    log.done.push_back(part_of(part, policies.size() + 1));
  }
  log.add = [&](const PassageResults& passage) { report.add_part(key, part_json(passage)); };
  engine.load_weights();
  exact.load_weights();
  const TaskResult result = run_task(
      engine, exact, work.input(), work.options, policies, Sessions::own,
      [&](double share, const std::string& note) { bar.update(share, note); }, log);
  bar.clear();
  return eval_json(result, engine.info().kv);
}

int run(const EvalFlags& flags) {
  validate(flags);
  require_resumable(flags.resume, flags.json);
  require_writable(flags.json, flags.model.model, flags.text, flags.force);
  for (const std::string& file : flags.data) {
    require_writable(flags.json, flags.model.model, file, flags.force);
  }
  std::vector<Task> tasks;
  for (const std::string& name : flags.tasks) tasks.push_back(parse_task(name));
  const std::optional<PlanSettings> planned = plan_of(flags.model);
  const EngineConfig config = config_of(flags.model, planned);
  Engine engine = Engine::open(config);
  if (planned) require_model(*planned, engine.info());
  std::optional<Engine> exact = exact_engine(flags);
  const std::vector<NamedPolicy> policies =
      parse_policies(engine, config.scorers,
                     planned ? std::vector{planned->policy} : flags.policies, exact.has_value());
  const std::vector<Work> all =
      flags.data.empty() ? work_of_text(flags, engine, tasks) : work_of_data(flags, engine);
  // A plan that does not fit fails here, before the weights are loaded.
  std::int64_t longest = 0;
  for (const Work& work : all) longest = std::max(longest, work.options.context);
  const Plan plan = (exact ? *exact : engine).plan(longest);
  for (const NamedPolicy& policy : policies) {
    static_cast<void>(engine.plan(SessionOptions{longest, {policy.policy}, 1}));
  }
  print_error(void_on_device(flags.model, plan.on_device) + void_notes(flags, tasks));
  GrowingReport report(
      flags.json, flags.force, flags.resume,
      flags.json.empty() ? nlohmann::json() : head_of(flags, exact ? *exact : engine, policies));
  ProgressBar bar("eval");
  for (const Work& work : all) {
    if (const nlohmann::json* const finished = report.find(key_of(work))) {
      print_beside_report(flags.json, eval_table(*finished) + "\n");
      continue;
    }
    report.add(measure(engine, exact ? *exact : engine, work, policies, report, bar));
    print_beside_report(flags.json, eval_table(report.results().back()) + "\n");
  }
  report.finish();
  return 0;
}

}  // namespace

Command add_eval(CLI::App& app) {
  const auto flags = std::make_shared<EvalFlags>();
  flags->model.add_to(app);
  flags->model.add_scorers_to(app);
  app.footer(policy_help() + "\n" + app.get_footer());
  auto* text = app.add_option("-t,--text", flags->text,
                              "text that contexts are cut from, unseen in training");
  auto* task = app.add_option("--task", flags->tasks, task_names() + "; may be given several times")
                   ->capture_default_str();
  app.add_option("--data", flags->data,
                 "instead of --text: a file of tasks as JSON lines, with the fields of RULER "
                 "(input, outputs), of LongBench (context, input, answers) or text, whose last "
                 "--tokens are predicted; may be given several times")
      ->allow_extra_args(false)
      ->excludes(text)
      ->excludes(task);
  auto* length = add_integer(app, "--length", flags->lengths,
                             "tokens of context; may be given several times. With --data one: the "
                             "most of a prompt and its answer; default: as the model was trained")
                     ->capture_default_str();
  app.add_option("--policy", flags->policies,
                 "a preset or a policy line; may be given several times. dense always runs")
      ->capture_default_str();
  app.add_option("--dense-kv-dtype", flags->dense_kv_type,
                 "--kv-dtype of the dense attention that all are compared with, so that --policy "
                 "dense shows what the rows lose; loads the model twice. Default: the same")
      ->check(words_or({}, row_format_names()));
  add_integer(app, "--rounds", flags->options.rounds, "contexts per task and length")
      ->capture_default_str();
  add_integer(app, "--needles", flags->options.needles,
              "hidden numbers, common words or quoted passages that a context is asked for")
      ->capture_default_str();
  add_integer(app, "--digits", flags->options.digits, "digits of a needle's number")
      ->capture_default_str();
  add_integer(
      app, "--tokens", flags->options.tokens,
      "last tokens of a context, over which perplexity, agreement and drift are measured; most "
      "that a repetition goes on, or of an answer to --data")
      ->capture_default_str();
  add_integer(app, "--step-tokens", flags->options.step_tokens,
              "tokens that a decode step takes; more are faster, but dense layers then read rows "
              "once for all of them, and the bytes say so")
      ->capture_default_str();
  add_integer(app, "--seed", flags->options.seed,
              "of what is hidden and where, and of what drift draws")
      ->capture_default_str();
  auto* json = app.add_option("--json", flags->json,
                              "write every number to this file, as soon as it is known; - for "
                              "standard output");
  app.add_flag("--resume", flags->resume,
               "go on where the report at --json ends, which the same command wrote");
  add_force(app, flags->force, "--json")->needs(json);
  add_plan_flag(app, flags->model);
  return [flags, length] {
    if (flags->text.empty() && flags->data.empty()) {
      throw Error(ErrorCode::usage, "--text is required, or --data (see sluice eval --help)");
    }
    if (!flags->data.empty() && length->count() > 0) flags->most = most_of(flags->lengths);
    const int wanted = flags->options.step_tokens;
    flags->options.step_tokens = flags->model.of_step(wanted);
    if (flags->options.step_tokens < wanted) {
      print_error("note: a step takes the " + std::to_string(flags->options.step_tokens) +
                  " tokens of --chunk, not " + std::to_string(wanted) + "\n");
    }
    return run(*flags);
  };
}

}  // namespace sluice::tools
