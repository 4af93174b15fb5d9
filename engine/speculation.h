// Drafts for the steps of an answer, as many as pay.
#pragma once

#include <cstdint>
#include <span>

#include "engine/draft_pace.h"
#include "sluice/drafter.h"
#include "sluice/engine.h"

namespace sluice {

class Speculation {
 public:
  // Up to `most` drafts a step; none if `drafter` is null. `weight_bytes`: of the model.
  Speculation(Drafter* drafter, int most, std::uint64_t weight_bytes);

  // Drafts behind `tokens`, those of the session and the latest one drawn: at most `left`, and no
  // more than the session's next step can verify.
  Drafts next(std::span<const TokenId> tokens, int left, const Session& session,
              const Sampler& sampler);
  // A step that verified `drafts`.
  void note(const Drafts& drafts, std::size_t accepted);

  const DraftCounts& counts() const { return counts_; }

 private:
  Drafter* drafter_;
  int most_;
  std::uint64_t weight_bytes_;
  DraftPace pace_;
  DraftCounts counts_;
};

}  // namespace sluice
