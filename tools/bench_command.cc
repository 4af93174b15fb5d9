#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/file_draft.h"
#include "lib/bytes.h"
#include "sluice/errors.h"
#include "tools/bench_report.h"
#include "tools/commands.h"
#include "tools/eval_tasks.h"
#include "tools/exit_code.h"
#include "tools/flags.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/policy_help.h"
#include "tools/run_record.h"

namespace sluice::tools {
namespace {

constexpr const char* kExample =
    "Example: two policies beside dense attention, all rows resident and under a cap,\n"
    "and a plot of them (bench/plot_bench.py, with python3-matplotlib):\n"
    "  sluice bench -m DIR -t BOOK.txt --policy values quest --context 8K 16K \\\n"
    "    --device-memory none 64MiB --bus 12.5GB/s,10us --json bench.json\n"
    "  bench/plot_bench.py bench.json\n";

struct BenchFlags {
  ModelFlags model;
  std::string text;
  std::vector<std::string> policies = {"values", "quest"};
  std::vector<std::string> contexts = {"8K"};
  std::vector<std::string> caps;
  std::vector<int> sequences = {1};
  std::vector<std::string> buses;
  BenchSteps steps;
  std::string json;
  std::string csv;
  bool no_baseline = false;
  bool force = false;
  bool resume = false;
};

struct Method {
  std::string name;
  std::string line;
  Policy policy;
};

// A cell that is to be measured.
struct Wanted {
  CellKey key;
  Method method;
};

std::vector<std::int64_t> contexts_of(const BenchFlags& flags) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 30;
  std::vector<std::int64_t> contexts;
  for (const std::string& text : flags.contexts) {
    const std::uint64_t tokens = parse_bytes(text, "--context");
    if (tokens < 1 || tokens > kMost) {
      throw Error(ErrorCode::usage,
                  "--context " + text + " is out of range; give 1 to 1073741824 tokens, as 8K");
    }
    contexts.push_back(static_cast<std::int64_t>(tokens));
  }
  return contexts;
}

// The caps, none first, because later cells are compared with dense attention over resident rows.
std::vector<std::string> caps_of(const BenchFlags& flags) {
  std::vector<std::string> caps;
  for (const std::string& cap : flags.caps) {
    const std::string text = cap == "none" ? "" : cap;
    static_cast<void>(parse_cap(text, "--device-memory"));
    if (std::find(caps.begin(), caps.end(), text) == caps.end()) caps.push_back(text);
  }
  if (caps.empty()) caps.emplace_back();
  std::stable_partition(caps.begin(), caps.end(),
                        [](const std::string& cap) { return cap.empty(); });
  return caps;
}

void validate(const BenchFlags& flags) {
  const auto require = [](bool holds, const char* message) {
    if (!holds) throw Error(ErrorCode::usage, message);
  };
  require(flags.steps.steps >= 1 && flags.steps.steps <= 10000, "--steps must be 1 to 10000");
  require(flags.steps.warm_up >= 0 && flags.steps.warm_up <= 10000, "--warm-up must be 0 to 10000");
  for (const int count : flags.sequences) {
    require(count >= 1 && count <= 64, "--sequences must be 1 to 64");
  }
  require_resumable(flags.resume, flags.json);
}

std::vector<Bus> buses_of(const BenchFlags& flags) {
  std::vector<Bus> buses;
  for (const std::string& text : flags.buses) buses.push_back(parse_bus(text, "--bus"));
  return buses;
}

Engine open(const ModelFlags& flags, const std::string& cap) {
  ModelFlags model = flags;
  model.device_memory = cap;
  return Engine::open(model.config());
}

std::vector<Method> methods_of(const BenchFlags& flags, const Engine& engine) {
  const Scorers scorers = flags.model.config().scorers;
  std::vector<Method> methods;
  if (!flags.no_baseline) methods.push_back({"dense", to_string(Policy()), Policy()});
  for (const std::string& text : flags.policies) {
    const Policy policy = engine.policy(text);
    sluice::validate(policy, engine.info().kv, scorers);
    if (policy == Policy() && !flags.no_baseline) continue;
    methods.push_back({text, to_string(policy), policy});
  }
  return methods;
}

// Cap by cap, because a cap needs an engine of its own. Dense attention without a cap comes first.
std::vector<Wanted> cells_of(const BenchFlags& flags, const std::vector<Method>& methods) {
  std::vector<Wanted> cells;
  const auto add = [&](const std::string& cap, const Method& method) {
    for (const std::int64_t context : contexts_of(flags)) {
      for (const int sequences : flags.sequences) {
        cells.push_back({{method.name, context, cap, sequences}, method});
      }
    }
  };
  const std::vector<std::string> caps = caps_of(flags);
  if (!flags.no_baseline && !caps.front().empty()) add("", methods.front());
  for (const std::string& cap : caps) {
    for (const Method& method : methods) add(cap, method);
  }
  return cells;
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

void require_csv_writable(const std::string& path, bool force) {
  std::error_code ignored;
  if (path.empty()) return;
  require_replaceable(path);
  if (force || !std::filesystem::exists(path, ignored)) return;
  std::ifstream file(path);
  std::string head;
  std::getline(file, head);
  if (head.empty() || head + "\n" == bench_csv(nlohmann::json::array())) return;
  throw Error(ErrorCode::usage, path +
                                    ": is a file that is there already and no table of this "
                                    "command; choose another file, or give `force`");
}

void write_csv(const std::string& path, const nlohmann::json& cells) {
  if (!path.empty()) replace_file(path, bench_csv(cells));
}

// The engine of one cap at a time, because two would take twice the memory.
class Engines {
 public:
  explicit Engines(const ModelFlags& flags) : flags_(flags), engine_(open(flags, "")) {}

  // The engine without a cap, whose weights need not be loaded.
  const Engine& first() const { return *engine_; }
  // The engine under `cap`, with weights. Throws Error{memory} if the cap is too small for it.
  Engine& under(const std::string& cap) {
    if (!engine_ || cap != cap_) {
      engine_.reset();
      cap_ = cap;
      engine_ = open(flags_, cap);
    }
    engine_->load_weights();
    return *engine_;
  }

 private:
  const ModelFlags& flags_;
  std::string cap_;
  std::optional<Engine> engine_;
};

// Caps that are too small are an answer; anything else would go wrong in other cells, too.
bool is_answer(const Error& error) {
  return error.code() == ErrorCode::memory || error.code() == ErrorCode::unsupported;
}

// Contexts beyond the model, and plans that are wrong for any cap, are refused before the weights
// are loaded.
void require_plans(const Engine& engine, const std::vector<Wanted>& cells,
                   const BenchSteps& steps) {
  const std::int64_t trained = engine.info().trained_context;
  for (const Wanted& wanted : cells) {
    const std::int64_t tokens = tokens_of(wanted.key, steps);
    if (trained > 0 && tokens > trained) {
      throw Error(ErrorCode::usage, "--context " + std::to_string(wanted.key.context) +
                                        " with its steps is " + std::to_string(tokens) +
                                        " tokens, but the model was trained for " +
                                        std::to_string(trained));
    }
    try {
      static_cast<void>(engine.plan(session_of(wanted.key, wanted.method.policy, steps)));
    } catch (const Error& error) {
      if (!is_answer(error)) throw;
    }
  }
}

// Dense attention's answers by context and number of sequences.
using DenseByCell = std::map<std::pair<std::int64_t, int>, DenseAnswers>;

nlohmann::json measure(Engines& engines, const Wanted& wanted, const BenchSteps& steps,
                       const Texts& texts, std::span<const Bus> buses, DenseByCell& dense) {
  const CellKey& key = wanted.key;
  try {
    const std::vector<std::vector<TokenId>> parts = texts.parts(key, steps);
    const std::vector<std::span<const TokenId>> views(parts.begin(), parts.end());
    Engine& engine = engines.under(key.device_memory);
    DenseAnswers& answers = dense[{key.context, key.sequences}];
    if (answers.empty() && wanted.method.policy != Policy()) {
      static_cast<void>(run_cell(engine, key, Policy(), steps, views, answers));
    }
    const CellResult result = run_cell(engine, key, wanted.method.policy, steps, views, answers);
    return cell_json(key, wanted.method.line, result, buses);
  } catch (const Error& error) {
    if (!is_answer(error)) throw;
    return cell_json(key, wanted.method.line, error);
  }
}

// The exit code of the first cell that could not run; 0 if there is none.
int exit_code_of(const nlohmann::json& cells) {
  for (const nlohmann::json& cell : cells) {
    if (cell.contains("error")) return cell["error"]["exit_code"].get<int>();
  }
  return 0;
}

int run(const BenchFlags& flags) {
  validate(flags);
  const std::vector<Bus> buses = buses_of(flags);
  require_writable(flags.json, flags.model.model, flags.text, flags.force);
  require_csv_writable(flags.csv, flags.force);
  Engines engines(flags.model);
  const std::vector<Method> methods = methods_of(flags, engines.first());
  const std::vector<Wanted> cells = cells_of(flags, methods);
  const Texts texts(engines.first(), flags.text);
  for (const Wanted& wanted : cells) texts.require(wanted.key, flags.steps);
  require_plans(engines.first(), cells, flags.steps);
  GrowingReport report(flags.json, flags.force, flags.resume,
                       {{"schema", "sluice-bench-1"},
                        {"run", run_record(flags.model, flags.text)},
                        {"model", flags.model.model},
                        {"text", flags.text},
                        {"steps", flags.steps.steps},
                        {"warm_up", flags.steps.warm_up}});
  ProgressBar bar("bench");
  DenseByCell dense;
  nlohmann::json shown = nlohmann::json::array();
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const Wanted& wanted = cells[i];
    const nlohmann::json key = json_of(wanted.key);
    bar.update(static_cast<double>(i) / static_cast<double>(cells.size()), wanted.key.policy);
    if (const nlohmann::json* const finished = report.find(key)) {
      shown.push_back(*finished);
      continue;
    }
    report.add(measure(engines, wanted, flags.steps, texts, buses, dense));
    shown.push_back(report.results().back());
    write_csv(flags.csv, shown);
  }
  bar.clear();
  write_csv(flags.csv, shown);
  print_beside_report(flags.json, bench_table(shown));
  report.finish();
  const int code = exit_code_of(shown);
  if (code != 0) print_error("sluice: some cells could not run; the table says why\n");
  return code;
}

}  // namespace

