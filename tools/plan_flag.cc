#include "tools/plan_flag.h"

#include "sluice/errors.h"

namespace sluice::tools {

void add_plan_flag(CLI::App& app, ModelFlags& flags) {
  CLI::Option* const plan =
      app.add_option("--plan", flags.plan,
                     "use the settings of this file, which sluice plan --json wrote: caps, disk, "
                     "types of rows and weights, policy and context");
  for (const char* const name : {"--device-memory", "--host-memory", "--disk", "--kv-dtype",
                                 "--weights", "--chunk", "--policy", "--context"}) {
    if (CLI::Option* const decided = app.get_option_no_throw(name)) plan->excludes(decided);
  }
}

std::optional<PlanSettings> plan_of(const ModelFlags& flags) {
  if (flags.plan.empty()) return std::nullopt;
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
