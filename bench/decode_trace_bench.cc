// Recorded steps are reused: three sequences that decode in turn and together, with chunks of a
// prompt between them, need only one recording per kind of step.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "bench/made_up_model.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "sluice/errors.h"

namespace sluice::bench {
namespace {

constexpr std::int64_t kSteps = 1000;
constexpr std::int64_t kContext = 4096;
constexpr std::int64_t kPiece = 256;        // of the prompt
constexpr std::int64_t kStepsPerPiece = 5;  // and between two chunks
constexpr std::int64_t kStepsPerPolicy = 250;
constexpr std::int64_t kLeastCapacity = 1024;
// Two lengths pass a power of two while decoding.
constexpr std::array<std::int64_t, 3> kLengths = {900, 1900, 2800};

class Trace {
 public:
  Trace(MadeUpModel& model, const std::shared_ptr<KvPool>& pool)
      : model_(&model), pool_(pool), prompt_(pool) {
    for (const std::int64_t length : kLengths) {
      sessions_.emplace_back(pool);
      model.fill(sessions_.back(), length);
    }
  }

  // Runs all steps, each launched as one recording of its kind.
  void run() {
    for (std::int64_t step = 0; step < kSteps; ++step) {
      if (step % kStepsPerPolicy == 0) use(static_cast<std::size_t>(step / kStepsPerPolicy));
      if (step % kStepsPerPiece == 0) prefill();
      decode(step);
    }
  }

  std::size_t kinds() const { return kinds_.size(); }
  double host_seconds() const { return host_seconds_; }
  std::int64_t pieces() const { return pieces_; }

 private:
  void use(std::size_t number) {
    policy_ = number % pool_->policies().size();
    for (KvSession& session : sessions_) session.use(pool_->policies()[policy_]);
  }

  void prefill() {
    if (prompt_.length() + kPiece > kContext) prompt_.truncate(0);
    const std::vector<TokenId> tokens(kPiece, 267);
    model_->decoder().step(tokens, Phase::prefill, prompt_);
    ++pieces_;
  }

  // Decodes one of the sequences, or all of them every fourth time.
  void decode(std::int64_t step) {
    const auto turn = static_cast<std::size_t>(step % 4);
    std::vector<KvSession*> batch;
    std::int64_t longest = kLeastCapacity;
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      if (turn < sessions_.size() && turn != i) continue;
      batch.push_back(&sessions_[i]);
      longest = std::max(longest, sessions_[i].length() + 1);
    }
    const auto capacity =
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(longest)));
    kinds_.insert({batch.size(), std::min(capacity, kContext), policy_});
    host_seconds_ += model_->decode(batch);
  }

  MadeUpModel* model_;
  std::shared_ptr<KvPool> pool_;
  KvSession prompt_;
  std::vector<KvSession> sessions_;
  std::size_t policy_ = 0;
  std::set<std::tuple<std::size_t, std::int64_t, std::size_t>> kinds_;
  double host_seconds_ = 0.0;
  std::int64_t pieces_ = 0;
};

KvPlan plan_of(const MadeUpModel& model, std::span<const Policy> policies, bool resident) {
  KvRequest request;
  request.shape = model.kv();
  request.on = model.backend().info();
  request.context = kContext;
  request.chunk = kPiece;
  request.sequences = std::int64_t{kLengths.size()} + 1;
  request.policies = policies;
  KvPlan whole = plan_kv(request);
  if (resident) return whole;
  request.device_cap =
      whole.index_bytes + whole.work_bytes + whole.table_bytes + (std::uint64_t{16} << 20);
  return plan_kv(request);
}

void run(benchmark::State& state) {
  MadeUpModel& model = made_up_model(ModelShape::sluice_22m);
  const std::vector<Policy> policies = {parse_policy("dense"), parse_policy("sluice")};
  Trace trace(model, std::make_shared<KvPool>(
                         model.queue(), plan_of(model, policies, state.range(0) != 0), policies));
  const ReplayCounts before = model.queue()->replay_counts();
  for (auto _ : state) trace.run();
  const ReplayCounts after = model.queue()->replay_counts();
  const std::int64_t recordings = after.recordings - before.recordings;
  const std::int64_t launches = after.launches - before.launches;
  const auto kinds = static_cast<std::int64_t>(trace.kinds());
  state.counters["recordings"] = static_cast<double>(recordings);
  state.counters["launches"] = static_cast<double>(launches);
  state.counters["kinds"] = static_cast<double>(kinds);
  state.counters["prompt_pieces"] = static_cast<double>(trace.pieces());
  state.counters["host_us"] = trace.host_seconds() * 1e6 / static_cast<double>(kSteps);
  if (recordings == kinds && launches == kSteps) return;
  state.SkipWithError((std::to_string(kSteps) + " steps of " + std::to_string(kinds) +
                       " kinds took " + std::to_string(recordings) + " recordings and " +
                       std::to_string(launches) + " launches")
                          .c_str());
}

// Argument: 1 if all rows stay on the device.
void decode_trace(benchmark::State& state) {
  try {
    run(state);
  } catch (const Error& error) {
    state.SkipWithError(error.what());
  }
}
BENCHMARK(decode_trace)
    ->ArgName("resident")
    ->Arg(1)
    ->Arg(0)
    ->Iterations(1)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sluice::bench
