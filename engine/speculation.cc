#include "engine/speculation.h"

#include <algorithm>
#include <array>

namespace sluice {
namespace {

// The share of a decode step's bytes that are not weights, by what the ledger counted so far.
double own_share(const Session& session, std::uint64_t weight_bytes) {
  const Ledger& ledger = session.ledger();
  const std::uint64_t tokens = ledger.tokens(Phase::decode);
  if (tokens == 0) return 0.0;
  constexpr std::array kTiers = {Tier::device, Tier::host, Tier::disk};
  std::uint64_t bytes = 0;
  for (const Tier from : kTiers) {
    for (const Tier to : kTiers) {
      for (std::size_t cause = 0; cause < kCauses; ++cause) {
        bytes += ledger.total(Phase::decode, from, to, static_cast<Cause>(cause)).bytes;
      }
    }
  }
  const double own = static_cast<double>(bytes) / static_cast<double>(tokens);
  return own / (own + static_cast<double>(weight_bytes));
}

}  // namespace

Speculation::Speculation(Drafter* drafter, int most, std::uint64_t weight_bytes)
    : drafter_(drafter),
      most_(most),
      weight_bytes_(weight_bytes),
      pace_(most, drafter == nullptr ? 0.0 : drafter->cost()) {}

Drafts Speculation::next(std::span<const TokenId> tokens, int left, const Session& session,
                         const Sampler& sampler) {
  if (drafter_ == nullptr) return {};
  const int room = static_cast<int>(std::min<std::int64_t>(left, session.draft_room()));
  if (room < 1) return {};
  // The kind is known only once there are drafts, so those that cost nothing come first.
  const bool costs = drafter_->cost() > 0.0;
  const double own = own_share(session, weight_bytes_);
  const int wanted = costs ? pace_.next(0, own) : most_;
  Drafts drafts;
  if (wanted > 0) drafts = drafter_->propose(tokens, std::min(wanted, room), sampler);
  if (costs && wanted == 0) pace_.note(0, 0, 0);
  if (drafts.tokens.empty()) return {};
  const int paying = pace_.next(drafts.kind, own);
  if (paying == 0) pace_.note(drafts.kind, 0, 0);
  drafts.tokens.resize(std::min(drafts.tokens.size(), static_cast<std::size_t>(paying)));
  return drafts;
}

void Speculation::note(const Drafts& drafts, std::size_t accepted) {
  if (drafts.tokens.empty()) return;
  ++counts_.steps;
  counts_.drafted += std::ssize(drafts.tokens);
  counts_.accepted += static_cast<std::int64_t>(accepted);
  pace_.note(drafts.kind, static_cast<int>(drafts.tokens.size()), static_cast<int>(accepted));
}

}  // namespace sluice
