// Flags that were given but have no effect with the other flags, this model or this device. They
// are legal, so each gets a note; otherwise one would find out only by comparing answers.
#pragma once

#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/generate.h"
#include "sluice/policy.h"
#include "tools/eval_tasks.h"
#include "tools/model_flags.h"

namespace sluice::tools {

// All of these return a line for each reason, or nothing. They are shown with --quiet, too.

// "note: FLAGS do nothing: WHY"; nothing without flags.
std::string void_note(const std::vector<std::string>& flags, const std::string& why);

// Flags that greedy sampling ignores.
std::string void_sampling(const SamplingParams& sampling);
// Flags that this device ignores for any computation; `on_device`: it is a GPU.
std::string void_on_device(const ModelFlags& flags, bool on_device);
// Flags that a session with this plan ignores, and those that its device ignores.
std::string void_in_plan(const ModelFlags& flags, const Plan& plan, const Policy& policy);
// Flags that `info` ignores if it shows no plan.
std::string void_without_plan(const ModelFlags& flags, const std::string& policy);
// Flags that all of these `eval` tasks ignore.
std::string void_in_tasks(const TaskOptions& options, const std::vector<Task>& tasks);
// Flags that `eval` ignores because its tasks are in files.
std::string void_with_data(const TaskOptions& options);

}  // namespace sluice::tools
