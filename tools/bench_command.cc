#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "io/file_draft.h"
#include "lib/bytes.h"
#include "sluice/errors.h"
#include "sluice/planning.h"
#include "tools/bench_flags.h"
#include "tools/bench_record.h"
#include "tools/bench_report.h"
#include "tools/bench_subject.h"
#include "tools/bench_transfer.h"
#include "tools/commands.h"
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
    "and a plot of them (with python3-matplotlib; installed as\n"
    "PREFIX/share/sluice/plot_bench.py):\n"
    "  sluice bench -m DIR -t BOOK.txt --policy values quest --context 8K 16K \\\n"
    "    --device-memory none 64MiB --bus 12.5GB/s,10us --json bench.json\n"
    "  bench/plot_bench.py bench.json\n"
    "The same of q, k and v of any model, and of made-up ones at a model's shape:\n"
    "  sluice bench --arrays FILE.safetensors --policy values --device-memory 64MiB\n"
    "  sluice bench --shape llama3-8b --policy values --device-memory 256MiB\n"
    "A scorer of your own, from the installed headers alone; its name is what the\n"
    "library calls it (PREFIX/share/doc/sluice/examples/scorer has one, signs):\n"
    "  c++ -std=c++20 -O3 -fPIC -shared -I PREFIX/include signs.cc library.cc \\\n"
    "    -o signs.so\n"
    "  sluice bench --shape llama3.2-1b --scorer ./signs.so --device-memory 128MiB \\\n"
    "    --policy \"select=signs prune=top_k(64)\" \"select=signs prune=top_p(0.9)\"\n";

std::vector<std::int64_t> contexts_of(const BenchFlags& flags, const BenchSubject& subject) {
  if (flags.contexts.empty()) return subject.contexts();
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

void require_usage(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::usage, message);
}

// Flags that do not go with what is measured; none has a silent effect.
void refuse_flags(const CLI::App& app, std::initializer_list<const char*> names, const char* why) {
  for (const char* const name : names) {
    require_usage(app.count(name) == 0, std::string(name) + " " + why);
  }
}

void require_subject(const CLI::App& app, const BenchFlags& flags) {
  const int count = (flags.model.model.empty() ? 0 : 1) + (flags.arrays.empty() ? 0 : 1) +
                    (flags.positions.empty() ? 0 : 1) + (flags.shape.empty() ? 0 : 1);
  require_usage(count == 1,
                "give one of --model with --text, --arrays, --positions and --shape: what is "
                "measured");
  if (!flags.model.model.empty()) require_usage(!flags.text.empty(), "--text is required");
  if (flags.model.model.empty()) {
    refuse_flags(app, {"--text", "--record", "--compute", "--weights", "--host-attention"},
                 "goes with --model");
  }
  if (flags.arrays.empty()) refuse_flags(app, {"--scale"}, "goes with --arrays");
  if (!flags.positions.empty()) {
    refuse_flags(app, {"--policy", "--context", "--record-positions", "--scorer"},
                 "does not go with --positions, which say what is selected");
  }
  if (flags.shape.empty()) {
    refuse_flags(app, {"--seed", "--logit-std", "--heavy-share", "--heavy-weight", "--persistence"},
                 "goes with --shape");
  }
}

void validate_flags(const CLI::App& app, const BenchFlags& flags) {
  require_subject(app, flags);
  for (const int count : flags.sequences) {
    require_usage(count >= 1 && count <= 64, "--sequences must be 1 to 64");
  }
  const bool is_scale = !flags.scale || (*flags.scale > 0.0 && *flags.scale <= 1e6);
  require_usage(is_scale, "--scale must be above 0, up to 1e6");
  static_cast<void>(steps_of(flags, {}));
  require_usage(!flags.force || !flags.json.empty() || !flags.csv.empty() ||
                    !flags.record.empty() || !flags.record_positions.empty(),
                "--force goes with --json, --csv, --record or --record-positions");
  for (const auto& [name, path] : {std::pair("--record", flags.record),
                                   std::pair("--record-positions", flags.record_positions)}) {
    require_usage(path != "-", std::string(name) + " takes a file, not standard output");
    require_usage(path.empty() || !flags.resume,
                  std::string(name) + " goes with a run from its beginning, not with --resume");
  }
  for (const std::string& name : flags.transfers) static_cast<void>(parse_transfer(name));
  if (flags.check || !flags.transfers.empty()) {
    refuse_flags(app, {"--disk"}, "does not go with --check and --transfer, which count no disks");
  }
  require_resumable(flags.resume, flags.json);
}

