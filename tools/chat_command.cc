#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "lib/text.h"
#include "sluice/chat.h"
#include "sluice/errors.h"
#include "tools/commands.h"
#include "tools/exit_code.h"
#include "tools/generation.h"
#include "tools/interrupt.h"
#include "tools/line_reader.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/plan_flag.h"
#include "tools/policy_help.h"
#include "tools/prompt_reading.h"
#include "tools/saved_session_flags.h"
#include "tools/speculation.h"
#include "tools/void_flags.h"

namespace sluice::tools {
namespace {

constexpr int kMaxTokens = 1024;              // of an answer
constexpr std::int64_t kMostContext = 32768;  // planned without --context
constexpr std::int64_t kUnknownContext = 8192;
constexpr std::int64_t kBarTokens = 512;  // a shorter prompt needs no progress bar

constexpr const char* kHelp =
    "/stats  what the conversation took: tokens, times and the ledger\n"
    "/reset  begin anew, with an empty context\n"
    "/help   this list\n"
    "/quit   end, as Ctrl-D does\n"
    "//TEXT  a line that begins with a slash\n"
    "Ctrl-C ends an answer; a second one, or one without an answer, ends the program.\n";

struct ChatFlags {
  ModelFlags model;
  GenerationFlags generation;
  SpeculationFlags speculation;
  std::string system;
  SavedSessionFlags saved;
  bool quiet = false;
};

// Escape sequences, empty without a terminal or where colours are turned off.
// Source: no-color.org.
struct Colours {
  std::string prompt;
  std::string note;
  std::string off;

  static Colours of_terminal() {
    const auto is_set = [](const char* name) {
      const char* const value = std::getenv(name);
      return value != nullptr && *value != '\0';
    };
    const char* const terminal = std::getenv("TERM");
    const bool dumb = terminal == nullptr || std::string_view(terminal) == "dumb";
    if (::isatty(STDOUT_FILENO) == 0 || is_set("NO_COLOR") || dumb) return {};
    return {"\x1b[1;32m", "\x1b[2m", "\x1b[0m"};
  }
};

// A prompt for libedit, which has to know the characters that take no width. libedit writes those
// together with the character that follows them.
std::string editable(const Colours& colours) {
  if (colours.off.empty()) return "> ";
  const std::string escape(1, '\x01');
  return escape + colours.prompt + escape + ">" + escape + colours.off + escape + " ";
}

std::int64_t default_context(const ModelInfo& info) {
  const std::int64_t trained =
      info.trained_context > 0 ? std::min(info.trained_context, kMostContext) : kUnknownContext;
  return info.window_limits ? std::min(trained, *info.window) : trained;
}

class Talk {
 public:
  Talk(const ChatFlags& flags, const Engine& engine, Chat chat, Speculation& speculation,
       bool on_terminal)
      : flags_(&flags),
        engine_(&engine),
        chat_(std::move(chat)),
        speculation_(&speculation),
        on_terminal_(on_terminal),
        colours_(Colours::of_terminal()) {}

  // Runs until /quit or the end of the input. Returns the exit code of a script's last error; on a
  // terminal the user has seen the error and gone on, so 0.
  int run() {
    LineReader lines(on_terminal_ ? std::optional(editable(colours_)) : std::nullopt);
    keep_on_interrupt();
    int code = 0;
    while (!over_) {
      const std::optional<std::string> line = lines.next();
      if (!line) break;
      try {
        take(*line);
      } catch (const Error& error) {
        // A bad question leaves the session unchanged.
        if (error.code() != ErrorCode::prompt && error.code() != ErrorCode::usage) throw;
        print_error("sluice: " + with_flags(error.what()) + "\n");
        code = exit_code(error.code());
      }
    }
    save();
    return on_terminal_ ? 0 : code;
  }

 private:
  void save() {
    const std::string& directory = flags_->saved.save;
    if (directory.empty()) return;
    if (chat_.session().length() == 0) return note("an empty conversation is not saved");
    chat_.save(directory);
    note("saved in " + one_line(directory));
  }

  void take(const std::string& line) {
    if (line.find_first_not_of(" \t") == std::string::npos) return;
    if (line.starts_with("//")) return answer(line.substr(1));
    if (line.starts_with('/')) return obey(line.substr(0, line.find_last_not_of(" \t") + 1));
    answer(line);
  }

  void obey(const std::string& command) {
    if (command == "/help") return print(kHelp);
    if (command == "/stats") return print(stats());
    if (command == "/quit") {
      over_ = true;
      return;
    }
    if (command != "/reset") {
      throw Error(ErrorCode::usage, in_quotes(command) +
                                        " is no command; see /help, or begin with // to send a "
                                        "line that begins with a slash");
    }
    chat_.reset();
    last_.reset();
    note("a new conversation");
  }

  void answer(std::string question) {
    std::optional<PromptProgress> bar;
    bar.emplace();
    GenerateOptions options;
    options.sampling = flags_->generation.sampling;
    options.interrupt = [] { return interrupted().load(); };
    speculation_->use(options);
    options.on_prefill = [&](std::int64_t done, std::int64_t total) {
      if (total > kBarTokens && done < total) bar->update(done, total);
      if (done == total) bar.reset();
      return true;
    };
    options.on_text = [](std::string_view text) { print(text); };
    last_ = chat_.ask(std::move(question), options);
    bar.reset();
    print("\n");
    lower_interrupt();
    const std::int64_t room = chat_.session().plan().context - chat_.session().length();
    if (last_->reason == FinishReason::interrupted) {
      note(last_->tokens.empty() ? "interrupted; the question counts as not asked" : "interrupted");
    } else if (last_->reason == FinishReason::max_tokens) {
      note(room < 1 ? "the context is full: /reset begins anew, --context plans for more"
                    : "the answer was cut at --max-tokens");
    }
  }

