// The ledger: the exact count of rows and bytes that a session moved or read.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/types.h"

namespace sluice {

// Why bytes moved or were read.
enum class Cause : std::uint8_t {
  append,      // new rows written to where attention reads them
  write_back,  // rows copied to their slot in a lower tier, or written only there if no higher tier
               // keeps them: then there is no append
  hit,         // rows attended where they already were
  miss,        // rows fetched from a lower tier because attention needed them
  index_read,  // the key index, or keys themselves, read to estimate weights; rows are tokens
               // estimated
  value_read,  // quantised values read for tokens whose rows are not read; rows are tokens of the
               // pages that were read
  evict,       // rows evicted from a row cache, counted for the layer whose selection needed the
               // room; no bytes, because host memory holds every row
  index_swap,  // tiles of the key index, with values, that came to the device for the step, or went
               // to host memory to make room for its index; rows are tokens of the tiles
};
inline constexpr int kCauses = 8;
std::string_view to_string(Cause cause);

// Correction: recomputes tokens that were decoded sparsely.
enum class Phase : std::uint8_t { prefill, decode, correction };
inline constexpr int kPhases = 3;
std::string_view to_string(Phase phase);

struct Traffic {
  std::uint64_t rows = 0;
  std::uint64_t bytes = 0;

  Traffic& operator+=(const Traffic& other);
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// One line of a step. `from == to` means read or written in place, without crossing between tiers.
struct LedgerEntry {
  int layer = 0;
  Tier from = Tier::host;
  Tier to = Tier::host;
  Cause cause = Cause::hit;
  Traffic traffic;
};

// The traffic of one step: a prefill chunk or a decoded token.
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
  // Drops the tokens of the current step, which stopped. Its traffic stays counted.
  void drop_tokens();
  // Drops the last `tokens` tokens of the latest step, which were drafts and are rejected.
  void drop_tokens(int tokens);
  // Adds to the current step. `bytes` counts whole rows with padding, because the bus carries it.
  void record(int layer, Tier from, Tier to, Cause cause, Traffic traffic);

  // Totals of a phase, over all layers or for one. Throws Error{usage} for a layer out of range.
  Traffic total(Phase phase, Tier from, Tier to, Cause cause) const;
  Traffic total(Phase phase, int layer, Tier from, Tier to, Cause cause) const;
  // All traffic from one tier to another, over all causes and phases.
  Traffic crossed(Tier from, Tier to) const;

  std::uint64_t steps(Phase phase) const;
  // Tokens that steps appended, without rejected drafts. Tokens dropped later, by truncate() or
  // because a callback threw, stay counted, as their traffic does.
  std::uint64_t tokens(Phase phase) const;
  int layers() const { return layers_; }
  const std::list<LedgerStep>& history() const { return history_; }

  // A table of the non-zero totals: phase, direction, cause, rows, bytes, bytes per token.
  std::string to_table() const;
  // One JSON object: totals, totals per layer, and the steps in `history()`.
  std::string to_json() const;
  // The same in parts, one step each: a step takes some 100 bytes per layer and cause.
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
  // A list, because moving one cannot fail; a deque of libstdc++ allocates.
  std::list<LedgerStep> history_;
};

}  // namespace sluice