std::vector<Bus> buses_of(const BenchFlags& flags) {
  std::vector<Bus> buses;
  for (const std::string& text : flags.buses) buses.push_back(parse_bus(text, "--bus"));
  return buses;
}

std::vector<BenchMethod> methods_of(const BenchFlags& flags, const BenchSubject& subject) {
  std::vector<BenchMethod> methods;
  if (!flags.no_baseline) methods.push_back({"dense", to_string(Policy()), Policy()});
  if (const std::optional<BenchMethod> own = subject.method()) {
    methods.push_back(*own);
    return methods;
  }
  for (const std::string& text : flags.policies) {
    const Policy policy = subject.policy(text);
    if (policy == Policy() && !flags.no_baseline) continue;
    methods.push_back({text, to_string(policy), policy});
  }
  return methods;
}

// Cap by cap, because a cap needs an engine of its own. Dense attention without a cap comes first.
std::vector<WantedCell> cells_of(const BenchFlags& flags, const BenchSubject& subject) {
  const std::vector<BenchMethod> methods = methods_of(flags, subject);
  std::vector<WantedCell> cells;
  const auto add = [&](const std::string& cap, const BenchMethod& method) {
    for (const std::int64_t context : contexts_of(flags, subject)) {
      for (const int sequences : flags.sequences) {
        cells.push_back({{method.name, context, cap, sequences}, method});
      }
    }
  };
  const std::vector<std::string> caps = caps_of(flags);
  if (!flags.no_baseline && !caps.front().empty()) add("", methods.front());
  for (const std::string& cap : caps) {
    for (const BenchMethod& method : methods) add(cap, method);
  }
  return cells;
}

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

std::unique_ptr<BenchSubject> subject_of(const BenchFlags& flags) {
  if (!flags.arrays.empty()) return array_subject(flags);
  if (!flags.positions.empty()) return positions_subject(flags);
  return flags.shape.empty() ? model_subject(flags) : made_up_subject(flags);
}

nlohmann::json measure(BenchSubject& subject, const WantedCell& wanted,
                       std::span<const Bus> buses) {
  try {
    return cell_json(wanted.key, wanted.method.line, subject.run(wanted), buses);
  } catch (const Error& error) {
    if (!is_answer(error)) throw;
    return cell_json(wanted.key, wanted.method.line, exit_code(error.code()), error.what());
  } catch (const LedgerDiffers& differs) {
    return cell_json(wanted.key, wanted.method.line, kDifferenceExit, differs.what());
  }
}

nlohmann::json head_of(const BenchSubject& subject) {
  nlohmann::json head = subject.head();
  head["schema"] = "sluice-bench-1";
  head["steps"] = subject.steps().steps;
  head["warm_up"] = subject.steps().warm_up;
  return head;
}

// Files that the command reads besides the checkpoint's.
std::vector<std::string> inputs_of(const BenchFlags& flags) {
  std::vector<std::string> inputs = {flags.text, flags.shape, flags.arrays, flags.positions};
  if (flags.arrays.empty()) return inputs;
  for (const char* const name : {"/q.npy", "/k.npy", "/v.npy"}) {
    inputs.push_back(flags.arrays + name);
  }
  return inputs;
}

