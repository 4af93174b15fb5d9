// The version of these headers.
#pragma once

namespace sluice {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace sluice
