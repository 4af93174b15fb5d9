// Traces of the positions that a policy selected: written by `sluice bench --record-positions` and
// by any other program, replayed by `bench --positions` without the model and its keys.
//
// A trace is a safetensors file with the tensors
//   sizes      I64 [3]: tokens before the first step, query heads, head_dim
//   counts     I32 [steps, layers, kv_heads]: positions selected; -1: the layer attends to all
//   positions  I32 [sum of counts]: these, ascending, in the order of `counts`
//   missed     I64 [steps, layers]: rows that the run fetched from host memory; optional
// Step i decodes the token at position `tokens + i`. The newest page, the kPageTokens or fewer
// tokens from the last multiple of kPageTokens up to that token, is always attended and not listed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/selection.h"
#include "sluice/types.h"

namespace sluice::tools {

class PositionTrace {
 public:
  // Reads all of a file. Throws Error{corrupt} naming file and tensor for tensors that are missing,
  // of another dtype or shape, that disagree, and for positions that are out of order or of the
  // token's own page or later; Error{unsupported} for sizes that Sluice does not have; and what
  // opening the file throws.
  static PositionTrace open(const std::filesystem::path& path);

  // The row format is the default.
  const KvShape& shape() const { return shape_; }
  std::int64_t context() const { return context_; }
  std::int64_t steps() const { return steps_; }
  bool is_dense(int layer) const;
  std::span<const std::int32_t> at(std::int64_t step, int layer, int head) const;
  // Most positions of a KV head.
  std::int64_t most() const { return most_; }
  // Rows that the run missed in a step, all layers; empty if the trace does not say.
  const std::vector<std::int64_t>& missed() const { return missed_; }
  // A checksum of all of it.
  std::uint64_t checksum() const;
  // A policy that attends to what the trace says, by PositionScorer.
  Policy policy(const Scorers& scorers) const;

 private:
  std::size_t entry(std::int64_t step, int layer, int head) const;
  void require_positions(const std::string& name) const;

  KvShape shape_;
  std::int64_t context_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t most_ = 0;
  std::vector<std::int32_t> counts_;     // [steps, layers, kv_heads]
  std::vector<std::int64_t> first_;      // of each count, in positions_
  std::vector<std::int32_t> positions_;  // of all
  std::vector<std::int64_t> missed_;     // [steps] or empty
};

// Estimates that select the positions of a trace and nothing else, on the host.
class PositionScorer : public Scorer {
 public:
  static constexpr const char* kName = "recorded";

  explicit PositionScorer(std::shared_ptr<const PositionTrace> trace);

  void score(const RunScorer& call) const override;
  std::uint64_t bytes_read(const ScorerUse& /*use*/, const ScanExtent& /*extent*/) const override {
    return 0;
  }

 private:
  std::shared_ptr<const PositionTrace> trace_;
};

// Collects the trace of one sequence.
class PositionRecorder {
 public:
  PositionRecorder(const KvShape& shape, std::int64_t context, const Policy& policy);

  // A step's selection, with positions, and its ledger entries.
  void add(const StepSelection& selection, std::span<const LedgerEntry> entries);
  // Writes the file, whole or not at all. Throws Error{io}.
  void write(const std::filesystem::path& path) const;

 private:
  KvShape shape_;
  std::int64_t context_;
  Policy policy_;
  std::int64_t steps_ = 0;
  std::vector<std::int32_t> counts_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int64_t> missed_;  // [steps, layers]
};

// Throws Error{usage} for a policy whose positions cannot be recorded: one that is dense
// everywhere, corrects, or evicts rows of the prompt.
void require_positions_of(const Policy& policy, int layers);

}  // namespace sluice::tools
