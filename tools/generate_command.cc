#include <array>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "lib/bytes.h"
#include "sluice/errors.h"
#include "sluice/generate.h"
#include "sluice/version.h"
#include "tools/commands.h"
#include "tools/flags.h"
#include "tools/interrupt.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/policy_help.h"
#include "tools/prompt.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kPlanIndent = 25;  // of what stands beside the names of a plan's lines
constexpr std::size_t kNoteIndent = 6;

struct GenerateFlags {
  ModelFlags model;
  SamplingParams sampling;
  std::string prompt;
  std::string prompt_file;
  std::string bos = "auto";
  std::string json;
  std::string policy = "auto";
  std::int64_t context = 0;
  bool positions = false;
  bool ignore_eos = false;
  bool quiet = false;
};

std::vector<TokenId> encode(const Engine& engine, const GenerateFlags& flags,
                            const std::string& text) {
  if (text.empty()) {
    throw Error(ErrorCode::prompt, "the prompt is empty; give some text to continue");
  }
  if (flags.bos == "auto") return engine.encode_prompt(text);
  std::vector<TokenId> ids = engine.tokenizer().encode(text);
  if (flags.bos == "always") {
    if (!engine.info().bos) {
      throw Error(ErrorCode::usage, "--bos always: this model's config.json names no BOS token");
    }
    ids.insert(ids.begin(), *engine.info().bos);
  }
  return ids;
}

std::string timing_table(const Timings& t) {
  std::array<char, 320> text{};
  std::snprintf(text.data(), text.size(),
                "prefill  %lld tokens in %.3f s, %.1f tokens/s\n"
                "first    token after %.3f s (TTFT)\n"
                "decode   %lld tokens in %.3f s, %.1f tokens/s, %.2f ms per token (TPOT)\n",
                static_cast<long long>(t.prefill_tokens), t.prefill_seconds, t.prefill_rate(),
                t.first_token_seconds, static_cast<long long>(t.decode_tokens), t.decode_seconds,
                t.decode_rate(), t.seconds_per_output_token() * 1e3);
  return text.data();
}

std::string memory_table(const MemoryUse& memory) {
  return "memory   peak of the device tier " + format_bytes(memory.device_peak) +
         ", of host memory " + format_bytes(memory.host_peak) + "\n";
}

// What the last decoded token chose, layer by layer; empty if every layer was dense.
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

// What a decoded token attended to besides the newest page, layer by layer and KV head by KV head.
nlohmann::json positions_json(const Session& session) {
  nlohmann::json layers = nlohmann::json::array();
  for (const LayerSelection& layer : session.selection()) {
    layers.push_back({{"layer", layer.layer}, {"positions", layer.positions}});
  }
  return {{"length", session.length()}, {"layers", std::move(layers)}};
}

// One line about it for people.
std::string selection_line(const StepSelection& selection, std::int64_t length) {
  if (selection.empty()) return "";
  double rows = 0.0;
  double alpha = 0.0;
  for (const LayerSelection& layer : selection) {
    rows += layer.attended / static_cast<double>(selection.size());
    alpha += layer.alpha / static_cast<double>(selection.size());
  }
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(),
                "policy   last token: %.0f of %lld rows per KV head, alpha %.3f\n", rows,
                static_cast<long long>(length), alpha);
  return text.data();
}

std::string report_json(const GenerateFlags& flags, const Engine& engine, const Session& session,
                        const Plan& plan, const GenerateResult& result,
                        const nlohmann::json& steps) {
  const Timings& t = result.timings;
  const MemoryUse memory = engine.memory();
  nlohmann::json root = {
      {"version", kVersion},
      {"model", flags.model.model},
      {"text", result.text},
      {"tokens", result.tokens},
      {"finish_reason", to_string(result.reason)},
      {"timings",
       {{"prefill_seconds", t.prefill_seconds},
        {"prefill_tokens", t.prefill_tokens},
        {"prefill_tokens_per_second", t.prefill_rate()},
        {"first_token_seconds", t.first_token_seconds},
        {"decode_seconds", t.decode_seconds},
        {"decode_tokens", t.decode_tokens},
        {"decode_tokens_per_second", t.decode_rate()},
        {"seconds_per_output_token", t.seconds_per_output_token()}}},
      {"memory",
       {{"device_peak_bytes", memory.device_peak}, {"host_peak_bytes", memory.host_peak}}},
      {"policy", to_string(session.policy())},
      {"selection", selection_json(session.selection())},
      {"plan", nlohmann::json::parse(plan.to_json())},
      {"ledger", nlohmann::json::parse(session.ledger().to_json())}};
  if (flags.positions) root["steps"] = steps;
  return report_text(root);
}

void load(Engine& engine) {
  ProgressBar bar("loading");
  engine.load_weights([&](double share) { bar.update(share, ""); });
}

GenerateResult run_model(const GenerateFlags& flags, const Engine& engine, Session& session,
                         const std::vector<TokenId>& prompt, nlohmann::json& steps) {
  std::optional<ProgressBar> bar("prefill");
  GenerateOptions options;
  options.sampling = flags.sampling;
  options.ignore_eos = flags.ignore_eos;
  options.interrupt = &interrupted();
  options.on_prefill = [&](std::int64_t done, std::int64_t total) {
    bar->update(static_cast<double>(done) / static_cast<double>(total),
                std::to_string(done) + " of " + std::to_string(total) + " tokens");
    if (done == total) {
      bar.reset();
      flag_interrupt();  // from here on there is text to keep
    }
    return true;
  };
  if (flags.positions) {
    options.on_decode = [&](const Session& at) { steps.push_back(positions_json(at)); };
  }
  const bool stream_text = flags.json != "-";
  options.on_text = [&](std::string_view text) {
    if (stream_text) print(text);
  };
  GenerateResult result = generate(engine, session, prompt, options);
  take_time();
  return result;
}

