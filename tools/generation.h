// What `sluice generate` and `sluice chat` share: flags of sampling and planning, the session that
// they plan, and what they tell people about it.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "sluice/chat.h"
#include "sluice/engine.h"
#include "sluice/generate.h"

namespace sluice::tools {

constexpr std::size_t kPlanIndent = 25;  // of what stands beside the names of a plan's lines

struct GenerationFlags {
  SamplingParams sampling;
  std::string policy = "auto";
  std::int64_t context = 0;

  // `context_default` says in --help what is planned for without --context.
  void add_to(CLI::App& app, const std::string& context_default);
  // Throws Error{usage} for values that make no sense.
  void validate() const;
};

// The session to plan, and why --policy auto chose its policy.
struct Choice {
  SessionOptions options;
  std::string reason;    // why it prefers it, where that depends on the context; or empty
  std::string fallback;  // why it is not what it prefers; or empty
};

// `options` with the policy asked for. "auto" is dense where Plan::dense_is_faster, else the first
// that a cap has room for: values, which is the closest to dense attention and fetches the fewest
// rows; the same with keys in 3 bits; sluice, whose index is the smallest, without slices and
// candidates on a GPU; or dense.
Choice choose_session(const Engine& engine, const std::string& policy, SessionOptions options);

// The plan, the policy, and what people might not have expected.
std::string plan_text(const Engine& engine, const Plan& plan, const Choice& choice);

// What the chat template writes as text though it looks like control tokens; empty if nothing.
std::string text_marker_note(const ChatFormat& format);

// What loading the weights took.
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
std::string memory_table(const MemoryUse& memory);
// What the last decoded token attended to; empty if every layer was dense.
std::string selection_line(const StepSelection& selection, std::int64_t length);
// Where decoding found its rows; empty if there is no device tier.
std::string rows_line(const Ledger& ledger);

}  // namespace sluice::tools
