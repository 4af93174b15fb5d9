// Flags that were given and can do nothing beside the others, or with this model and device. They
// are legal, so each is told in a note: nobody has to find out by comparing answers.
#pragma once

#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/generate.h"
#include "sluice/policy.h"
#include "tools/eval_tasks.h"
#include "tools/model_flags.h"

namespace sluice::tools {

// All of these give a line for each reason, or nothing. They are shown with --quiet, too.

// "note: FLAGS do nothing: WHY"; nothing without flags.
std::string void_note(const std::vector<std::string>& flags, const std::string& why);

// What greedy sampling does not use.
std::string void_sampling(const SamplingParams& sampling);
// What this device does not use, whatever is computed on it; `on_device`: it is a GPU.
std::string void_on_device(const ModelFlags& flags, bool on_device);
// What a session so planned does not use, with what its device does not.
std::string void_in_plan(const ModelFlags& flags, const Plan& plan, const Policy& policy);
// What `info` does not use if it shows no plan.
std::string void_without_plan(const ModelFlags& flags, const std::string& policy);
// What none of these tasks of `eval` uses.
std::string void_in_tasks(const TaskOptions& options, const std::vector<Task>& tasks);

}  // namespace sluice::tools
