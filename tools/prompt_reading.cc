#include "tools/prompt_reading.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "lib/text.h"

namespace sluice::tools {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A time as people say it: 40 s, 12 min, 1.5 h.
std::string in_words(double seconds) {
  if (seconds < 90.0) return std::to_string(std::lround(seconds)) + " s";
  if (seconds < 5400.0) return std::to_string(std::lround(seconds / 60.0)) + " min";
  return digits(std::round(seconds / 360.0) / 10.0) + " h";
}

}  // namespace

PromptParts read_in_parts(const SavedSessionFlags& flags, Session& session,
                          std::span<const TokenId> prompt, const Progress& progress,
                          const Stop& stops) {
  PromptParts parts = {prompt};
  if (flags.every == 0) return parts;
  const std::int64_t step = session.plan().chunk;
  const auto size = static_cast<std::size_t>(std::max(flags.every / step, std::int64_t{1}) * step);
  // A last part of one token would be decoded, under the policy, instead of read.
  while (parts.unread.size() > size + 1) {
    const auto done = static_cast<std::int64_t>(prompt.size() - parts.unread.size());
    const std::int64_t before = session.length();
    const auto begin = std::chrono::steady_clock::now();
    const std::span<const float> logits = session.prefill(
        parts.unread.first(size),
        [&](std::int64_t of_part, std::int64_t) {
          return progress(done + of_part, std::ssize(prompt));
        },
        stops);
    parts.seconds += seconds_since(begin);
    parts.is_interrupted = logits.empty();
    parts.unread = parts.unread.subspan(static_cast<std::size_t>(session.length() - before));
    if (parts.is_interrupted) break;
    session.save(flags.save, note_of({{}, {parts.unread.begin(), parts.unread.end()}}));
  }
  return parts;
}

void add_parts(const PromptParts& parts, std::span<const TokenId> prompt, Timings& timings) {
  timings.prefill_tokens += static_cast<std::int64_t>(prompt.size() - parts.unread.size());
  timings.prefill_seconds += parts.seconds;
  if (timings.first_token_seconds > 0.0) timings.first_token_seconds += parts.seconds;
}

void PromptProgress::update(std::int64_t done, std::int64_t of) {
  const auto total = static_cast<double>(of);
  remaining_.note(static_cast<double>(done), seconds_since(begin_));
  std::string note = std::to_string(done) + " of " + std::to_string(of) + " tokens";
  if (const std::optional<double> left = remaining_.until(total); left && done < of) {
    note += ", " + in_words(*left) + " left";
  }
  bar_.update(static_cast<double>(done) / total, note);
}

}  // namespace sluice::tools
