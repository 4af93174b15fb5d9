// A scorer that is not Sluice's own, whose errors name it.
#pragma once

#include <memory>

#include "sluice/scorer.h"

namespace sluice::scorers {

// Forwards to `scorer`. What it throws becomes an Error that names it: of its own code if it is an
// Error, else Error{unsupported}.
std::shared_ptr<const Scorer> make_guarded(std::shared_ptr<const Scorer> scorer);

}  // namespace sluice::scorers
