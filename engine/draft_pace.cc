#include "engine/draft_pace.h"

#include <algorithm>

namespace sluice {
namespace {

// The weight of one draft in the rate of acceptance: a change of the text is noticed within about
// ten drafts.
constexpr double kNewest = 0.12;

}  // namespace

// A step of k drafts yields 1 + rate + ... + rate^k tokens and takes 1 + k * cost.
int DraftPace::best(double rate, double cost) const {
  int best = 0;
  double most = 1.0;
  double tokens = 1.0;
  double power = 1.0;
  for (int k = 1; k <= most_; ++k) {
    power *= rate;
    tokens += power;
    const double pace = tokens / (1.0 + k * cost);
    if (pace <= most) continue;
    most = pace;
    best = k;
  }
  return best;
}

int DraftPace::next(int kind, double own) const {
  const Kind& of = kinds_.at(static_cast<std::size_t>(kind));
  const double cost = cost_ + own;
  const int wanted = best(of.rate, cost);
  const bool may_pay = best(1.0, cost) > 0;
  return wanted == 0 && may_pay && of.skipped >= kRetrySteps ? 1 : wanted;
}

// Drafts behind the first that was rejected were not tested.
void DraftPace::note(int kind, int drafted, int accepted) {
  Kind& of = kinds_.at(static_cast<std::size_t>(kind));
  if (drafted == 0) {
    ++of.skipped;
    return;
  }
  of.skipped = 0;
  for (int i = 0; i < accepted; ++i) of.rate += kNewest * (1.0 - of.rate);
  if (accepted < drafted) of.rate -= kNewest * of.rate;
}

}  // namespace sluice
