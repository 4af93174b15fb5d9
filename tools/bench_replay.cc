#include "tools/bench_replay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "sluice/errors.h"

namespace sluice::tools {
namespace {

using ReplayClock = std::chrono::steady_clock;

double replay_seconds(ReplayClock::time_point start) {
  return std::chrono::duration<double>(ReplayClock::now() - start).count();
}

// The inputs of a step for all layers, read before its time is taken: [layers, sequences, heads,
// head_dim] of each part.
class StepInputs {
 public:
  explicit StepInputs(const ReplayRows& rows) : rows_(&rows) {
    const BenchRows& one = *rows.sequences.front();
    const auto cells = static_cast<std::size_t>(one.shape().layers) * rows.sequences.size();
    for (const RowPart part : {RowPart::q, RowPart::k, RowPart::v}) {
      parts_.emplace_back(cells * one.token_bytes(part));
    }
  }

  // Reads the queries of a step and the rows of its token.
  void read(std::int64_t step, std::int64_t token) {
    const int layers = rows_->sequences.front()->shape().layers;
    for (const RowPart part : {RowPart::q, RowPart::k, RowPart::v}) {
      const std::size_t bytes = rows_->sequences.front()->token_bytes(part);
      std::span<std::byte> left = parts_[static_cast<std::size_t>(part)];
      for (int layer = 0; layer < layers; ++layer) {
        for (const BenchRows* const sequence : rows_->sequences) {
          sequence->read(part, layer, part == RowPart::q ? step : token, 1, left.first(bytes));
          left = left.subspan(bytes);
        }
      }
    }
  }

  KvInput input(RowPart part, int layer) const {
    const BenchRows& one = *rows_->sequences.front();
    const std::size_t bytes = one.token_bytes(part) * rows_->sequences.size();
    ArrayLayout layout;
    layout.dtype = one.dtype(part);
    return {parts_[static_cast<std::size_t>(part)].data() + static_cast<std::size_t>(layer) * bytes,
            layout};
  }

 private:
  const ReplayRows* rows_;
  std::vector<std::vector<std::byte>> parts_;
};

// Appends the context of one sequence.
void append_context(KvSequence& sequence, const BenchRows& rows, std::int64_t first,
                    std::int64_t context, std::int64_t chunk) {
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
  while (sequence.length() < context) {
    const std::int64_t count = std::min(chunk, context - sequence.length());
    const std::int64_t token = first + sequence.length();
    keys.resize(static_cast<std::size_t>(count) * rows.token_bytes(RowPart::k));
    values.resize(static_cast<std::size_t>(count) * rows.token_bytes(RowPart::v));
    KvStep step = sequence.begin_step(Phase::prefill, count);
    for (int layer = 0; layer < rows.shape().layers; ++layer) {
      rows.read(RowPart::k, layer, token, count, keys);
      rows.read(RowPart::v, layer, token, count, values);
      ArrayLayout of_keys;
      ArrayLayout of_values;
      of_keys.dtype = rows.dtype(RowPart::k);
      of_values.dtype = rows.dtype(RowPart::v);
      step.append(layer, {keys.data(), of_keys}, {values.data(), of_values});
    }
    step.end();
  }
}

// Outputs and log-sum-exps of a step: [layers, sequences, query_heads(, head_dim)].
struct StepOutputs {
  StepOutputs(const KvShape& shape, std::size_t sequences)
      : heads(static_cast<std::size_t>(shape.query_heads)),
        dim(static_cast<std::size_t>(shape.head_dim)),
        layer_heads(sequences * heads),
        out(static_cast<std::size_t>(shape.layers) * layer_heads * dim),
        lse(static_cast<std::size_t>(shape.layers) * layer_heads) {}

  // Those of the first sequence.
  DenseStep first() const {
    DenseStep step;
    for (std::size_t at = 0; at < lse.size(); at += layer_heads) {
      const auto out_at = out.begin() + static_cast<std::ptrdiff_t>(at * dim);
      const auto lse_at = lse.begin() + static_cast<std::ptrdiff_t>(at);
      step.out.insert(step.out.end(), out_at, out_at + static_cast<std::ptrdiff_t>(heads * dim));
      step.lse.insert(step.lse.end(), lse_at, lse_at + static_cast<std::ptrdiff_t>(heads));
    }
    return step;
  }