// The session to plan, and why it is not what --policy auto prefers, if so.
struct Choice {
  SessionOptions options;
  std::string fallback;
};

// The policy asked for. "auto" is the preset sluice, or dense under a cap that does not hold the
// key index.
Choice choose_session(const GenerateFlags& flags, const Engine& engine, std::int64_t context) {
  const bool automatic = flags.policy == "auto";
  Choice choice;
  choice.options.context = context;
  choice.options.reports_positions = flags.positions;
  choice.options.policies = {engine.policy(automatic ? "sluice" : flags.policy)};
  if (!automatic) return choice;
  try {
    engine.plan(choice.options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::memory) throw;
    choice.options.policies = {Policy()};
    choice.fallback = error.what();
  }
  return choice;
}

// Notes for people: what they might not have expected.
std::string notes(const ModelInfo& info, const Choice& choice) {
  std::string text;
  if (!choice.fallback.empty()) {
    text += wrapped(
        "note:", kNoteIndent,
        "decoding is dense, for the policy sluice does not fit: " + with_flags(choice.fallback));
  }
  const std::int64_t context = choice.options.context;
  if (info.trained_context > 0 && context > info.trained_context) {
    text +=
        wrapped("note:", kNoteIndent,
                "the model was trained for " + std::to_string(info.trained_context) +
                    " tokens; at " + std::to_string(context) + " its answers may make no sense");
  }
  return text;
}

int run(const GenerateFlags& flags, bool prompt_given) {
  flags.sampling.validate();
  require_writable(flags.json);
  if (flags.context < 0) {
    throw Error(ErrorCode::usage,
                "--context " + std::to_string(flags.context) + ": give a number of tokens");
  }
  Engine engine = Engine::open(flags.model.config());
  const std::vector<TokenId> prompt =
      encode(engine, flags, prompt_given ? flags.prompt : read_prompt(flags.prompt_file));
  const std::int64_t needed = static_cast<std::int64_t>(prompt.size()) + flags.sampling.max_tokens;
  const Choice choice = choose_session(flags, engine, flags.context > 0 ? flags.context : needed);
  const SessionOptions& options = choice.options;
  const Plan plan = engine.plan(options);
  if (!flags.quiet) {
    print_error(plan.to_table() +
                wrapped("  policy", kPlanIndent, to_string(options.policies.front())) +
                notes(engine.info(), choice) + "\n");
  }
  load(engine);
  Session session = engine.new_session(options);
  nlohmann::json steps = nlohmann::json::array();
  const GenerateResult result = run_model(flags, engine, session, prompt, steps);
  if (flags.json != "-") print("\n");
  if (!flags.quiet) {
    print_error("\n" + timing_table(result.timings) + memory_table(engine.memory()) +
                selection_line(session.selection(), session.length()) + "\n" +
                session.ledger().to_table());
  }
  if (!flags.json.empty()) {
    write_report(flags.json, report_json(flags, engine, session, plan, result, steps));
  }
  if (result.reason != FinishReason::interrupted) return 0;
  print_error("sluice: interrupted; the text above is what was generated until then\n");
  return static_cast<int>(ErrorCode::interrupted);
}

}  // namespace

Command add_generate(CLI::App& app) {
  const auto flags = std::make_shared<GenerateFlags>();
  flags->model.add_to(app);
  app.footer(policy_help() + "\n" + app.get_footer());
  auto* prompt = app.add_option("-p,--prompt", flags->prompt, "the prompt itself");
  app.add_option("-f,--prompt-file", flags->prompt_file,
                 "read the prompt from a file or a pipe, - for standard input (the default)")
      ->excludes(prompt);
  app.add_option("--bos", flags->bos, "put the model's BOS token in front of the prompt")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  app.add_option(
         "--policy", flags->policy,
         "which tokens decoding attends to: a preset or a line of settings, see below; auto "
         "is sluice, or dense where --device-memory does not hold the key index")
      ->capture_default_str();
  add_integer(app, "-n,--max-tokens", flags->sampling.max_tokens, "most tokens to generate")
      ->capture_default_str();
  add_integer(app, "--context", flags->context,
              "tokens to plan memory for; default: prompt and --max-tokens");
  SamplingParams& sampling = flags->sampling;
  app.add_option("--temperature", sampling.temperature, "0 is greedy")->capture_default_str();
  add_integer(app, "--top-k", sampling.top_k, "sample among the k likeliest; 0: all")
      ->capture_default_str();
  app.add_option("--top-p", sampling.top_p, "sample from the smallest set this probable")
      ->capture_default_str();
  app.add_option("--min-p", sampling.min_p, "drop tokens below this share of the likeliest")
      ->capture_default_str();
  app.add_option("--repetition-penalty", sampling.repetition_penalty, "above 1: repeat less")
      ->capture_default_str();
  add_integer(app, "--seed", sampling.seed, "of the sampler")->capture_default_str();
  app.add_option("--stop", sampling.stop, "end before this string; may be given several times")
      ->allow_extra_args(false);  // or [re] would be a list of re
  app.add_flag("--ignore-eos", flags->ignore_eos, "go on after an end-of-text token");
  auto* json =
      app.add_option("--json", flags->json,
                     "write text, timings, plan and ledger to this file, - for standard output");
  app.add_flag("--positions", flags->positions,
               "list in it what every token selected: positions by layer and KV head")
      ->needs(json);
  app.add_flag("-q,--quiet", flags->quiet, "no plan, timings or ledger on standard error");
  return [flags, prompt] { return run(*flags, prompt->count() > 0); };
}

}  // namespace sluice::tools