Command add_bench(CLI::App& app) {
  const auto flags = std::make_shared<BenchFlags>();
  flags->model.add_to(app);
  flags->model.add_scorers_to(app);
  // One cap becomes several, and no plan decides them.
  flags->model.planned.clear();
  app.remove_option(app.get_option("--device-memory"));
  app.footer(std::string(kExample) + "\n" + policy_help() + "\n" + app.get_footer());
  app.add_option("-t,--text", flags->text, "text that the sequences read, each another part")
      ->required();
  app.add_option("--policy", flags->policies,
                 "a preset or a policy line; may be given several times. dense is always measured")
      ->capture_default_str();
  app.add_option("--context", flags->contexts, "tokens before the steps, as 8192 or 8K; several")
      ->capture_default_str();
  app.add_option("--device-memory", flags->caps,
                 "cap on the device tier, as 64MiB, or none; several. On a GPU it covers weights "
                 "and activations, too. Dense attention is measured without a cap, too. Default: "
                 "none");
  add_integer(app, "--sequences", flags->sequences,
              "sequences that decode together, 1 to 64; several")
      ->capture_default_str();
  add_integer(app, "--steps", flags->steps.steps, "decode steps that are measured")
      ->capture_default_str();
  add_integer(app, "--warm-up", flags->steps.warm_up, "decode steps before those that are measured")
      ->capture_default_str();
  app.add_option("--bus", flags->buses,
                 "RATE,LATENCY, as 12.5GB/s,10us: models the steps over a bus with this rate and "
                 "this latency per request; several")
      ->allow_extra_args();
  app.add_flag("--no-baseline", flags->no_baseline, "do not add dense attention to the table");
  auto* json = app.add_option("--json", flags->json,
                              "write every number to this file, after each cell; - for standard "
                              "output");
  app.add_option("--csv", flags->csv, "write the table to this file as CSV");
  app.add_flag("--resume", flags->resume,
               "keep the finished cells of the report at --json, which the same command wrote");
  add_force(app, flags->force, "--json")->needs(json);
  return [flags] { return run(*flags); };
}

}  // namespace sluice::tools
