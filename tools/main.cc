#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <exception>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/version.h"
#include "tools/commands.h"
#include "tools/interrupt.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 success, 2 bad flag, 3 file not found, 4 corrupt checkpoint, 5 not supported,\n"
    "6 tokenizer, 7 prompt, 8 memory cap too small, 9 reading or writing failed, 10 internal\n"
    "error, 11 NaN or infinity, 130 interrupted.";

// Fields that the library's messages name are flags here: `device_memory` is --device-memory.
std::string with_flags(const std::string& text) {
  static const std::regex field("`([a-z_]+)`");
  std::string result;
  auto from = text.begin();
  for (std::sregex_iterator it(text.begin(), text.end(), field), end; it != end; ++it) {
    std::string name = (*it)[1];
    std::replace(name.begin(), name.end(), '_', '-');
    result.append(from, (*it)[0].first).append("--" + name);
    from = (*it)[0].second;
  }
  return result.append(from, text.end());
}

int fail(ErrorCode code, const std::string& message) {
  print_error("sluice: " + with_flags(one_line(message)) + "\n");
  return static_cast<int>(code);
}

// An empty value is a variable that was not set, not a wish for the default.
void refuse_empty_values(CLI::App& command) {
  const auto check = [](const std::string& text) {
    return std::string(text.empty() ? "the value is empty; give one or leave the flag out" : "");
  };
  for (CLI::Option* option : command.get_options()) {
    const bool prompt = option->check_name("--prompt");  // which has an error of its own
    if (option->get_items_expected_max() > 0 && !prompt) option->check(check);
  }
}

// A file opened under the number of a standard stream that is closed would be taken for it. What
// takes its place cannot be used either.
void occupy_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    // The lowest number that is free, which is this one.
    [[maybe_unused]] const int placeholder =
        ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// --help and --version.
int show(const CLI::App& app, const CLI::ParseError& wish) {
  std::ostringstream text;
  const int code = app.exit(wish, text, text);
  print(text.str());
  return code;
}

int run(int argc, const char* const* argv) {
  CLI::App app("Sluice: long-context LLM inference with the KV cache off the device", "sluice");
  app.set_version_flag("--version", std::string("sluice ") + kVersion);
  app.require_subcommand(1);
  app.footer(kFooter);
  std::vector<std::pair<CLI::App*, Command>> commands;
  const auto add = [&](const char* name, const char* description, Command (*declare)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, description);
    command->footer(kFooter);
    commands.emplace_back(command, declare(*command));
    refuse_empty_values(*command);
  };
  add("generate", "Generate text after a prompt, and account for every byte moved", add_generate);
  add("info", "Show what a checkpoint is and what its KV cache takes", add_info);
  add("eval", "Measure what policies keep of dense attention's answers, and what they cost",
      add_eval);
  add("calibrate", "Find the layers at which this model should select tokens anew", add_calibrate);
  add("topology", "Show the processor, its memory and their measured bandwidth", add_topology);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return show(app, error);
    return fail(ErrorCode::usage, std::string(error.what()) + " (see sluice --help)");
  }
  for (const auto& [command, action] : commands) {
    if (command->parsed()) return action();
  }
  return fail(ErrorCode::usage, "no command given (see sluice --help)");
}

}  // namespace
}  // namespace sluice::tools

int main(int argc, char** argv) {
  using sluice::ErrorCode;
  try {
    sluice::tools::occupy_closed_streams();
    sluice::tools::end_on_interrupt();
    return sluice::tools::run(argc, argv);
  } catch (const sluice::Error& error) {
    return sluice::tools::fail(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return sluice::tools::fail(ErrorCode::memory, "this machine is out of memory");
  } catch (const std::exception& error) {
    return sluice::tools::fail(ErrorCode::internal, error.what());
  }
}
