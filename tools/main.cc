#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
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

int fail(ErrorCode code, const std::string& message) {
  print_error("sluice: " + with_flags(one_line(message)) + "\n");
  return static_cast<int>(code);
}

// How many letters to add, drop or change to make one word the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

using Commands = std::vector<std::pair<CLI::App*, Command>>;

// What is wrong with a first argument that is no command; empty if it is one, or a flag.
std::string unknown_command(const Commands& commands, std::string_view given) {
  constexpr std::size_t kLongestWord = 32;
  std::string known;
  const CLI::App* nearest = nullptr;
  std::size_t nearest_distance = 3;
  for (const auto& [command, action] : commands) {
    const std::string name = command->get_name();
    if (name == given) return {};
    known += (known.empty() ? "" : ", ") + name;
    if (given.size() > kLongestWord || distance(given, name) >= nearest_distance) continue;
    nearest = command;
    nearest_distance = distance(given, name);
  }
  if (given.empty() || given.front() == '-') return {};
  const std::string hint =
      nearest != nullptr ? "did you mean " + nearest->get_name() + "?" : "there are " + known;
  return "'" + std::string(given) + "' is no command; " + hint;
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
  Commands commands;
  const auto add = [&](const char* name, const char* description, Command (*declare)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, description);
    command->footer(kFooter);
    commands.emplace_back(command, declare(*command));
    refuse_empty_values(*command);
  };
  add("generate", "Generate text after a prompt, and account for every byte moved", add_generate);
  add("chat", "Talk with a model in one session, whose KV cache stays from turn to turn", add_chat);
  add("info", "Show what a checkpoint is and what its KV cache takes", add_info);
  add("eval", "Measure what policies keep of dense attention's answers, and what they cost",
      add_eval);
  add("calibrate", "Find the layers at which this model should select tokens anew", add_calibrate);
  add("topology", "Show the processor, its memory and their measured bandwidth", add_topology);
  const std::string wrong = argc > 1 ? unknown_command(commands, argv[1]) : "";
  if (!wrong.empty()) return fail(ErrorCode::usage, wrong + " (see sluice --help)");
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
