// The ledger: the exact count of rows and bytes that a session moved or read.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/types.h"

namespace sluice {

// Why bytes moved or were read.
enum class Cause : std::uint8_t {
  append,      // new rows written to where attention reads them
  write_back,  // rows copied to their home in a lower tier, or written there at once where nothing
               // above keeps them: then there is no append
  hit,         // rows attended where they already were
  miss,        // rows fetched from a lower tier because attention needed them
  index_read,  // the key index, or keys themselves, read to estimate weights; rows are tokens
               // estimated
  value_read,  // values in a few bits, read for tokens whose rows are not; rows are tokens of the
               // pages that were read
  evict,       // rows that made room for others in a row cache, by the layer whose selection needed
               // it; no bytes, for they have a home
};
inline constexpr int kCauses = 7;
std::string_view to_string(Cause cause);

// Correction recomputes tokens that were decoded sparsely.
enum class Phase : std::uint8_t { prefill, decode, correction };
inline constexpr int kPhases = 3;
std::string_view to_string(Phase phase);

struct Traffic {
  std::uint64_t rows = 0;
  std::uint64_t bytes = 0;

  Traffic& operator+=(const Traffic& other);
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// One line of the account of one step. `from == to` means read or written in place, without
// crossing between tiers.
struct LedgerEntry {
  int layer = 0;
  Tier from = Tier::host;
  Tier to = Tier::host;
  Cause cause = Cause::hit;
  Traffic traffic;
};

// What one step, a prefill chunk or a decoded token, moved.
struct LedgerStep {
  std::uint64_t index = 0;
  Phase phase = Phase::prefill;
  int tokens = 0;
  std::vector<LedgerEntry> entries;
};

// Totals are exact for the session's whole life; single steps are kept for the newest
// `kHistory` only, so that a ledger's size is bounded.
class Ledger {
 public:
  static constexpr std::size_t kHistory = 256;

  explicit Ledger(int layers);

  void begin_step(Phase phase, int tokens);
  // The current step stopped, and its tokens were not kept. What it moved stays counted.
  void drop_tokens();
  // Adds to the current step. `bytes` counts whole rows, padding included: what the bus carries.
  void record(int layer, Tier from, Tier to, Cause cause, Traffic traffic);

  // Totals of a phase, over all layers or of one. Throws Error{usage} for a layer that there is
  // not.
  Traffic total(Phase phase, Tier from, Tier to, Cause cause) const;
  Traffic total(Phase phase, int layer, Tier from, Tier to, Cause cause) const;
  // All bytes that crossed from one tier to another, whatever the cause and phase.
  Traffic crossed(Tier from, Tier to) const;

  std::uint64_t steps(Phase phase) const;
  // That steps appended. Where a session is cut afterwards, by truncate() or because a callback
  // threw, they stay counted, as what was moved for them does.
  std::uint64_t tokens(Phase phase) const;
  int layers() const { return layers_; }
  const std::deque<LedgerStep>& history() const { return history_; }

  // A table of the non-zero totals: phase, direction, cause, rows, bytes, bytes per token.
  std::string to_table() const;
  // One JSON object: totals, totals per layer, and the steps in `history()`.
  std::string to_json() const;
  // The same, piece by piece, a step in each: a step takes some 100 bytes per layer and cause.
  void write_json(const std::function<void(std::string_view)>& sink) const;

 private:
  static constexpr std::size_t kTiers = 3;
  static constexpr std::size_t kKinds = kTiers * kTiers * kCauses;
  using Totals = std::array<Traffic, kKinds>;

  static std::size_t kind(Tier from, Tier to, Cause cause);
  const Totals& totals(Phase phase, int layer) const;

  int layers_;
  std::array<std::vector<Totals>, kPhases> totals_;  // [phase][layer]
  std::array<std::uint64_t, kPhases> steps_{};
  std::array<std::uint64_t, kPhases> tokens_{};
  std::deque<LedgerStep> history_;
};

}  // namespace sluice