void require_outputs(const BenchFlags& flags) {
  for (const std::string& input : inputs_of(flags)) {
    require_writable(flags.json, flags.model.model, input, flags.force);
    require_writable(flags.csv, flags.model.model, input, true);
    require_writable(flags.record, flags.model.model, input, true);
    require_writable(flags.record_positions, flags.model.model, input, true);
  }
  require_csv_writable(flags.csv, flags.force);
  require_recordable_to(flags.record, "--record", flags.force);
  require_recordable_to(flags.record_positions, "--record-positions", flags.force);
  const std::vector<std::string> outputs = {flags.json, flags.csv, flags.record,
                                            flags.record_positions};
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      require_usage(!is_one_file(outputs[i], outputs[j]),
                    "--json, --csv, --record and --record-positions have to name files of their "
                    "own");
    }
  }
}

// The exit code of the first cell that could not run; 0 if there is none.
int exit_code_of(const nlohmann::json& cells) {
  for (const nlohmann::json& cell : cells) {
    if (cell.contains("error")) return cell["error"]["exit_code"].get<int>();
  }
  return 0;
}

int run(const CLI::App& app, const BenchFlags& flags) {
  validate_flags(app, flags);
  const std::vector<Bus> buses = buses_of(flags);
  require_outputs(flags);
  const std::unique_ptr<BenchSubject> subject = subject_of(flags);
  const std::vector<WantedCell> cells = cells_of(flags, *subject);
  subject->require(cells);
  GrowingReport report(flags.json, flags.force, flags.resume, head_of(*subject));
  subject->prepare(cells);
  ProgressBar bar("bench");
  nlohmann::json shown = nlohmann::json::array();
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const WantedCell& wanted = cells[i];
    const nlohmann::json key = json_of(wanted.key);
    bar.update(static_cast<double>(i) / static_cast<double>(cells.size()), wanted.key.policy);
    if (const nlohmann::json* const finished = report.find(key)) {
      shown.push_back(*finished);
      continue;
    }
    report.add(measure(*subject, wanted, buses));
    shown.push_back(report.results().back());
    write_csv(flags.csv, shown);
  }
  bar.clear();
  write_csv(flags.csv, shown);
  print_beside_report(flags.json, bench_table(shown));
  report.finish();
  const int code = exit_code_of(shown);
  if (code != 0)
    print_error("sluice: some cells could not run or failed their check; the table says why\n");
  return code;
}

// Flags that say what is measured.
void add_subject(CLI::App& app, BenchFlags& flags) {
  app.get_option("--model")->required(false);
  app.add_option("-t,--text", flags.text,
                 "with --model: text that the sequences read, each another part");
  app.add_option("--arrays", flags.arrays,
                 "instead of a model: a safetensors file with its q, k and v, or a folder with "
                 "q.npy, k.npy and v.npy, after RoPE: q [layers, steps, query heads, head_dim], k "
                 "and v [layers, tokens, KV heads, head_dim], tokens being the context and one per "
                 "step");
  app.add_option("--scale", flags.scale, "with --arrays: of logits. Default: 1/sqrt(head_dim)");
  std::string names;
  for (const std::string& name : shape_names()) names += (names.empty() ? "" : ", ") + name;
  app.add_option("--shape", flags.shape,
                 "instead of a model: made-up q, k and v at the shape of one, " + names +
                     "; or its config.json. Losses then say nothing about that model");
  add_integer(app, "--seed", flags.seed, "with --shape: of the made-up numbers")
      ->capture_default_str();
  app.add_option("--logit-std", flags.statistics.logit_std,
                 "with --shape: standard deviation of the logits, 0 to 8")
      ->capture_default_str();
  app.add_option("--heavy-share", flags.statistics.heavy_share,
                 "with --shape: share of heavy tokens per step and KV head, up to 1/8 (0.125)")
      ->capture_default_str();
  app.add_option("--heavy-weight", flags.statistics.heavy_weight,
                 "with --shape: share of the attention weight that heavy tokens have")
      ->capture_default_str();
  app.add_option("--persistence", flags.statistics.persistence,
                 "with --shape: share of heavy tokens that stay so in the next step, 0.125 to 1")
      ->capture_default_str();
  app.add_option("--record", flags.record,
                 "with --model: write q, k and v of the first cell's first sequence to this "
                 "safetensors file, which --arrays reads");
  app.add_option("--positions", flags.positions,
                 "instead of a model: a trace of the positions that a policy selected, as "
                 "--record-positions writes it");
  app.add_option("--record-positions", flags.record_positions,
                 "write the positions that the first cell's first sequence selects to this "
                 "safetensors file, which --positions reads");
}

}  // namespace

