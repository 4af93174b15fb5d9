// SparQ (Ribar et al. 2023): only the r channels of the key tiles in which the query is largest.
#include <algorithm>

#include "lib/scorers/estimate.h"
#include "lib/scorers/own.h"
#include "sluice/errors.h"

namespace sluice::scorers {
namespace {

class Sparq : public Scorer {
 public:
  Sparq()
      : Scorer({"sparq",
                ScorerInfo::Kind::logits,
                {{.name = "r", .least = 1.0, .range = "1 to head_dim"}}}) {}
  bool runs_on(Processor /*processor*/) const override { return true; }
  bool by_backend() const override { return true; }
  bool digests() const override { return true; }
  bool reads_channels() const override { return true; }

  void check(const ScorerUse& use) const override {
    if (channels(use) <= use.shape.head_dim) return;
    throw Error(ErrorCode::usage, "policy: the r of sparq is " + std::to_string(channels(use)) +
                                      "; it has to be from 1 to " +
                                      std::to_string(use.shape.head_dim) +
                                      ", the model's head_dim");
  }

  IndexNeeds needs(const ScorerUse& /*use*/) const override { return {.tiles = true}; }
  void score(const RunScorer& call) const override {
    estimate(call, Selector::sparq, channels(call.use));
  }
  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    return tile_bytes(use, extent, channels(use));
  }

 private:
  static int channels(const ScorerUse& use) {
    return static_cast<int>(use.parameter("r", std::max(1, use.shape.head_dim / 4)));
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_sparq() { return std::make_shared<Sparq>(); }

}  // namespace sluice::scorers
