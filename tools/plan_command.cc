#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "engine/planning/tables.h"
#include "lib/bytes.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/planning.h"
#include "sluice/topology.h"
#include "tools/commands.h"
#include "tools/flags.h"
#include "tools/generation.h"
#include "tools/model_flags.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

struct PlanFlags {
  std::string model;
  std::string shape;
  std::string context;
  std::string machine;
  std::string device;
  std::string device_memory;
  std::string host_memory;
  std::vector<std::string> disk;
  std::string weights = "auto";
  std::string rows = "auto";
  std::string policy = "auto";
  std::string json;
  std::optional<double> loss;
  int chunk = 0;
  int threads = 0;
  bool fastest = false;
  bool force = false;
};

std::string number(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

// 131072, or 128K, or 1M.
std::int64_t parse_context(const std::string& text) {
  const std::string digits = text.substr(0, text.find_first_not_of("0123456789"));
  const std::string unit = text.substr(digits.size());
  std::int64_t scale = 0;
  if (unit.empty()) scale = 1;
  if (unit == "K" || unit == "k") scale = 1024;
  if (unit == "M" || unit == "m") scale = 1024 * 1024;
  if (scale == 0 || digits.empty() || digits.size() > 10) {
    throw Error(ErrorCode::usage,
                "--context " + in_quotes(text) + ": give tokens, such as 131072, 128K or 1M");
  }
  return std::stoll(digits) * scale;
}

bool has_gpu() {
  try {
    detect_device("cuda");
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The machine of --machine, a name or a file.
Machine machine_of(const std::string& text) {
  const std::vector<std::string> names = machine_names();
  const bool is_name = std::find(names.begin(), names.end(), text) != names.end();
  const bool is_file = text.find('/') != std::string::npos || text.ends_with(".json");
  return is_name || !is_file ? find_machine(text) : read_machine(text);
}

std::string device_of(const PlanFlags& flags) {
  if (!flags.device.empty()) return flags.device;
  if (!flags.machine.empty()) return "cuda";
  if (has_gpu()) return "cuda";
  if (flags.shape.empty()) return "cpu";
  throw Error(ErrorCode::usage,
              "this machine has no GPU to plan for; name one with --machine, or give --device cpu");
}

PlanWish wish_of(const PlanFlags& flags) {
  PlanWish wish;
  wish.model = flags.model;
  wish.shape = flags.shape;
  // Refused first, whatever else is missing.
  if (!flags.shape.empty()) planning::find_shape(flags.shape);
  wish.context = parse_context(flags.context);
  if (!flags.machine.empty()) wish.machine = machine_of(flags.machine);
  wish.device = device_of(flags);
  wish.device_memory = parse_cap(flags.device_memory, "--device-memory");
  wish.host_memory = parse_cap(flags.host_memory, "--host-memory");
  if (!flags.disk.empty()) wish.disk = parse_disk(flags.disk);
  wish.loss = flags.loss;
  if (flags.weights != "auto") wish.weights = parse_weight_code(flags.weights, "--weights");
  if (flags.rows != "auto") wish.rows = parse_row_format(flags.rows, "--kv-dtype");
  if (flags.policy != "auto") wish.policy = flags.policy;
  wish.chunk = flags.chunk;
  wish.threads = flags.threads;
  wish.fastest = flags.fastest;
  return wish;
}

std::string row(const char* name, const std::string& value) {
  return wrapped(std::string("  ") + name, kPlanIndent, value);
}

std::string losses_line(const AdvisedPlan& plan) {
  const Losses& l = plan.losses;
  const auto part = [](const char* name, double kl) {
    return kl > 0.0 ? std::string(", ") + name + number(" %.4f", kl) : std::string();
  };
  const std::string policy =
      l.policy ? number("policy %.4f", *l.policy) : "policy unknown, measure it with eval";
  return policy + part("rows", l.rows) + part("prompt", l.prefill) + part("weights", l.weights) +
         " (KL; borrowed from sluice-22m)";
}

std::string bytes_line(const StepBytes& b) {
  const auto part = [](const char* name, std::uint64_t bytes) {
    return bytes > 0 ? ", " + format_bytes(bytes) + " " + name : std::string();
  };
  return format_bytes(b.weights) + " of weights" + part("of keys in the index", b.keys) +
         part("of values in it", b.values) + part("of rows", b.rows) +
         part("of them over the bus", b.bus) + part("from disk", b.disk);
}

std::string times_line(const StepTimes& times) {
  return number("%.2f ms a token", times.step * 1e3) +
         number(" (%.0f tokens/s)", 1.0 / times.step) +
         number(", a prompt as long as the context %.0f s", times.prefill);
}

const char* cap_name(Tier tier) {
  if (tier == Tier::disk) return "--disk";
  return tier == Tier::host ? "--host-memory" : "--device-memory";
}

std::string weights_text(const std::optional<WeightFormat>& weights) {
  if (!weights) return "as the files have them";
  return weights->is_coded() ? "coded in " + to_string(*weights) + " while loading" : "decoded";
}

// Which cap binds, and what a GiB more of each gives.
std::string gains_text(const AdvisedPlan& plan) {
  std::string text = row("longest context",
                         std::to_string(plan.longest) + " tokens under these caps and this loss");
  const auto most =
      std::max_element(plan.gains.begin(), plan.gains.end(),
                       [](const Gain& a, const Gain& b) { return a.context < b.context; });
  if (most != plan.gains.end()) {
    text +=
        row("cap that binds", most->context > plan.longest ? cap_name(most->tier)
                                                           : "none alone: other caps bind, too");
  }
  for (const Gain& gain : plan.gains) {
    // More memory takes nothing away, though the search may end at a shorter context.
    const std::int64_t more = std::max<std::int64_t>(gain.context - plan.longest, 0);
    std::string what = "+" + std::to_string(more) + " tokens";
    if (gain.step_seconds && plan.times) {
      what += number(", %.2f ms a token", *gain.step_seconds * 1e3) +
              number(" for %.2f", plan.times->step * 1e3);
    }
    if (gain.weights != plan.settings.weights) {
      what += ", with weights " + weights_text(gain.weights);
    }
    text += row((std::string("+1 GiB ") + cap_name(gain.tier)).c_str(), what);
  }
  return text;
}

std::string describe(const AdvisedPlan& plan, const PlanWish& wish) {
  const PlanSettings& s = plan.settings;
  std::string text = plan.plan.to_table();
  text += row("weights", weights_text(s.weights));
  text += row("rows", to_string(s.rows) + (plan.plan.kv.on_disk ? ", on disk" : ""));
  text += row("policy", s.policy);
  text += row("loss", losses_line(plan));
  text += row("a step reads", bytes_line(plan.bytes));
  if (plan.times) {
    text += row(("on " + wish.machine->name).c_str(),
                times_line(*plan.times) + "; predicted from its data sheet");
  }
  return text + gains_text(plan);
}

// The command that uses the plan.
std::string command(const PlanFlags& flags, const AdvisedPlan& plan) {
  const std::string model = flags.model.empty() ? "DIR" : flags.model;
  return "\nsluice generate --model " + one_line(model) +
         (plan.settings.on_gpu ? " --device cuda" : "") + " --plan " + one_line(flags.json) +
         " --prompt-file FILE\n";
}

int run(const PlanFlags& flags) {
  const PlanWish wish = wish_of(flags);
  require_writable(flags.json, flags.model, "", flags.force);
  const AdvisedPlan plan = advise(wish);
  if (flags.json.empty()) {
    print(describe(plan, wish));
    return 0;
  }
  const std::string beside = flags.json == "-" ? "" : command(flags, plan);
  print_beside_report(flags.json, describe(plan, wish) + beside);
  write_report(flags.json, flags.force, to_json(plan));
  return 0;
}

std::string list_of(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

}  // namespace

Command add_plan(CLI::App& app) {
  const auto flags = std::make_shared<PlanFlags>();
  auto* model = app.add_option("-m,--model", flags->model,
                               "Hugging Face checkpoint directory, or a GGUF file");
  app.add_option("--shape", flags->shape,
                 "a model that is not here, by its published sizes: " + list_of(shape_names()) +
                     "; or its config.json")
      ->excludes(model);
  app.add_option("--context", flags->context, "tokens of prompt and answer: 131072, 128K or 1M")
      ->required();
  app.add_option("--machine", flags->machine,
                 "plan for another machine, and predict times there: " + list_of(machine_names()) +
                     ", or a JSON file with the same fields");
  app.add_option("--device", flags->device,
                 "cpu, cuda or cuda:N of this machine. Default: its GPU if it has one, or the CPU")
      ->excludes("--machine");
  app.add_option("--device-memory", flags->device_memory,
                 "cap on the device tier, e.g. 24GiB; at most what --machine has; default: all of "
                 "that but 512 MiB");
  app.add_option("--host-memory", flags->host_memory,
                 "cap on host memory, e.g. 60GiB. Default: none but, on this machine, its limits");
  app.add_option("--disk", flags->disk,
                 "DIR or DIR:SIZE for rows that --host-memory does not hold; may be given several "
                 "times")
      ->allow_extra_args(false);
  app.add_option("--loss", flags->loss,
                 "most KL divergence of all that is chosen. Default: 0.005, and of weights what "
                 "their bits cost; settings that you give are not counted");
  app.add_option("--weights", flags->weights, "bits of weights; auto: as many as there is room for")
      ->check(words_or({"auto"}, weight_code_names()))
      ->capture_default_str();
  app.add_option("--kv-dtype", flags->rows,
                 "type of rows; auto: bf16, int8 where host memory does not hold bf16, on a CPU "
                 "k8v4 where neither host memory nor a disk holds int8")
      ->check(words_or({"auto"}, row_format_names()))
      ->capture_default_str();
  app.add_option("--policy", flags->policy,
                 "a preset or a policy line, see sluice generate --help; auto: the first that fits")
      ->capture_default_str();
  add_integer(app, "--chunk", flags->chunk, "most tokens per prefill step; 0: what suits")
      ->capture_default_str();
  add_integer(app, "--threads", flags->threads, "threads, 0 for one per core")
      ->capture_default_str();
  app.add_flag("--fastest", flags->fastest,
               "of all that fits, what is predicted to decode fastest, not what loses least");
  auto* json = app.add_option(
      "--json", flags->json,
      "write the plan to this file, for --plan of other commands; - for standard output");
  add_force(app, flags->force, "--json")->needs(json);
  return [flags] { return run(*flags); };
}

}  // namespace sluice::tools
