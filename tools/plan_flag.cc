#include "tools/plan_flag.h"

#include "sluice/errors.h"

namespace sluice::tools {

void add_plan_flag(CLI::App& app, ModelFlags& flags) {
  app.add_option("--plan", flags.plan,
                 "use the settings of this file, which sluice plan --json wrote: caps, disk, "
                 "types of rows and weights, policy and context");
  for (const char* const name : {"--device-memory", "--host-memory", "--disk", "--kv-dtype",
                                 "--weights", "--chunk", "--policy", "--context"}) {
    if (CLI::Option* const option = app.get_option_no_throw(name)) flags.planned.push_back(option);
  }
}

std::optional<PlanSettings> plan_of(const ModelFlags& flags) {
  if (flags.plan.empty()) return std::nullopt;
  for (const CLI::Option* const option : flags.planned) {
    if (option->count() == 0) continue;
    throw Error(ErrorCode::usage,
                "--plan decides " + option->get_name() + "; leave one of them out");
  }
  PlanSettings plan = read_plan(flags.plan);
  if (plan.on_gpu == flags.device.starts_with("cuda")) return plan;
  throw Error(ErrorCode::usage, std::string("the plan was made for a ") +
                                    (plan.on_gpu ? "GPU; give --device cuda"
                                                 : "CPU, and --device is " + flags.device));
}

EngineConfig config_of(const ModelFlags& flags, const std::optional<PlanSettings>& plan) {
  EngineConfig config = flags.config();
  if (plan) use_plan(*plan, config);
  return config;
}

}  // namespace sluice::tools
