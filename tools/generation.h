// Shared code of `sluice generate` and `sluice chat`: sampling and planning flags, the planned
// session, and the text about it.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "sluice/chat.h"
#include "sluice/engine.h"
#include "sluice/generate.h"

namespace sluice::tools {

constexpr std::size_t kPlanIndent = 25;  // column of the text beside the names in a plan

struct GenerationFlags {
  SamplingParams sampling;
  std::string policy = "auto";
  std::int64_t context = 0;

  // `context_default` is the default of --context that --help shows.
  void add_to(CLI::App& app, const std::string& context_default);
  // Throws Error{usage} for values that make no sense.
  void validate() const;
};

// The session to plan, and why --policy auto chose its policy.
struct Choice {
  SessionOptions options;
  std::string reason;    // why auto prefers it, if that depends on the context; or empty
  std::string fallback;  // why auto did not take its preferred policy; or empty
};

// `options` with the policy asked for. "auto" is dense where Plan::dense_is_faster, else the first
// of engine/planning/losses.json that a cap has room for, else dense.
Choice choose_session(const Engine& engine, const std::string& policy, SessionOptions options);

// The plan, the policy, and notes on surprises.
std::string plan_text(const Engine& engine, const Plan& plan, const Choice& choice);

// A note on text of the chat template that looks like control tokens but is not; empty if none.
std::string text_marker_note(const ChatFormat& format);

// The cost of loading the weights.
struct Loading {
  std::uint64_t bytes = 0;  // of the weights, as stored
  double seconds = 0.0;
  std::uint64_t host_peak = 0;     // with the buffers of a step, as the allocators counted it
  std::uint64_t process_peak = 0;  // resident memory of the process until then

  double rate() const { return seconds > 0.0 ? static_cast<double>(bytes) / seconds : 0.0; }
};

// Loads the weights behind a progress bar.
Loading load(Engine& engine);

std::string loading_line(const Loading& loading);

std::string timing_table(const Timings& timings);
// Says that a disk lost rows; empty if none did.
std::string lost_rows_line(const GenerateResult& result);
std::string memory_table(const MemoryUse& memory);
// The selection of the last decoded token; empty if every layer was dense.
std::string selection_line(const StepSelection& selection, std::int64_t length);
// Hits and misses of decoding; empty without a device tier.
std::string rows_line(const Ledger& ledger);

}  // namespace sluice::tools
