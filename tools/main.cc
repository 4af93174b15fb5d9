#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <exception>
#include <memory>
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
#include "tools/exit_code.h"
#include "tools/interrupt.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 success, 1 a check found a difference, 2 bad flag, 3 file not\n"
    "found, 4 damaged file, 5 not supported, 6 tokenizer, 7 prompt, 8 memory\n"
    "cap too small, 9 reading or writing failed, 10 internal error, 11 NaN or\n"
    "infinity, 130 interrupted.";

int fail(int code, const std::string& message) {
  print_error("sluice: " + with_flags(one_line(message)) + "\n");
  return code;
}

// Edit distance: letters to add, drop or change to turn one word into the other.
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

// A formatter that wraps lists of flags, because CLI11's own prints lines of any length.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string head = "  " + make_option_name(option, is_positional) + make_option_opts(option);
    const std::size_t column = get_column_width();
    const std::string above = head.size() < column ? "" : std::exchange(head, "") + "\n";
    return above + wrapped(head, column, make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return wrapped("  " + command->get_name(), get_column_width(), command->get_description());
  }
};

// The closest name; empty if none is within two changes and half the letters.
std::string nearest_of(const std::vector<std::string>& names, std::string_view given) {
  constexpr std::size_t kLongestWord = 32;
  std::string nearest;
  const std::size_t letters = given.size() - std::min(given.find_first_not_of('-'), given.size());
  std::size_t nearest_distance = std::min<std::size_t>(letters / 2, 2) + 1;
  for (const std::string& name : names) {
    if (given.size() > kLongestWord || distance(given, name) >= nearest_distance) continue;
    nearest = name;
    nearest_distance = distance(given, name);
  }
  return nearest;
}

using Commands = std::vector<std::pair<CLI::App*, Command>>;

// The error for an unknown command as first argument; empty if it is a command or a flag.
std::string unknown_command(const Commands& commands, std::string_view given) {
  std::vector<std::string> names;
  std::string known;
  for (const auto& [command, action] : commands) {
    names.push_back(command->get_name());
    if (names.back() == given) return {};
    known += (known.empty() ? "" : ", ") + names.back();
  }
  if (given.empty() || given.front() == '-') return {};
  const std::string nearest = nearest_of(names, given);
  return "'" + std::string(given) + "' is no command; " +
         (nearest.empty() ? "there are " + known : "did you mean " + nearest + "?");
}

std::vector<std::string> flags_of(const CLI::App& command) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    for (const std::string& name : option->get_snames()) flags.push_back("-" + name);
  }
  return flags;
}

// The error for the first flag that no command took: a mistyped flag may be why another is missing.
std::string unknown_flag(const CLI::App& app, const Commands& commands) {
  const std::vector<std::string> left = app.remaining(true);
  const auto end = std::find(left.begin(), left.end(), "--");
  const auto flag = std::find_if(left.begin(), end, [](const std::string& argument) {
    return argument.starts_with("-") && argument != "-";
  });
  if (flag == end) return {};
  const std::string given = flag->substr(0, flag->find('='));
  const auto parsed = std::find_if(commands.begin(), commands.end(),
                                   [](const auto& command) { return command.first->parsed(); });
  const bool has_command = parsed != commands.end();
  const std::string name = has_command ? parsed->first->get_name() : "";
  const std::string nearest = nearest_of(flags_of(has_command ? *parsed->first : app), given);
  if (nearest == given) return given + " belongs after " + name;
  return given + " is no flag" + (has_command ? " of " + name : "") +
         (nearest.empty() ? "" : "; did you mean " + nearest + "?");
}

// An empty value is an unset variable of the shell, not a request for the default.
void refuse_empty_values(CLI::App& command) {
  for (CLI::Option* option : command.get_options()) {
    const char* const otherwise = option->get_required() ? "" : " or leave the flag out";
    const auto check = [otherwise](const std::string& text) {
      return text.empty() ? std::string("the value is empty; give one") + otherwise : "";
    };
    const bool prompt = option->check_name("--prompt");  // has its own error
    if (option->get_items_expected_max() > 0 && !prompt) option->check(check);
  }
}

// Occupies closed standard streams, because the next file opened would get the number of one. The
// placeholder cannot be used as that stream either.
void occupy_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    // open() takes the lowest free number, which is this stream's.
    [[maybe_unused]] const int placeholder =
        ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// Prints --help and --version.
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
  app.formatter(std::make_shared<HelpFormatter>());  // commands inherit it
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
  add("serve", "Serve a model over HTTP, with OpenAI's API", add_serve);
  add("info", "Show what a checkpoint is and what its KV cache takes", add_info);
  add("plan", "Choose settings for a long context under caps, and say what they take", add_plan);
  add("eval", "Measure what policies keep of dense attention's answers, and what they cost",
      add_eval);
  add("bench", "Time decode steps by policy, context, cap and batch, and count what they move",
      add_bench);
  add("calibrate", "Find what suits this model best, by measuring, and store it", add_calibrate);
  add("topology", "Show the processor, its memory and their measured bandwidth", add_topology);
  const std::string wrong = argc > 1 ? unknown_command(commands, argv[1]) : "";
  if (!wrong.empty()) return fail(kUsageExit, wrong + " (see sluice --help)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return show(app, error);
    const std::string unknown = unknown_flag(app, commands);
    return fail(kUsageExit, (unknown.empty() ? error.what() : unknown) + " (see sluice --help)");
  }
  for (const auto& [command, action] : commands) {
    if (command->parsed()) return action();
  }
  return fail(kUsageExit, "no command given (see sluice --help)");
}

// With a limit of address space all threads share one arena of the allocator: glibc reserves 64 MiB
// for each, which plans do not count and which is missing then.
void share_arena_under_limit() {
  for (const int resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit = {};
    const bool is_set = ::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    if (is_set) ::mallopt(M_ARENA_MAX, 1);
  }
}

// Turns every error into one line and an exit code.
int run_safely(int argc, const char* const* argv) {
  try {
    share_arena_under_limit();
    occupy_closed_streams();
    std::signal(SIGXFSZ,
                SIG_IGN);  // writing past the file size limit fails instead of ending the process
    end_on_interrupt();
    return run(argc, argv);
  } catch (const Error& error) {
    return fail(exit_code(error.code()), error.what());
  } catch (const Interrupted& error) {
    return fail(kInterruptedExit, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kMemoryExit, "this machine is out of memory");
  } catch (const std::exception& error) {
    return fail(kInternalExit, error.what());
  }
}

}  // namespace
}  // namespace sluice::tools

int main(int argc, char** argv) { return sluice::tools::run_safely(argc, argv); }
