#include "tools/generation.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <utility>

#include "engine/planning/losses.h"
#include "lib/bytes.h"
#include "sluice/errors.h"
#include "tools/flags.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kNoteIndent = 6;

bool is_dense_faster(const Engine& engine, SessionOptions options) {
  options.policies = {Policy()};
  try {
    return engine.plan(options).dense_is_faster;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::memory) throw;
    return false;
  }
}

bool computes_on_device(const Engine& engine) {
  try {
    return engine.plan(1).on_device;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::memory) throw;
    return false;  // no policy fits
  }
}

// Notes on results that the user may not expect.
std::string notes(const ModelInfo& info, const Choice& choice) {
  std::string text;
  if (!choice.fallback.empty()) {
    text += wrapped("note:", kNoteIndent, with_flags(choice.fallback));
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

std::uint64_t most_resident_yet() {
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word) {
    std::uint64_t kib = 0;
    if (word == "VmHWM:" && file >> kib) return kib * 1024;
  }
  return 0;
}

}  // namespace

void GenerationFlags::add_to(CLI::App& app, const std::string& context_default) {
  app.add_option(
         "--policy", policy,
         "which tokens decoding attends to: a preset or a line of settings, see below; auto "
         "is dense where all rows are in the memory that attends to them and so few that this is "
         "faster; else values or, where --device-memory does not hold its key index, values with "
         "keys in 2 bits and 256 rows, compact or tiny; at last dense")
      ->capture_default_str();
  add_integer(app, "-n,--max-tokens", sampling.max_tokens, "most tokens to generate")
      ->capture_default_str();
  add_integer(app, "--context", context, "tokens to plan memory for; default: " + context_default)
      ->check(not_zero());
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
      ->allow_extra_args(false);  // otherwise [re] would be a list of re
}

void GenerationFlags::validate() const {
  sampling.validate();
  if (context < 0) {
    throw Error(ErrorCode::usage,
                "--context " + std::to_string(context) + ": give a number of tokens");
  }
}

Choice choose_session(const Engine& engine, const std::string& policy, SessionOptions options) {
  Choice choice{std::move(options), {}, {}};
  if (policy != "auto") {
    choice.options.policies = {engine.policy(policy)};
    return choice;
  }
  if (is_dense_faster(engine, choice.options)) {
    choice.options.policies = {Policy()};
    choice.reason =
        "all rows are where attention reads them and so few that this is faster than selecting";
    return choice;
  }
  const std::vector<planning::PolicyLoss> preferred =
      planning::preferred_policies(computes_on_device(engine));
  const planning::Fitting fitting = planning::first_that_fits(engine, choice.options, preferred);
  const std::string line = fitting.choice != nullptr ? fitting.choice->policy : "";
  choice.options.policies = {line.empty() ? Policy() : engine.policy(line)};
  if (fitting.refused != nullptr) {
    choice.fallback = "decoding " + (line.empty() ? "is dense" : "goes by the policy " + line) +
                      ", for the policy " + fitting.refused->policy +
                      " does not fit: " + fitting.why->what();
  }
  return choice;
}

std::string plan_text(const Engine& engine, const Plan& plan, const Choice& choice) {
  std::string policy = to_string(choice.options.policies.front());
  if (!choice.reason.empty()) policy += ", for " + choice.reason;
  return plan.to_table() + wrapped("  policy", kPlanIndent, policy) + notes(engine.info(), choice);
}

std::string text_marker_note(const ChatFormat& format) {
  std::string markers;
  for (const std::string& marker : format.text_markers()) {
    markers += (markers.empty() ? "" : ", ") + in_quotes(marker);
  }
  if (markers.empty()) return {};
  return wrapped("note:", 6,
                 "the chat template writes " + markers +
                     ", no tokens of tokenizer.json, so the model reads them as text; if it was "
                     "not trained so, take both files from the same checkpoint");
}

Loading load(Engine& engine) {
  ProgressBar bar("loading");
  const auto start = std::chrono::steady_clock::now();
  engine.load_weights([&](double share) { bar.update(share, ""); });
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return {engine.info().weight_bytes, elapsed.count(), engine.memory().host_peak,
          most_resident_yet()};
}

std::string loading_line(const Loading& loading) {
  std::array<char, 64> seconds{};
  std::snprintf(seconds.data(), seconds.size(), " in %.3f s, ", loading.seconds);
  return "load     " + format_bytes(loading.bytes) + seconds.data() +
         format_bytes(static_cast<std::uint64_t>(loading.rate())) + "/s, peak of host memory " +
         format_bytes(loading.host_peak) + "\n";
}

std::string timing_table(const Timings& t) {
  std::array<char, 320> text{};
  std::snprintf(text.data(), text.size(), "prefill  %lld tokens in %.3f s, %.1f tokens/s\n",
                static_cast<long long>(t.prefill_tokens), t.prefill_seconds, t.prefill_rate());
  std::string table = text.data();
  if (t.first_token_seconds == 0.0) return table;  // interrupted before the first token
  std::snprintf(text.data(), text.size(),
                "first    token after %.3f s (TTFT)\n"
                "decode   %lld tokens in %.3f s, %.1f tokens/s, %.2f ms per token (TPOT)\n",
                t.first_token_seconds, static_cast<long long>(t.decode_tokens), t.decode_seconds,
                t.decode_rate(), t.seconds_per_output_token() * 1e3);
  return table + text.data();
}

std::string lost_rows_line(const GenerateResult& result) {
  if (result.recomputed_tokens == 0) return "";
  return "disk     lost rows of a session of " + std::to_string(result.recomputed_tokens) +
         " tokens, which were computed again\n";
}

std::string memory_table(const MemoryUse& memory) {
  return "memory   peak of the device tier " + format_bytes(memory.device_peak) +
         ", of host memory " + format_bytes(memory.host_peak) + "\n";
}

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

std::string rows_line(const Ledger& ledger) {
  const Traffic fetched = ledger.total(Phase::decode, Tier::host, Tier::device, Cause::miss);
  const Traffic there = ledger.total(Phase::decode, Tier::device, Tier::device, Cause::hit);
  const std::uint64_t rows = fetched.rows + there.rows;
  if (rows == 0) return "";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "rows     %.1f%% were on the device, ",
                100.0 * static_cast<double>(there.rows) / static_cast<double>(rows));
  return text.data() + format_bytes(fetched.bytes / ledger.tokens(Phase::decode)) +
         " fetched per token\n";
}

}  // namespace sluice::tools
