// A prompt on its way into a session: progress, interrupts, and saves in between.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>

#include "sluice/engine.h"
#include "sluice/generate.h"
#include "tools/output.h"
#include "tools/remaining_time.h"
#include "tools/saved_session_flags.h"

namespace sluice::tools {

// What was read of a prompt before generate() has it.
struct PromptParts {
  std::span<const TokenId> unread;
  double seconds = 0.0;  // without those of saving
  bool is_interrupted = false;
};

// Reads a prompt in the parts of --save-every, whole prefill steps each, and saves the session
// after each of them. The last part is left to generate(). `progress` and `stops` are those of
// Session::prefill; after an interrupt `unread` begins behind the tokens that the session has.
PromptParts read_in_parts(const SavedSessionFlags& flags, Session& session,
                          std::span<const TokenId> prompt, const Progress& progress,
                          const Stop& stops);

// Adds the parts to the times of the last one.
void add_parts(const PromptParts& parts, std::span<const TokenId> prompt, Timings& timings);

// The progress bar over a prompt, with the time that is left.
class PromptProgress {
 public:
  // `done` of `of` tokens are read.
  void update(std::int64_t done, std::int64_t of);

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  ProgressBar bar_{"prefill"};
  RemainingTime remaining_;
};

}  // namespace sluice::tools