BenchSteps steps_of(const BenchFlags& flags, const BenchSteps& otherwise) {
  BenchSteps steps;
  steps.steps = flags.steps.value_or(otherwise.steps);
  steps.warm_up = flags.warm_up.value_or(otherwise.warm_up);
  require_usage(steps.steps >= 1 && steps.steps <= 10000, "--steps must be 1 to 10000");
  require_usage(steps.warm_up >= 0 && steps.warm_up <= 10000, "--warm-up must be 0 to 10000");
  return steps;
}

Command add_bench(CLI::App& app) {
  const auto flags = std::make_shared<BenchFlags>();
  flags->model.add_to(app);
  flags->model.add_scorers_to(app);
  // One cap becomes several, and no plan decides them.
  flags->model.planned.clear();
  app.remove_option(app.get_option("--device-memory"));
  app.footer(std::string(kExample) + "\n" + policy_help() + "\n" + app.get_footer());
  add_subject(app, *flags);
  app.add_option("--policy", flags->policies,
                 "a preset or a policy line; may be given several times. dense is always measured")
      ->capture_default_str();
  app.add_option("--context", flags->contexts,
                 "tokens before the steps, as 8192 or 8K; several. Default: 8K; of arrays all, and "
                 "if fewer are given, the newest");
  app.add_option("--device-memory", flags->caps,
                 "cap on the device tier, as 64MiB, or none; several. On a GPU it covers weights "
                 "and activations, too. Dense attention is measured without a cap, too. Default: "
                 "none");
  add_integer(app, "--sequences", flags->sequences,
              "sequences that decode together, 1 to 64; several")
      ->capture_default_str();
  app.add_option("--steps", flags->steps,
                 "decode steps that are measured. Default: 16; of arrays all that are left")
      ->transform(whole_number<int>());
  app.add_option("--warm-up", flags->warm_up,
                 "decode steps before those that are measured. Default: 4")
      ->transform(whole_number<int>());
  app.add_option("--bus", flags->buses,
                 "RATE,LATENCY, as 12.5GB/s,10us: models the steps over a bus with this rate and "
                 "this latency per request; several")
      ->allow_extra_args();
  app.add_flag("--check", flags->check,
               "run each cell a second time, count every row that its steps read and write apart "
               "from the ledger, and fail with exit code 1 where the ledger has something else");
  app.add_option("--transfer", flags->transfers,
                 "run each cell a second time, as --check does, and bring the rows that its steps "
                 "missed in other ways, with the time of each: gather (one kernel per layer), rows "
                 "(a copy per run of "
                 "neighbouring rows), batched (the same copies, a request per layer), page16 or "
                 "page128 (a copy per page that has such a row; also 8, 32 and 64); several");
  app.add_flag("--no-baseline", flags->no_baseline, "do not add dense attention to the table");
  app.add_option("--json", flags->json,
                 "write every number to this file, after each cell; - for standard output");
  app.add_option("--csv", flags->csv, "write the table to this file as CSV");
  app.add_flag("--resume", flags->resume,
               "keep the finished cells of the report at --json, which the same command wrote");
  add_force(app, flags->force, "--json, --csv, --record or --record-positions");
  return [flags, &app] { return run(app, *flags); };
}

}  // namespace sluice::tools
