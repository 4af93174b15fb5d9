// The name of an operation in traces. Every parameter struct has one.
#pragma once

#include <string_view>

#include "sluice/trace.h"

namespace sluice {

struct OperationLabel {
  std::string_view name;
  TraceKind kind;
};

}  // namespace sluice
