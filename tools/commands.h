// The subcommands of `sluice`. Each declares its flags on the app and leaves a function that runs
// it and returns the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace sluice::tools {

using Command = std::function<int()>;

Command add_bench(CLI::App& app);
Command add_calibrate(CLI::App& app);
Command add_chat(CLI::App& app);
Command add_generate(CLI::App& app);
Command add_eval(CLI::App& app);
Command add_info(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_serve(CLI::App& app);
Command add_topology(CLI::App& app);

}  // namespace sluice::tools
