// Sluice's own scorers, in the order in which messages name them. They are here, not beside the
// sessions that use them, because a policy cannot be read without knowing the selectors.
#pragma once

#include <memory>

#include "sluice/scorer.h"

namespace sluice::scorers {

std::shared_ptr<const Scorer> make_dense();
std::shared_ptr<const Scorer> make_streaming();
std::shared_ptr<const Scorer> make_exact();
std::shared_ptr<const Scorer> make_int4();
std::shared_ptr<const Scorer> make_quest();
std::shared_ptr<const Scorer> make_sparq();
// On the host only, by what sluice/scorer.h has for every scorer.
std::shared_ptr<const Scorer> make_double_sparsity();
std::shared_ptr<const Scorer> make_snapkv();
std::shared_ptr<const Scorer> make_h2o();

}  // namespace sluice::scorers
