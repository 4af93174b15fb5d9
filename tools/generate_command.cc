#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/special_tokens.h"
#include "io/spool.h"
#include "lib/text.h"
#include "sluice/chat.h"
#include "sluice/errors.h"
#include "sluice/generate.h"
#include "sluice/version.h"
#include "tools/commands.h"
#include "tools/constraint_flags.h"
#include "tools/exit_code.h"
#include "tools/flags.h"
#include "tools/generation.h"
#include "tools/interrupt.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/plan_flag.h"
#include "tools/policy_help.h"
#include "tools/prompt.h"
#include "tools/prompt_reading.h"
#include "tools/saved_session_flags.h"
#include "tools/speculation.h"
#include "tools/void_flags.h"

namespace sluice::tools {
namespace {

struct GenerateFlags {
  ModelFlags model;
  GenerationFlags generation;
  SpeculationFlags speculation;
  ConstraintFlags constraint;
  std::string prompt;
  std::string prompt_file;
  std::string bos = "auto";
  std::string json;
  std::string trace;
  std::string system;
  SavedSessionFlags saved;
  bool chat = false;
  bool positions = false;
  bool ignore_eos = false;
  bool force = false;
  bool quiet = false;
};

struct Prompt {
  std::vector<TokenId> ids;
  std::vector<TokenId> end_tokens;  // that end an answer
};

// One question, formatted by the checkpoint's chat template.
Prompt encode_question(const Engine& engine, const GenerateFlags& flags, const std::string& text) {
  const ChatFormat format = ChatFormat::load(flags.model.model, engine.tokenizer());
  if (!flags.quiet) print_error(text_marker_note(format));
  const ChatTurn turn = {text, {}, {}};
  return {format.render(flags.system, std::span(&turn, 1)),
          {format.end_tokens().begin(), format.end_tokens().end()}};
}

// The ids before the text to continue.
std::vector<TokenId> prefix_of(const Engine& engine, const GenerateFlags& flags) {
  if (flags.bos == "auto") return engine.encode_prompt("");
  if (flags.bos == "never") return {};
  if (!engine.info().bos) {
    throw Error(ErrorCode::usage, "--bos always: the config of this model names no BOS token");
  }
  return {*engine.info().bos};
}

// A note on BOS tokens that the user may not expect.
std::string bos_note(const Engine& engine, const GenerateFlags& flags,
                     std::span<const TokenId> prefix, std::span<const TokenId> ids) {
  if (!prefix.empty() && !ids.empty() && ids.front() == prefix.back()) {
    const std::string token = engine.tokenizer().decode(prefix.last(1), true);
    return wrapped("note:", 6,
                   "the prompt begins with " + in_quotes(token) +
                       ", which is put before every prompt, so the model reads it twice; leave it "
                       "out, or give --bos never");
  }
  if (flags.bos != "auto" || !prefix.empty()) return {};
  if (!read_add_bos_token(flags.model.model).value_or(false)) return {};
  return wrapped(
      "note:", 6,
      "tokenizer_config.json asks for a BOS token (add_bos_token), which neither "
      "tokenizer.json nor transformers puts for this class of tokenizer, nor does Sluice; "
      "--bos always puts it");
}

// Returns true if `prompt` is a saved session's: the tokens that are read, then the unread ones.
bool is_same_prompt(std::span<const TokenId> prompt, std::span<const TokenId> read,
                    std::span<const TokenId> unread) {
  return prompt.size() == read.size() + unread.size() &&
         std::ranges::equal(prompt.first(read.size()), read) &&
         std::ranges::equal(prompt.last(unread.size()), unread);
}

// The rest of a saved prompt; `text` is empty or the whole prompt once more.
Prompt encode_rest(const Engine& engine, const SavedSession& saved, std::vector<TokenId> unread,
                   const std::string& text) {
  if (!text.empty()) {
    std::vector<TokenId> whole = engine.encode_prompt("");
    const std::vector<TokenId> body = engine.tokenizer().encode(text);
    whole.insert(whole.end(), body.begin(), body.end());
    if (!is_same_prompt(whole, saved.tokens, unread)) {
      throw Error(
          ErrorCode::prompt,
          "the saved session has a prompt that is not read to its end, and this is another; "
          "give --prompt '' to read the rest of it");
    }
  }
  return {std::move(unread), {}};
}

// The text that goes on from a saved one.
Prompt encode_after(const Engine& engine, const SavedSession& saved, const std::string& text) {
  SavedText before = saved_text_of(saved.note);
  if (!before.unread.empty()) return encode_rest(engine, saved, std::move(before.unread), text);
  std::vector<TokenId> ids;
  if (before.pending) ids.push_back(*before.pending);
  if (ids.empty() && text.empty()) {
    throw Error(ErrorCode::prompt,
                "the saved text came to its end, and the prompt is empty; give some text");
  }
  const std::vector<TokenId> body =
      text.empty() ? std::vector<TokenId>() : engine.tokenizer().encode(text);
  ids.insert(ids.end(), body.begin(), body.end());
  return {std::move(ids), {}};
}

Prompt encode(const Engine& engine, const GenerateFlags& flags, const std::string& text) {
  if (text.empty()) {
    throw Error(ErrorCode::prompt, "the prompt is empty; give some text to continue");
  }
  if (flags.chat) return encode_question(engine, flags, text);
  std::vector<TokenId> ids = prefix_of(engine, flags);
  const std::vector<TokenId> body = engine.tokenizer().encode(text);
  if (!flags.quiet) print_error(bos_note(engine, flags, ids, body));
  ids.insert(ids.end(), body.begin(), body.end());
  return {std::move(ids), {}};
}

// The selection of the last decoded token, layer by layer; empty if every layer was dense.
nlohmann::json selection_json(const StepSelection& selection) {
  nlohmann::json layers = nlohmann::json::array();
  for (const LayerSelection& layer : selection) {
    layers.push_back({{"layer", layer.layer},
                      {"follower", layer.follower},
                      {"attended_rows", layer.attended},
                      {"selected_rows", layer.selected},
                      {"alpha", layer.alpha},
                      {"smallest_alpha", layer.smallest_alpha},
                      {"cut_heads", layer.cut}});
  }
  return layers;
}

// Appends the positions that a decoded token attended to, except the newest page, by layer and KV
// head, to a list of such steps.
void add_positions(const Session& session, Spool& steps, std::string_view separator) {
  steps.write(separator);
  steps.write("{\"length\":" + std::to_string(session.length()) + ",\"layers\":[");
  std::string_view comma;
  for (const LayerSelection& layer : session.selection()) {
    const nlohmann::json entry = {{"layer", layer.layer}, {"positions", layer.positions}};
    steps.write(std::string(comma) + entry.dump());
    comma = ",";
  }
  steps.write("]}");
}

// The short part of the report, whose size does not grow with the generated text.
nlohmann::json report_json(const GenerateFlags& flags, const Engine& engine, const Session& session,
                           const Plan& plan, const Loading& loading, const GenerateResult& result) {
  const Timings& t = result.timings;
  const MemoryUse memory = engine.memory();
  return {{"version", kVersion},
          {"model", flags.model.model},
          {"text", result.text},
          {"tokens", result.tokens},
          {"finish_reason", to_string(result.reason)},
          {"timings",
           {{"load_seconds", loading.seconds},
            {"prefill_seconds", t.prefill_seconds},
            {"prefill_tokens", t.prefill_tokens},
            {"prefill_tokens_per_second", t.prefill_rate()},
            {"first_token_seconds", t.first_token_seconds},
            {"decode_seconds", t.decode_seconds},
            {"decode_tokens", t.decode_tokens},
            {"decode_tokens_per_second", t.decode_rate()},
            {"seconds_per_output_token", t.seconds_per_output_token()}}},
          {"drafts",
           {{"steps", result.drafts.steps},
            {"drafted", result.drafts.drafted},
            {"accepted", result.drafts.accepted}}},
          {"memory",
           {{"device_peak_bytes", memory.device_peak},
            {"host_peak_bytes", memory.host_peak},
            {"load_host_peak_bytes", loading.host_peak},
            {"load_process_peak_bytes", loading.process_peak}}},
          {"recomputed_tokens", result.recomputed_tokens},
          {"policy", to_string(session.policy())},
          {"selection", selection_json(session.selection())},
          {"prefill_share", session.prefill_share()},
          {"plan", nlohmann::json::parse(plan.to_json())}};
}

// Writes the report, with the `steps` of add_positions() if there are any.
void write_json(const GenerateFlags& flags, const nlohmann::json& report, const Ledger& ledger,
                std::optional<Spool>& steps) {
  std::vector<LongMember> longer = {{"ledger", [&](const TextSink& to) { ledger.write_json(to); }}};
  if (steps) {
    longer.push_back({"steps", [&](const TextSink& to) {
                        to("[");
                        steps->read(to);
                        to("]");
                      }});
  }
  write_report(flags.json, flags.force,
               [&](const TextSink& to) { write_report_text(report, longer, to); });
}

// An answer, and the tokens that the session lacks because it was interrupted.
struct Generated {
  GenerateResult result;
  std::vector<TokenId> unread;
};

// The tokens of `text`, which the session was to have, behind those that it has.
std::vector<TokenId> unread_of(std::vector<TokenId> text, const GenerateResult& result,
                               const Session& session) {
  // An answer without its latest token was interrupted while rows that a disk lost were computed.
  if (!result.pending) text.insert(text.end(), result.tokens.begin(), result.tokens.end());
  text.erase(text.begin(), text.begin() + std::min(session.length(), std::ssize(text)));
  return text;
}

Generated run_model(const GenerateFlags& flags, const Engine& engine, Session& session,
                    const Prompt& prompt, const std::optional<Constraint>& constraint,
                    Speculation& speculation, std::optional<Spool>& steps) {
  const auto total = std::ssize(prompt.ids);
  std::optional<PromptProgress> bar;
  bar.emplace();
  const Progress progress = [&](std::int64_t done, std::int64_t of) {
    bar->update(total - of + done, total);
    if (done == of) {
      bar.reset();
      flag_interrupt();  // from here on an interrupt keeps the text
    }
    return true;
  };
  const Stop stops = [] { return interrupted().load(); };
  const PromptParts parts = read_in_parts(
      flags.saved, session, prompt.ids,
      [&](std::int64_t done, std::int64_t) {
        bar->update(done, total);
        return true;
      },
      stops);
  GenerateOptions options;
  options.sampling = flags.generation.sampling;
  options.end_tokens = prompt.end_tokens;
  options.history.assign(session.tokens().begin(), session.tokens().end());
  options.ignore_eos = flags.ignore_eos;
  options.constraint = constraint;
  speculation.use(options);
  options.interrupt = stops;
  options.on_prefill = progress;
  std::optional<ProgressBar> again;
  options.on_recompute = [&](std::int64_t done, std::int64_t of) {
    if (!again) again.emplace("rows lost by the disk");
    again->update(static_cast<double>(done) / static_cast<double>(of), "");
    if (done == of) again.reset();
    return true;
  };
  std::string_view separator = "\n";
  if (steps) {
    options.on_decode = [&](const Session& at) {
      add_positions(at, *steps, std::exchange(separator, ",\n"));
    };
  }
  const bool stream_text = flags.json != "-";
  options.on_text = [&](std::string_view text) {
    if (stream_text) print(text);
  };
  Generated generated;
  generated.result.reason = FinishReason::interrupted;
  if (!parts.is_interrupted) {
    generated.result = generate(engine, session, parts.unread, options);
  }
  add_parts(parts, prompt.ids, generated.result.timings);
  take_time();
  if (generated.result.reason == FinishReason::interrupted) {
    std::vector<TokenId> text = options.history;
    text.insert(text.end(), parts.unread.begin(), parts.unread.end());
    generated.unread = unread_of(std::move(text), generated.result, session);
  }
  return generated;
}

// Saves what there is of the session.
void save(const GenerateFlags& flags, Session& session, const Generated& generated) {
  if (session.length() == 0) {
    print_error("sluice: interrupted before there was anything to save\n");
    return;
  }
  SavedText text = {{}, generated.unread};
  const GenerateResult& result = generated.result;
  if (result.reason != FinishReason::end_of_text) text.pending = result.pending;
  session.save(flags.saved.save, note_of(text));
  if (flags.quiet) return;
  print_error("saved    " + std::to_string(session.length()) + " tokens in " +
              one_line(flags.saved.save) + "\n");
}

void write_trace(const GenerateFlags& flags, const Trace& trace) {
  write_report(flags.trace, flags.force, [&](const TextSink& to) { trace.write_json(to); });
  if (flags.quiet) return;
  const std::string dropped =
      trace.dropped() > 0 ? ", " + std::to_string(trace.dropped()) + " more were dropped" : "";
  print_error("trace: " + std::to_string(trace.events()) + " events in " + one_line(flags.trace) +
              dropped + "\n");
}

// Notes on flags that have no effect.
std::string void_flags(const GenerateFlags& flags, const Engine& engine, const Plan& plan,
                       const Choice& choice, const Prompt& prompt) {
  std::string text = void_sampling(flags.generation.sampling);
  text += void_in_plan(flags.model, plan, choice.options.policies.front());
  if (flags.ignore_eos && engine.info().eos.empty() && prompt.end_tokens.empty()) {
    text += void_note({"--ignore-eos"}, "this model names no token that ends a text");
  }
  return text;
}

int run(const GenerateFlags& flags, bool prompt_given) {
  flags.generation.validate();
  flags.speculation.validate();
  if (flags.force && flags.json.empty() && flags.trace.empty()) {
    throw Error(ErrorCode::usage, "--force requires --json or --trace");
  }
  require_writable(flags.json, flags.model.model, flags.prompt_file, flags.force);
  if (flags.trace == "-" || is_one_file(flags.trace, flags.json)) {
    throw Error(ErrorCode::usage, "--trace wants a file of its own");
  }
  require_writable(flags.trace, flags.model.model, flags.prompt_file, flags.force);
  std::optional<Spool> steps;
  if (flags.positions) steps.emplace();
  const std::optional<PlanSettings> planned = plan_of(flags.model);
  EngineConfig config = config_of(flags.model, planned);
  if (!flags.trace.empty()) config.trace = std::make_shared<Trace>();
  Engine engine = Engine::open(config);
  if (planned) require_model(*planned, engine.info());
  std::optional<SavedSession> saved;
  if (!flags.saved.load.empty()) saved = engine.saved_session(flags.saved.load);
  const std::string text = prompt_given ? flags.prompt : read_prompt(flags.prompt_file);
  const Prompt prompt = saved ? encode_after(engine, *saved, text) : encode(engine, flags, text);
  const std::optional<Constraint> constraint = flags.constraint.compile(engine);
  const GenerationFlags& generation = flags.generation;
  const std::int64_t needed = (saved ? std::ssize(saved->tokens) : 0) +
                              static_cast<std::int64_t>(prompt.ids.size()) +
                              generation.sampling.max_tokens;
  SessionOptions wanted;
  wanted.context = generation.context > 0 ? generation.context : needed;
  if (planned) wanted.context = planned->context;
  wanted.reports_positions = flags.positions;
  wanted.decode_batch = flags.speculation.decode_batch();
  Speculation speculation(flags.speculation);
  speculation.open(flags.model, wanted.context, flags.quiet, config, engine);
  const std::int64_t context = wanted.context;
  const std::string& policy = planned ? planned->policy : generation.policy;
  const Choice choice = choose_session(engine, policy, std::move(wanted));
  const SessionOptions& options = choice.options;
  if (flags.saved.every > 0 && options.policies.front().prefill.tau > 0.0) {
    throw Error(ErrorCode::usage, "--save-every: prefill=zipvl reads a prompt as a whole");
  }
  const Plan plan = engine.plan(options);
  flags.saved.require_savable(engine, context);  // last, because it makes the directory
  if (!flags.quiet) print_error(plan_text(engine, plan, choice) + "\n");
  print_error(void_flags(flags, engine, plan, choice, prompt));
  const Loading loading = load(engine);
  Session session =
      saved ? engine.load_session(flags.saved.load, options) : engine.new_session(options);
  if (!flags.saved.save.empty()) {
    // An interrupted prompt is saved, however long its last layer takes.
    flag_interrupt();
    take_time();
  }
  const Generated generated =
      run_model(flags, engine, session, prompt, constraint, speculation, steps);
  const GenerateResult& result = generated.result;
  if (flags.positions && session.selection().empty()) {
    print_error(void_note({"--positions"}, "no layer selected tokens, so it lists none"));
  }
  if (flags.json != "-") print("\n");
  if (!flags.quiet) {
    print_error("\n" + loading_line(loading) + timing_table(result.timings) +
                lost_rows_line(result) + drafts_line(result) + memory_table(engine.memory()) +
                selection_line(session.selection(), session.length()) +
                rows_line(session.ledger()) + "\n" + session.ledger().to_table());
  }
  if (!flags.saved.save.empty()) save(flags, session, generated);
  if (config.trace) write_trace(flags, *config.trace);
  if (!flags.json.empty()) {
    const nlohmann::json report = report_json(flags, engine, session, plan, loading, result);
    write_json(flags, report, session.ledger(), steps);
  }
  if (result.reason != FinishReason::interrupted) return 0;
  print_error(generated.unread.empty()
                  ? "sluice: interrupted; the text above is what was generated until then\n"
                  : "sluice: interrupted; " + std::to_string(generated.unread.size()) + " of " +
                        std::to_string(prompt.ids.size()) + " tokens of the prompt were not read" +
                        (flags.saved.save.empty() || session.length() == 0
                             ? ""
                             : "; --load-session reads the rest") +
                        "\n");
  return kInterruptedExit;
}

}  // namespace

Command add_generate(CLI::App& app) {
  const auto flags = std::make_shared<GenerateFlags>();
  flags->model.add_to(app);
  flags->model.add_scorers_to(app);
  app.footer(policy_help() + "\n" + app.get_footer());
  auto* prompt = app.add_option("-p,--prompt", flags->prompt, "the prompt itself");
  app.add_option("-f,--prompt-file", flags->prompt_file,
                 "read the prompt from a file or a pipe, - for standard input (the default)")
      ->excludes(prompt);
  auto* bos =
      app.add_option("--bos", flags->bos, "put the model's BOS token in front of the prompt")
          ->check(CLI::IsMember({"auto", "always", "never"}))
          ->capture_default_str();
  auto* chat = app.add_flag("--chat", flags->chat,
                            "the prompt is a question: write it as the checkpoint's chat template "
                            "has it");
  chat->excludes(bos);
  app.add_option("--system", flags->system, "text of the system, with --chat")->needs(chat);
  flags->saved.add_to(app, "the text that the prompt, which may be empty, goes on from");
  flags->saved.add_every_to(app);
  app.get_option("--load-session")->excludes(bos)->excludes(chat);
  app.get_option("--save-session")->excludes(chat);
  flags->generation.add_to(app, "prompt and --max-tokens");
  auto* speculate = flags->speculation.add_to(app);
  auto* ignore_eos =
      app.add_flag("--ignore-eos", flags->ignore_eos, "go on after an end-of-text token");
  flags->constraint.add_to(app, {speculate, ignore_eos});
  auto* json =
      app.add_option("--json", flags->json,
                     "write text, timings, plan and ledger to this file, - for standard output");
  app.add_flag("--positions", flags->positions,
               "list in it what every token selected: positions by layer and KV head, kept in a "
               "temporary file (TMPDIR) until the end")
      ->needs(json)
      ->excludes(speculate);
  app.add_option("--trace", flags->trace,
                 "write a timeline of all operations to this file, for Perfetto or Chrome; they "
                 "are waited for one by one, which on a GPU takes longer");
  add_force(app, flags->force, "--json and --trace");
  add_plan_flag(app, flags->model);
  app.add_flag("-q,--quiet", flags->quiet, "no plan, timings or ledger on standard error");
  return [flags, prompt] { return run(*flags, prompt->count() > 0); };
}

}  // namespace sluice::tools