  std::size_t heads, dim, layer_heads;
  std::vector<float> out;
  std::vector<float> lse;
};

void run_step(KvStep step, const StepInputs& inputs, int layers, StepOutputs& outputs) {
  for (int layer = 0; layer < layers; ++layer) {
    const std::size_t at = static_cast<std::size_t>(layer) * outputs.layer_heads;
    step.append(layer, inputs.input(RowPart::k, layer), inputs.input(RowPart::v, layer));
    step.attend(layer, inputs.input(RowPart::q, layer), outputs.out.data() + at * outputs.dim,
                outputs.lse.data() + at);
  }
  step.end();
}

double norm_of(std::span<const float> vector) {
  return std::sqrt(std::transform_reduce(vector.begin(), vector.end(), 0.0, std::plus<>(),
                                         [](double x) { return x * x; }));
}

double distance_between(std::span<const float> a, std::span<const float> b) {
  return std::sqrt(std::transform_reduce(a.begin(), a.end(), b.begin(), 0.0, std::plus<>(),
                                         [](double x, double y) { return (x - y) * (x - y); }));
}

// An output of zeros has no relative error: 1 unless it is met.
double relative_error(std::span<const float> out, std::span<const float> dense) {
  const double distance = distance_between(out, dense);
  const double length = norm_of(dense);
  if (length > 0.0) return distance / length;
  return distance > 0.0 ? 1.0 : 0.0;
}

void compare_outputs(const DenseStep& own, std::size_t step, std::size_t dim, DenseOutputs& dense,
                     CellResult& result) {
  if (step == dense.size()) dense.push_back(own);
  const DenseStep& other = dense[step];
  double error = 0.0;
  double weight = 0.0;
  for (std::size_t head = 0; head < own.lse.size(); ++head) {
    error += relative_error(std::span(own.out).subspan(head * dim, dim),
                            std::span(other.out).subspan(head * dim, dim));
    // Estimates of values' weights may be too large.
    weight += std::min(1.0, std::exp(double{own.lse[head]} - double{other.lse[head]}));
  }
  const auto heads = static_cast<double>(own.lse.size());
  result.output_error.push_back(error / heads);
  result.attended_weight.push_back(weight / heads);
}

std::vector<const Ledger*> replay_ledgers(std::span<const KvSequence> sequences) {
  std::vector<const Ledger*> ledgers;
  for (const KvSequence& sequence : sequences) ledgers.push_back(&sequence.ledger());
  return ledgers;
}

}  // namespace

KvConfig cache_of(const KvConfig& base, const CellKey& key, const Policy& policy,
                  const BenchSteps& steps) {
  KvConfig config = base;
  config.context = tokens_of(key, steps);
  config.sequences = key.sequences;
  config.policies = {policy};
  return config;
}

CellResult run_replay(const KvConfig& config, const CellKey& key, const BenchSteps& steps,
                      const ReplayRows& rows, DenseOutputs* dense, const CellWatch& watch) {
  KvCache cache(config);
  CellResult result;
  result.plan.kv = cache.plan();
  const ReplayClock::time_point start = ReplayClock::now();
  std::vector<KvSequence> sequences;
  std::vector<std::uint64_t> seen;
  for (const BenchRows* const own : rows.sequences) {
    KvSequence& sequence = sequences.emplace_back(cache.new_sequence());
    append_context(sequence, *own, rows.first, key.context, cache.plan().chunk);
    seen.push_back(sequence.ledger().history().back().index + 1);
  }
  result.prompt_seconds = replay_seconds(start);
  std::vector<KvSequence*> batch;
  for (KvSequence& sequence : sequences) batch.push_back(&sequence);
  StepInputs inputs(rows);
  StepOutputs outputs(config.shape, sequences.size());
  for (int step = 0; step < steps.warm_up + steps.steps; ++step) {
    const bool counts = step >= steps.warm_up;
    inputs.read(step, rows.first + key.context + step);
    const ReplayClock::time_point begin = ReplayClock::now();
    if (watch.check != nullptr) watch.check->begin_step();
    run_step(cache.begin_step(batch), inputs, config.shape.layers, outputs);
    const double seconds = replay_seconds(begin);
    const std::vector<LedgerEntry> entries = new_entries(replay_ledgers(sequences), seen);
    if (watch.check != nullptr) watch.check->end_step(entries, !counts);
    if (watch.positions != nullptr) watch.positions->add(sequences[0].selection(), entries);
    if (!counts) continue;
    add_step(entries, result.moved);
    result.step_seconds.push_back(seconds);
    if (dense == nullptr) continue;
    compare_outputs(outputs.first(), static_cast<std::size_t>(step - steps.warm_up), outputs.dim,
                    *dense, result);
  }
  return result;
}

}  // namespace sluice::tools
