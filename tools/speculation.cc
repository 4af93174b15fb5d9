#include "tools/speculation.h"

#include <array>
#include <cstdio>
#include <utility>

#include "lib/bytes.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "tools/flags.h"
#include "tools/generation.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

void take_off(std::optional<std::uint64_t>& cap, std::uint64_t bytes, const char* flag) {
  if (!cap) return;
  if (bytes >= *cap) {
    throw Error(ErrorCode::memory, std::string("the draft model needs ") + format_bytes(bytes) +
                                       ", and " + flag + " is " + format_bytes(*cap));
  }
  *cap -= bytes;
}

}  // namespace

CLI::Option* SpeculationFlags::add_to(CLI::App& app) {
  auto* option = app.add_option(
      "--speculate", from,
      "guess the next tokens and verify them in one step; the text stays the same. lookup: what "
      "followed the newest tokens earlier in the context; or a checkpoint of a smaller model with "
      "the same tokenizer");
  add_integer(app, "--drafts", drafts, "most guesses of a step; fewer while few are accepted")
      ->capture_default_str()
      ->needs(option);
  return option;
}

void SpeculationFlags::validate() const {
  if (drafts >= 1 && drafts <= kMostDrafts) return;
  throw Error(ErrorCode::usage,
              "--drafts " + std::to_string(drafts) + ": give 1 to " + std::to_string(kMostDrafts));
}

void Speculation::open(const ModelFlags& model, std::int64_t context, bool quiet,
                       EngineConfig& config, Engine& engine) {
  if (flags_->from.empty()) return;
  if (flags_->from == "lookup") {
    drafter_ = std::make_unique<LookupDrafter>();
    return;
  }
  EngineConfig of_drafts;
  of_drafts.model = flags_->from;
  of_drafts.device = model.device;
  of_drafts.threads = model.threads;
  engine_.emplace(Engine::open(of_drafts));
  require_same_tokens(*engine_, engine);
  const Plan plan = engine_->plan(context);
  take_off(config.device_memory, plan.device_bytes(), "--device-memory");
  take_off(config.host_memory, plan.host_bytes(), "--host-memory");
  if (!quiet) {
    print_error(wrapped("  draft model", kPlanIndent,
                        one_line(flags_->from) + ": " +
                            format_bytes(plan.host_bytes() + plan.device_bytes()) +
                            " for weights, KV cache and activations"));
  }
  load(*engine_);
  drafter_ = std::make_unique<ModelDrafter>(*engine_, engine_->new_session(context), engine);
  if (config.device_memory || config.host_memory || plan.on_device) engine = Engine::open(config);
}

void Speculation::use(GenerateOptions& options) {
  options.drafter = drafter_.get();
  options.drafts = flags_->drafts;
}

std::string drafts_line(const GenerateResult& result) {
  const DraftCounts& counts = result.drafts;
  if (counts.steps == 0) return "";
  // Every step yields a token besides accepted drafts.
  const std::int64_t steps = result.timings.decode_tokens - counts.accepted;
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(),
                "drafts   %lld drafts accepted of %lld, %.2f tokens per step over %lld steps\n",
                static_cast<long long>(counts.accepted), static_cast<long long>(counts.drafted),
                static_cast<double>(result.timings.decode_tokens) / static_cast<double>(steps),
                static_cast<long long>(steps));
  return text.data();
}

}  // namespace sluice::tools