  // Notes are for people; a program that reads the answers gets none.
  void note(const std::string& text) const {
    if (flags_->quiet && !on_terminal_) return;
    print_error(colours_.note + "(" + text + ")" + colours_.off + "\n");
  }

  std::string stats() const {
    const Session& session = chat_.session();
    std::array<char, 160> text{};
    std::snprintf(text.data(), text.size(), "context  %lld of %lld tokens, %zu turns\n",
                  static_cast<long long>(session.length()),
                  static_cast<long long>(session.plan().context), chat_.turns().size());
    std::string table = text.data();
    if (last_) {
      table += "last answer:\n" + timing_table(last_->timings) + lost_rows_line(*last_) +
               drafts_line(*last_);
    }
    table += memory_table(engine_->memory());
    table += selection_line(session.selection(), session.length());
    table += rows_line(session.ledger());
    return table + "\n" + session.ledger().to_table();
  }

  const ChatFlags* flags_;
  const Engine* engine_;
  Chat chat_;
  Speculation* speculation_;
  bool on_terminal_;
  Colours colours_;
  std::optional<GenerateResult> last_;
  bool over_ = false;
};

// The conversation to begin or to continue.
Chat open_chat(const ChatFlags& flags, Engine& engine, const SessionOptions& options,
               ChatFormat format) {
  if (flags.saved.load.empty()) {
    return {engine, engine.new_session(options), std::move(format), flags.system};
  }
  Chat chat = Chat::load(engine, flags.saved.load, options, std::move(format));
  if (flags.system.empty() || flags.system == chat.system()) return chat;
  throw Error(ErrorCode::usage,
              "--system: the saved conversation has another text of the system; leave it out");
}

int run(const ChatFlags& flags) {
  flags.generation.validate();
  flags.speculation.validate();
  const std::optional<PlanSettings> planned = plan_of(flags.model);
  EngineConfig config = config_of(flags.model, planned);
  Engine engine = Engine::open(config);
  if (planned) require_model(*planned, engine.info());
  SessionOptions wanted;
  wanted.context = flags.generation.context;
  if (wanted.context == 0) wanted.context = default_context(engine.info());
  if (!flags.saved.load.empty() && flags.generation.context == 0) {
    const auto saved = std::ssize(engine.saved_session(flags.saved.load).tokens);
    wanted.context = std::max(wanted.context, saved + flags.generation.sampling.max_tokens);
  }
  if (planned) wanted.context = planned->context;
  wanted.decode_batch = flags.speculation.decode_batch();
  Speculation speculation(flags.speculation);
  speculation.open(flags.model, wanted.context, flags.quiet, config, engine);
  ChatFormat format = ChatFormat::load(flags.model.model, engine.tokenizer());
  const ChatTurn probe;
  format.render(flags.system, std::span(&probe, 1));  // throws before the weights are loaded
  const std::int64_t context = wanted.context;
  const std::string& policy = planned ? planned->policy : flags.generation.policy;
  const Choice choice = choose_session(engine, policy, std::move(wanted));
  const Plan plan = engine.plan(choice.options);
  flags.saved.require_savable(engine, context);  // last, because it makes the directory
  const bool on_terminal = ::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0;
  print_error(void_sampling(flags.generation.sampling) +
              void_in_plan(flags.model, plan, choice.options.policies.front()));
  if (!flags.quiet) {
    print_error(plan_text(engine, plan, choice) +
                wrapped("  chat template", kPlanIndent, format.file().filename().string()));
    print_error(text_marker_note(format));
    if (!flags.system.empty() && format.moves_system()) {
      print_error(
          wrapped("note:", 6,
                  "this model's template puts the text of the system in front of the newest "
                  "question, so every turn is computed from the question before on"));
    }
    print_error(on_terminal ? "\n/help lists commands, Ctrl-D ends.\n\n" : "\n");
  }
  load(engine);
  Chat chat = open_chat(flags, engine, choice.options, std::move(format));
  return Talk(flags, engine, std::move(chat), speculation, on_terminal).run();
}

}  // namespace

Command add_chat(CLI::App& app) {
  const auto flags = std::make_shared<ChatFlags>();
  flags->model.add_to(app);
  app.footer("Lines of standard input are questions. Commands:\n" + std::string(kHelp) + "\n" +
             policy_help() + "\n" + app.get_footer());
  app.add_option("--system", flags->system, "text of the system, in front of the conversation");
  flags->generation.sampling.max_tokens = kMaxTokens;
  flags->generation.add_to(app, "what the model was trained for, 32768 at most");
  flags->speculation.add_to(app);
  flags->saved.add_to(app, "the conversation with its turns and the text of the system");
  app.add_flag("-q,--quiet", flags->quiet,
               "no plan on standard error, and no notes but on flags that do nothing");
  add_plan_flag(app, flags->model);
  return [flags] { return run(*flags); };
}

}  // namespace sluice::tools
