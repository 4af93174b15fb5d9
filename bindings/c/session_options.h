// The options of sessions, for sessions and plans.
#pragma once

#include "bindings/c/sluice.h"
#include "sluice/engine.h"

namespace sluice::c {

SessionOptions session_options(const Engine& engine, const sluice_session_options* options);

}  // namespace sluice::c
