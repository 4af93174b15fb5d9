// One cell of `sluice bench`: decode steps of some sequences behind a context, under one policy and
// one cap, planned by itself. With a model: run_cell() here; without: bench_replay.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "sluice/bus.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "sluice/ledger.h"
#include "tools/bench_check.h"
#include "tools/bench_flags.h"
#include "tools/bench_positions.h"
#include "tools/bench_transfer.h"

namespace sluice::tools {

struct BenchSteps {
  int warm_up = 4;  // steps before those that count
  int steps = 16;
};

// The settings that a cell measures.
struct CellKey {
  std::string policy;  // a preset's name or a line
  std::int64_t context = 0;
  std::string device_memory;  // as --device-memory has it; empty: no cap
  int sequences = 1;
};

// From one tier to another or in place, why, and in which layer.
using LayerMovement = std::tuple<int, Tier, Tier, Cause>;

struct Moved {
  Traffic traffic;
  // Operations that moved or read it: at most one per step, whatever the number of sequences,
  // because one kernel or one ordered stream of copies serves a layer.
  std::uint64_t requests = 0;
};

// Log-probabilities by dense attention, of the first sequence's measured steps.
using DenseAnswers = std::vector<std::vector<float>>;  // [steps][vocabulary], nats

struct CellResult {
  Plan plan;                             // without a model only `kv` of it
  double prompt_seconds = 0.0;           // to read the prompts of all sequences
  std::vector<double> step_seconds;      // of the steps that count, results in host memory
  std::map<LayerMovement, Moved> moved;  // of these steps, all sequences together

  // With a model, per step of the first sequence:
  std::vector<double> kl;     // KL(dense || this), nats
  std::vector<double> agree;  // 1: the likeliest token is dense attention's; 0: it is not
  // Without, the same, each the mean over layers and query heads:
  std::vector<double> output_error;     // |output - dense output| / |dense output|
  std::vector<double> attended_weight;  // share of dense attention's weight that was attended

  // With --check or --transfer, of the same steps in a run of their own:
  std::optional<CheckedSteps> checked;
  std::vector<Brought> brought;  // rows that they missed, by --transfer

  // Sums over layers and causes of what crossed between two different tiers.
  Crossing crossed() const;
};

// What the ledgers of a step's sequences have recorded since the steps in `seen`, which it moves
// on.
std::vector<LedgerEntry> new_entries(std::span<const Ledger* const> ledgers,
                                     std::vector<std::uint64_t>& seen);
// Adds what a step's sequences moved.
void add_step(std::span<const LedgerEntry> entries, std::map<LayerMovement, Moved>& moved);

// How the steps of a second run are counted.
struct Recount {
  std::shared_ptr<TrafficCounter> counter;  // null: there is no second run
  std::vector<TransferWay> ways;
  std::string device;
  int threads = 0;
  std::unique_ptr<TransferBench> bench;  // made when rows are first brought

  // By the flags.
  explicit Recount(const BenchFlags& flags);
};

// Checks the steps of a second run, which `run` makes, and brings the rows that they missed in
// other ways. Throws LedgerDiffers also if they moved something else than was measured, but not
// with a share of attention on the CPU, which changes with time.
void recount(CellResult& measured, const CellKey& key, const BenchSteps& steps, Recount& how,
             bool sees_keys, const std::function<void(StepCheck&)>& run);

// Tokens that every sequence is fed: the prompt and the steps' tokens.
std::int64_t tokens_of(const CellKey& key, const BenchSteps& steps);
SessionOptions session_of(const CellKey& key, const Policy& policy, const BenchSteps& steps);

// Caps that are too small, and what the device cannot do, are an answer of one cell; anything else
// would go wrong in other cells, too.
bool is_answer(const Error& error);

// Who gets every step of a cell, besides its result.
struct CellWatch {
  StepCheck* check = nullptr;
  PositionRecorder* positions = nullptr;  // of one sequence
};

// Runs a cell. Sequence i reads `texts[i]`, tokens_of() tokens. Fills `dense` if it is empty and
// compares with it otherwise. Throws Error{memory} if the plan does not fit.
CellResult run_cell(Engine& engine, const CellKey& key, const Policy& policy,
                    const BenchSteps& steps, std::span<const std::span<const TokenId>> texts,
                    DenseAnswers& dense, const CellWatch& watch = {});

}  // namespace sluice::tools
