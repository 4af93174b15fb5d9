// The largest sizes of a model that are read, whatever file they stand in: memory grows with them.
#pragma once

#include <cstdint>

namespace sluice {

inline constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{1} << 20;
inline constexpr int kMaxHidden = 1 << 17;
inline constexpr int kMaxIntermediate = 1 << 20;
inline constexpr int kMaxLayers = 1024;
inline constexpr int kMaxHeads = 1024;
inline constexpr int kMaxVocabulary = 1 << 22;
inline constexpr std::int64_t kMaxPositions = std::int64_t{1} << 30;
inline constexpr int kMinHeadDim = 16;  // and even
inline constexpr int kMaxHeadDim = 256;
inline constexpr double kMaxTheta = 1e12;
inline constexpr double kMinNormEps = 1e-12;
inline constexpr double kMaxNormEps = 1.0;
inline constexpr double kMaxRopeFactor = 1e6;

}  // namespace sluice
